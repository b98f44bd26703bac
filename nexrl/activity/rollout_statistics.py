"""Numbers about rollouts between two steps: latencies, time-outs, tokens, queueing, goodput.

Fed by the ActivityTracker with every ended rollout and every trained batch; read once a step.
Only sums and one float for each rollout are kept, never the rollouts themselves.
"""

from __future__ import annotations

import numpy as np

from nexrl.activity.means import Means
from nexrl.types import Batch, RolloutRecord, TokenRow, Trajectory, TrajectoryStatus

_PERCENTILES = (("p50", 50.0), ("p95", 95.0), ("p99", 99.0))
_TIMEOUT_ERRORS = frozenset({"DeadlineError", "TimeoutError"})


def num_generated_tokens(row: TokenRow) -> int:
    """Tokens the policy drew; where that is unknown, the trained ones."""
    drawn = row.loss_mask if row.sampled is None else row.sampled
    return int(np.count_nonzero(drawn))


class RolloutStatistics:
    """Means since the last `flush`, and run totals.

    Invariant: run totals never decrease, so the share of trained tokens is a share of everything
    that was ever generated, also of what failed or was filtered.
    """

    def __init__(self, now: float) -> None:
        self.num_rollouts = 0
        self.num_trajectories = 0
        self._num_generated_tokens = 0
        self._num_trained_trajectories = 0
        self._num_trained_tokens = 0
        self._means = Means()
        self._latencies: list[float] = []
        self._flushed_at = now
        self._flushed_totals = self._totals()

    def add(self, record: RolloutRecord) -> None:
        """A rollout ended."""
        self.num_rollouts += 1
        for trajectory in record.trajectories:
            self._add_trajectory(trajectory)
        if record.status is TrajectoryStatus.CANCELLED:
            return
        self._latencies.append(record.duration_s)
        if (failure := record.failure) is not None:
            timed_out = failure.error_type in _TIMEOUT_ERRORS
        else:
            timed_out = any(t.truncation_cause == "deadline" for t in record.trajectories)
        reward_failed = failure is not None and failure.where == "reward"
        self._means.add("rollout/timeout_rate", timed_out)
        self._means.add("reward_service/failure_rate", reward_failed)

    def _add_trajectory(self, trajectory: Trajectory) -> None:
        self.num_trajectories += 1
        for row in trajectory.rows:
            self._num_generated_tokens += num_generated_tokens(row)
        if trajectory.reward is not None:
            self._means.add("reward/mean", trajectory.reward)
        for name, value in trajectory.metrics.items():
            self._means.add(f"rollout/{name}", value)
        for call in trajectory.provenance.segments:
            self._means.add(f"queue_delay/{call.kind}", call.started_s - call.queued_s)
            if call.kind == "reward":
                self._means.add("reward_service/latency", call.finished_s - call.started_s)

    def add_trained(self, batch: Batch) -> None:
        """A batch was trained and its version published."""
        trajectories = batch.trajectories
        self._num_trained_trajectories += len(trajectories)
        self._num_trained_tokens += sum(t.num_response_tokens for t in trajectories)

    def flush(self, now: float) -> dict[str, float]:
        """Metrics since the last flush; names without a single observation are absent."""
        metrics = self._means.flush()
        if self._latencies:
            values = np.percentile(self._latencies, [q for _, q in _PERCENTILES])
            for (name, _), value in zip(_PERCENTILES, values, strict=True):
                metrics[f"rollout/latency_{name}"] = float(value)
        if self.num_rollouts:
            elapsed = max(now - self._flushed_at, 1e-9)
            ended, tokens, trained = (
                (total - before) / elapsed
                for total, before in zip(self._totals(), self._flushed_totals, strict=True)
            )
            metrics["rollout/trajectories_per_s"] = ended
            metrics["rollout/tokens_per_s"] = tokens
            metrics["goodput/trajectories_per_hour"] = trained * 3600.0
        if self._num_generated_tokens:
            metrics["goodput/trained_tokens_share"] = (
                self._num_trained_tokens / self._num_generated_tokens
            )
        self._latencies.clear()
        self._flushed_at, self._flushed_totals = now, self._totals()
        return metrics

    def _totals(self) -> tuple[int, int, int]:
        """Of what is logged as a rate: trajectories, generated tokens, trained trajectories."""
        return (
            self.num_trajectories,
            self._num_generated_tokens,
            self._num_trained_trajectories,
        )
