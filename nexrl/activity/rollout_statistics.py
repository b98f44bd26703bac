"""Numbers about rollouts between two steps: latencies, time-outs, tokens, queueing, goodput.

Fed by the ActivityTracker with every ended rollout and every trained batch; read once a step.
Only sums and one float for each rollout are kept, never the rollouts themselves.
"""

from __future__ import annotations

import numpy as np

from nexrl.types import Batch, RolloutRecord, TokenRow, Trajectory, TrajectoryStatus

_PERCENTILES = (("p50", 50.0), ("p95", 95.0), ("p99", 99.0))
_TIMEOUT_ERRORS = frozenset({"DeadlineError", "TimeoutError"})


def num_generated_tokens(row: TokenRow) -> int:
    """Tokens the policy drew; where that is unknown, the trained ones."""
    drawn = row.loss_mask if row.sampled is None else row.sampled
    return int(np.count_nonzero(drawn))


class RolloutStatistics:
    """Sums since the last `flush`, and run totals.

    Invariant: run totals never decrease, so the share of trained tokens is a share of everything
    that was ever generated, also of what failed or was filtered.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self.num_rollouts = 0
        self.num_trajectories = 0
        self.num_generated_tokens = 0
        self.num_trained_trajectories = 0
        self.num_trained_tokens = 0
        self._latencies: list[float] = []
        self._num_timeouts = 0
        self._num_reward_failures = 0
        self._tokens_before = 0
        self._trained_before = 0
        self._trajectories_before = 0
        self._delays: dict[str, list[float]] = {}
        self._rewards = [0.0, 0.0]
        self._own: dict[str, list[float]] = {}

    def add(self, record: RolloutRecord) -> None:
        """A rollout ended."""
        self.num_rollouts += 1
        for trajectory in record.trajectories:
            self._add_trajectory(trajectory)
        if record.status is TrajectoryStatus.CANCELLED:
            return
        self._latencies.append(record.duration_s)
        failure = record.failure
        if failure is not None:
            self._num_timeouts += failure.error_type in _TIMEOUT_ERRORS
            self._num_reward_failures += failure.where == "reward"
        elif any(t.truncation_cause == "deadline" for t in record.trajectories):
            self._num_timeouts += 1

    def _add_trajectory(self, trajectory: Trajectory) -> None:
        self.num_trajectories += 1
        for row in trajectory.rows:
            self.num_generated_tokens += num_generated_tokens(row)
        if trajectory.reward is not None:
            self._rewards[0] += trajectory.reward
            self._rewards[1] += 1.0
        for name, value in trajectory.metrics.items():
            sums = self._own.setdefault(name, [0.0, 0.0])
            sums[0] += value
            sums[1] += 1.0
        for segment in trajectory.provenance.segments:
            delays = self._delays.setdefault(segment.kind, [0.0, 0.0, 0.0])
            delays[0] += segment.started_s - segment.queued_s
            delays[1] += segment.finished_s - segment.started_s
            delays[2] += 1.0

    def add_trained(self, batch: Batch) -> None:
        """A batch was trained and its version published."""
        trajectories = batch.trajectories
        self.num_trained_trajectories += len(trajectories)
        self.num_trained_tokens += sum(t.num_response_tokens for t in trajectories)

    def flush(self, now: float) -> dict[str, float]:
        """Metrics since the last flush; names without a single observation are absent."""
        elapsed = max(now - self._since, 1e-9)
        metrics = self._latency_metrics()
        if self._rewards[1]:
            metrics["reward/mean"] = self._rewards[0] / self._rewards[1]
        for name, (total, number) in self._own.items():
            metrics[f"rollout/{name}"] = total / number
        if self.num_rollouts:
            tokens = self.num_generated_tokens - self._tokens_before
            ended = self.num_trajectories - self._trajectories_before
            metrics["rollout/trajectories_per_s"] = ended / elapsed
            trained = self.num_trained_trajectories - self._trained_before
            metrics["rollout/tokens_per_s"] = tokens / elapsed
            metrics["goodput/trajectories_per_hour"] = trained / elapsed * 3600.0
        if self.num_generated_tokens:
            metrics["goodput/trained_tokens_share"] = (
                self.num_trained_tokens / self.num_generated_tokens
            )
        for kind, (queued_s, served_s, num_calls) in self._delays.items():
            metrics[f"queue_delay/{kind}"] = queued_s / num_calls
            if kind == "reward":
                metrics["reward_service/latency"] = served_s / num_calls
        self._since = now
        self._latencies.clear()
        self._delays.clear()
        self._own.clear()
        self._rewards = [0.0, 0.0]
        self._trajectories_before = self.num_trajectories
        self._num_timeouts = self._num_reward_failures = 0
        self._tokens_before = self.num_generated_tokens
        self._trained_before = self.num_trained_trajectories
        return metrics

    def _latency_metrics(self) -> dict[str, float]:
        num_ended = len(self._latencies)
        if not num_ended:
            return {}
        values = np.percentile(self._latencies, [q for _, q in _PERCENTILES])
        metrics = {
            f"rollout/latency_{name}": float(value)
            for (name, _), value in zip(_PERCENTILES, values, strict=True)
        }
        metrics["rollout/timeout_rate"] = self._num_timeouts / num_ended
        metrics["reward_service/failure_rate"] = self._num_reward_failures / num_ended
        return metrics
