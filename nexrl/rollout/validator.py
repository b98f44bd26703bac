"""Validator: held-out items through the same kind of worker, for one policy version.

Called by the controller between activation and admission (`sync`). Its rollouts have a runner, a
seed domain and records of their own: they never reach the trajectory pool, use no admission slots
and draw no training randomness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nexrl.config.schema import ValidateConfig
from nexrl.errors import ConfigError, FailureClass, InvariantError, RunStoppedError
from nexrl.protocols import Evaluator, Tracker
from nexrl.rollout.rollout_worker import RolloutWorker
from nexrl.rollout.runner import RolloutRunner
from nexrl.types import (
    Draw,
    PolicyVersion,
    RolloutRecord,
    Trajectory,
    TrajectoryStatus,
    derive_seed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """What one version scores on the held-out items."""

    version: PolicyVersion
    """The version that was judged."""
    metrics: Mapping[str, float]
    """validation/*: see `summarise`."""
    records: tuple[RolloutRecord, ...]
    """Every rollout, in order of items and members; failed ones included."""


class Validator:
    """Evaluates versions on a fixed list of draws.

    Invariant: every rollout is in exactly one of scored, unscored and failed, and each of the three
    is reported; a failed rollout is no reward 0 and never in the denominator of accuracy.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        draws: Sequence[Draw],
        *,
        config: ValidateConfig,
        run_id: str,
        seed: int,
        tracker: Tracker,
        evaluator: Evaluator | None = None,
    ) -> None:
        """`worker` is an instance of its own, with the sampling of section `validate`. With an
        `evaluator` the rollouts are judged by it and not by their rewards."""
        self._evaluator = evaluator
        self._draws = tuple(draws[: config.max_items])
        self._num_rollouts = len(self._draws) * config.num_rollouts
        self._config = config
        self._tracker = tracker
        self._runner = RolloutRunner(
            worker,
            num_rollouts=config.num_rollouts,
            deadline_s=min(worker.context.config.deadline_s, config.deadline_s),
            run_id=f"{run_id}-validation",
            run_seed=derive_seed(seed, "validation"),
            tracker=_ValidationTracker(tracker),
        )

    async def validate(self, version: PolicyVersion) -> ValidationResult:
        """Run all draws; raises RunStoppedError when no rollout ended well.

        Past `validate.deadline_s` what still runs is cancelled and counted as failed.
        """
        records: dict[tuple[int, int], RolloutRecord] = {}
        await self._runner.start()
        try:
            async with asyncio.timeout(self._config.deadline_s):
                async with asyncio.TaskGroup() as groups:
                    for index, draw in enumerate(self._draws):
                        groups.create_task(self._run(index, draw, records))
        except TimeoutError:
            self._tracker.warn(
                f"validation of {version} reached its deadline of {self._config.deadline_s:g} s "
                "(validate.deadline_s); rollouts that had not ended count as failed"
            )
        ordered = tuple(records[key] for key in sorted(records))
        self._check(ordered, version)
        metrics = summarise(ordered, self._config, num_rollouts=self._num_rollouts)
        if self._evaluator is not None:
            metrics |= await self._judged(self._evaluator, ordered)
        return ValidationResult(version=version, metrics=metrics, records=ordered)

    @staticmethod
    async def _judged(evaluator: Evaluator, records: Sequence[RolloutRecord]) -> dict[str, float]:
        """validation/* by the evaluator's names; what it looked at counts as scored."""
        found = await evaluator.evaluate([t for record in records for t in _kept(record)])
        return {
            **{f"validation/{name}": value for name, value in found.items()},
            "validation/unscored": 0.0,
        }

    async def aclose(self) -> None:
        """End running rollouts and the worker; idempotent."""
        await self._runner.aclose()

    async def _run(
        self, index: int, draw: Draw, records: dict[tuple[int, int], RolloutRecord]
    ) -> None:
        async def on_end(record: RolloutRecord) -> None:
            records[index, record.member] = record

        await self._runner.run_group(draw, on_end)

    def _check(self, records: Sequence[RolloutRecord], version: PolicyVersion) -> None:
        """All failed, or tokens of another version: then there is no result to report."""
        if self._draws and not any(_kept(record) for record in records):
            first = next((r.failure for r in records if r.failure is not None), None)
            why = f"; first: {first.error_type}: {first.message}" if first else ""
            raise RunStoppedError(
                f"all {self._num_rollouts} validation rollouts of {version} failed{why}",
                failure_class=first.failure_class if first else FailureClass.INFRASTRUCTURE,
            )
        for record in records:
            for trajectory in _kept(record):
                for row in trajectory.rows:
                    others = [s.version for s in row.versions if s.version != version]
                    if others and row.version_source != "bounded":
                        raise InvariantError(
                            f"validation of {version} drew tokens of {others[0]} in rollout "
                            f"{record.rollout_id}"
                        )


def summarise(
    records: Sequence[RolloutRecord], config: ValidateConfig, *, num_rollouts: int
) -> dict[str, float]:
    """Metrics of a validation; means are over rollouts, so forks and roles do not weigh more.

    accuracy and reward: over scored rollouts. response_length (tokens) and truncated: over rollouts
    that ended well. failed, unscored and num_rollouts: counts; a rollout that never began failed.
    Absent when there is nothing to average.
    """
    kept = [trajectories for record in records if (trajectories := _kept(record))]
    part = config.success_part
    scored = _means(kept, lambda t: t.reward)
    judged = scored if part is None else _means(kept, lambda t: t.reward_parts.get(part))
    if scored and not judged:
        parts = sorted({part for group in kept for t in group for part in t.reward_parts})
        raise ConfigError(
            f"validate.success_part: no trajectory has a reward part {part!r}; "
            f"there are: {', '.join(parts) or 'none'}"
        )
    values: Mapping[str, Sequence[float]] = {
        "accuracy": [float(v >= config.success_reward) for v in judged],
        "reward": scored,
        "response_length": [sum(t.num_response_tokens for t in group) for group in kept],
        "truncated": [any(t.status is TrajectoryStatus.TRUNCATED for t in group) for group in kept],
    }
    return {
        **{f"validation/{name}": sum(v) / len(v) for name, v in values.items() if v},
        "validation/failed": float(num_rollouts - len(kept)),
        "validation/unscored": float(len(kept) - len(scored)),
        "validation/num_rollouts": float(num_rollouts),
    }


def _kept(record: RolloutRecord) -> list[Trajectory]:
    return [t for t in record.trajectories if t.trainable]


def _means(
    rollouts: Sequence[Sequence[Trajectory]], value: Callable[[Trajectory], float | None]
) -> list[float]:
    """For each rollout that has values: their mean over its trajectories."""
    found = []
    for trajectories in rollouts:
        values = [v for t in trajectories if (v := value(t)) is not None]
        if values:
            found.append(sum(values) / len(values))
    return found


class _ValidationTracker:
    """The run's tracker without its rollout statistics: validation is outside the ledger, the
    failure rate and the training metrics."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    @contextmanager
    def activity(self, kind: str, name: str) -> Iterator[None]:
        """Shown as validation."""
        with self._tracker.activity("validation", name):
            yield

    def observe(self, metric: str, value: float) -> None:
        """Under validation/."""
        self._tracker.observe(f"validation/{metric}", value)

    def count(self, metric: str, amount: float = 1.0) -> None:
        """Under validation/."""
        self._tracker.count(f"validation/{metric}", amount)

    def rollout_ended(self, record: RolloutRecord) -> None:
        """Kept by the validator alone."""

    def warn(self, message: str) -> None:
        """As it is."""
        self._tracker.warn(message)
