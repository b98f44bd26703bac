"""From a rollout that ended well to `ready`: annotators run, then the trainer's needs are checked.

Called by `TrajectoryPool.end_rollout` between storing a record and adding it to its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from nexrl.errors import user_frame
from nexrl.pool.door import first_unmet_need
from nexrl.pool.ledger import Outcome
from nexrl.pool.open_group import UNMET
from nexrl.pool.record_keeper import RecordKeeper
from nexrl.pool.trajectory_store import StoredRollout
from nexrl.protocols import Annotator, Tracker
from nexrl.types import RolloutRecord, Trajectory


class Scoring:
    """Invariant: what it calls `ready` meets every need; a failed annotator makes the rollout
    failed and an absent value makes it filtered, neither ever a 0."""

    def __init__(
        self,
        *,
        annotators: Sequence[Annotator],
        needs: Sequence[str],
        logprobs_optional: bool,
        keeper: RecordKeeper,
        tracker: Tracker,
    ) -> None:
        self._annotators = tuple(annotators)
        self._needs = tuple(needs)
        self._logprobs_optional = logprobs_optional
        self._keeper = keeper
        self._tracker = tracker

    async def judge(
        self, record: RolloutRecord, stored: StoredRollout | None
    ) -> tuple[RolloutRecord, Outcome, str]:
        """The annotated record, and `ready` or why not. Stores what annotators add."""
        for annotator in self._annotators:
            before = record
            try:
                record = await _annotate(annotator, record)
            except Exception as error:  # noqa: BLE001 - user code or a service: this rollout fails
                self._tracker.warn(
                    f"annotator {annotator.provides!r} failed for {record.rollout_id}: "
                    f"{type(error).__name__}: {error} ({user_frame(error)})"
                )
                return record, "failed", f"annotator/{annotator.provides}"
            self._keeper.annotate(
                stored,
                before,
                record,
                kind=annotator.provides,
                producer=type(annotator).__qualname__,
            )
        trainable = [t for t in record.trajectories if t.trainable]
        if not trainable:
            return record, "filtered", "no_trainable_rows"
        unmet = first_unmet_need(trainable, self._needs, logprobs_optional=self._logprobs_optional)
        if unmet is None:
            return record, "ready", ""
        self._tracker.warn(
            f"rollouts without {unmet} leave their groups; they are not scored 0 "
            f"(counted as ledger/filtered/{UNMET}{unmet})"
        )
        return record, "filtered", f"{UNMET}{unmet}"


async def _annotate(annotator: Annotator, record: RolloutRecord) -> RolloutRecord:
    annotated: list[Trajectory] = []
    for trajectory in record.trajectories:
        if trajectory.trainable:
            async with asyncio.timeout(annotator.deadline_s):
                annotated.append(await annotator.annotate(trajectory))
        else:
            annotated.append(trajectory)
    return replace(record, trajectories=tuple(annotated))
