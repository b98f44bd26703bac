"""Draws, rollout records, groups and batches: the units of the pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nexrl.types.quick import quick
from nexrl.types.trajectory import Failure, Trajectory, TrajectoryStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One visit to a data item."""

    item_id: str
    """Stable id of the item."""
    draw: int
    """0 for the first visit, 1 in epoch 2 ..."""
    row: Mapping[str, Any]
    """The item's columns."""
    source: str = ""
    """Name of the data source it came from."""
    order: int = 0
    """Position in the loader's order, from 0; unique in a stage."""

    @property
    def key(self) -> str:
        """`item_id/draw`: the default rollout-group id."""
        return f"{self.item_id}/{self.draw}"


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One finished run of `RolloutWorker.step` for (item, draw, member); the ledger's unit."""

    rollout_id: str
    """Unique in the run."""
    group_key: str
    """The rollout group (`Draw.key`) it belongs to."""
    member: int
    """Which of the group's rollouts, from 0."""
    status: TrajectoryStatus
    """How it ended; `failed` leaves at most a record, never a training signal."""
    reason: str = ""
    """Ledger reason when failed or cancelled, for example `infrastructure/ServiceError`."""
    trajectories: tuple[Trajectory, ...] = ()
    """What it left; failed and cancelled ones may leave what they had, for the store only."""
    failure: Failure | None = None
    """Why it failed."""
    attempts: int = 1
    """Attempts it took."""
    duration_s: float = 0.0
    """From start to end, retries included, in seconds of the run's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The rollouts of one draw: unit of admission, hand-out and failure policy."""

    group_key: str
    """`Draw.key`."""
    policy: str
    """Policy that the group trains."""
    source: str
    """Data source."""
    admission: int
    """Position in admission order, from 0."""
    admitted_version: int
    """Lowest version number active when it was admitted."""
    records: tuple[RolloutRecord, ...]
    """Kept members in member order."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Trainable trajectories of kept members, in member order."""
        return tuple(t for record in self.records for t in record.trajectories if t.trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rollout groups trained together; ends in exactly one publish."""

    batch_id: int
    """Counts hand-outs, from 0."""
    policy: str
    """Policy to train."""
    version: int
    """Version number that consumes it."""
    groups: tuple[RolloutGroup, ...]
    """In admission order when the mode is sync."""
    num_expected_groups: int
    """B; more than len(groups) when the batch was closed short."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trainable trajectories, group by group."""
        return [t for group in self.groups for t in group.trajectories]
