"""Arrivals: from a rollout that has ended to its place in its group.

Owned by `TrajectoryPool`, between `end_rollout` and the end of the group: the record passes the
door, is stored, annotated and judged by the trainer's needs, and its member leaves `in_flight`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from nexrl.errors import InvariantError, user_frame
from nexrl.pool.door import (
    check_identity,
    first_unmet_need,
    ledger_reason,
    prompt_fingerprint,
    with_group_ids,
)
from nexrl.pool.ledger import Ledger, Outcome
from nexrl.pool.open_group import UNMET, Member, OpenGroup
from nexrl.pool.pool_metrics import PoolMetrics
from nexrl.pool.record_keeper import RecordKeeper
from nexrl.pool.trajectory_store import StoredRollout
from nexrl.protocols import Annotator, Tracker
from nexrl.types import RolloutRecord, Trajectory


@dataclass(slots=True)
class Versions:
    """Version numbers as the pool knows them. Invariant: base <= active <= newest."""

    base: int
    """At which counting began: the first version of the stage or of the resume."""
    active: int
    """Lowest that any replica serves."""
    newest: int
    """Highest that any token may be of."""

    def activate(self, version: int) -> None:
        """`version` is now the lowest that any replica serves."""
        if version < self.active:
            raise InvariantError(f"version {version} activated after version {self.active}")
        self.active = version
        self.newest = max(self.newest, version)


class Arrivals:
    """The open groups by key, and how their rollouts end.

    Invariants: the first end of a member counts, a later one is only counted; a record is stored
    before anything is made of it; what is `ready` meets every need; a failed annotator makes the
    rollout failed and an absent value makes it filtered, neither ever a 0; a rollout of a group
    that was never opened stops the run.
    """

    def __init__(
        self,
        *,
        policy: str,
        incarnation: int,
        is_sync: bool,
        versions: Versions,
        annotators: Sequence[Annotator],
        needs: Sequence[str],
        ledger: Ledger,
        keeper: RecordKeeper,
        metrics: PoolMetrics,
        tracker: Tracker,
    ) -> None:
        self._policy = policy
        self._incarnation = incarnation
        self._is_sync = is_sync
        self._versions = versions
        self._annotators = tuple(annotators)
        self._needs = tuple(needs)
        self._ledger = ledger
        self._keeper = keeper
        self._metrics = metrics
        self._tracker = tracker
        self._groups: dict[str, OpenGroup] = {}
        self._ended_keys = _EndedKeys()
        self.counts = Counter(duplicate_ends=0, late_ends=0, rows_without_logprobs=0)
        """Ends that came twice or too late, and trained rows without logprobs."""

    def __contains__(self, key: str) -> bool:
        """Whether a group of this key was ever opened."""
        return key in self._groups or key in self._ended_keys

    def open(self, group: OpenGroup) -> None:
        """Rollouts of this group may end from now on."""
        self._groups[group.draw.key] = group

    def close(self, group: OpenGroup) -> None:
        """All of its rollouts have ended."""
        del self._groups[group.draw.key]
        self._ended_keys.add(group.draw.key)

    async def end(self, record: RolloutRecord) -> OpenGroup | None:
        """A rollout has ended; its group, when it was the last one of it."""
        group = self._groups.get(record.group_key)
        if group is None:
            self._count_late_end(record)
            return None
        if not 0 <= record.member < len(group.members):
            raise InvariantError(
                f"rollout {record.rollout_id} is member {record.member} of {record.group_key}, "
                f"which has members 0 to {len(group.members) - 1}"
            )
        member = group.members[record.member]
        if member.is_ending or member.outcome != "in_flight":
            self.counts["duplicate_ends"] += 1
            return None
        member.is_ending = True
        try:
            await self._end_member(group, member, with_group_ids(record))
        finally:
            member.is_ending = False
        return group if group.is_closed else None

    def oldest_version(self, record: RolloutRecord) -> int | None:
        """The door: InvariantError for tokens that cannot be this policy's."""
        versions = self._versions
        return check_identity(
            record,
            policy=self._policy,
            incarnation=self._incarnation,
            newest_version=versions.active if self._is_sync else versions.newest,
            allow_bounded=not self._is_sync,
        )

    async def _end_member(self, group: OpenGroup, member: Member, record: RolloutRecord) -> None:
        outcome, reason = ledger_reason(record)
        ended_well = outcome == "ready"
        oldest = self.oldest_version(record) if ended_well else None
        if self._keeper.is_full:
            await self._keeper.room()
        stored = self._keeper.keep(record, group)
        if ended_well:
            record, outcome, reason = await self._judge(record, stored)
        if stored is not None:
            member.store_row = stored.rollout
        self._ledger.count_record(record)
        if outcome == "ready":
            member.record = record
            if oldest is not None:
                member.oldest_version = oldest
            trainable = [t for t in record.trajectories if t.trainable]
            group.note_prompt(prompt_fingerprint(trainable[0]))
            for row in [row for t in trainable for row in t.rows]:
                self.counts["rows_without_logprobs"] += row.behavior_logprobs is None
        group.end_member(member, self._ledger, outcome, reason)
        if ended_well:
            self._metrics.rollout_ended(record)
        if outcome != "ready":
            self._keeper.outcome((member,), outcome, reason, version=self._versions.active)

    async def _judge(
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
            self._keeper.annotate(stored, before, record, annotator)
        trainable = [t for t in record.trajectories if t.trainable]
        if not trainable:
            return record, "filtered", "no_trainable_rows"
        unmet = first_unmet_need(trainable, self._needs, logprobs_optional=self._is_sync)
        if unmet is None:
            return record, "ready", ""
        self._tracker.warn(
            f"rollouts without {unmet} leave their groups; they are not scored 0 "
            f"(counted as ledger/filtered/{UNMET}{unmet})"
        )
        return record, "filtered", f"{UNMET}{unmet}"

    def _count_late_end(self, record: RolloutRecord) -> None:
        if not self._ended_keys.may_contain(record.group_key):
            raise InvariantError(
                f"rollout {record.rollout_id} ended for group {record.group_key}, "
                "which was never admitted"
            )
        self.counts["late_ends"] += 1
        self._tracker.warn(f"a rollout of group {record.group_key} ended after its group had")


async def _annotate(annotator: Annotator, record: RolloutRecord) -> RolloutRecord:
    annotated: list[Trajectory] = []
    for trajectory in record.trajectories:
        if trajectory.trainable:
            async with asyncio.timeout(annotator.deadline_s):
                trajectory = await annotator.annotate(trajectory)
        annotated.append(trajectory)
    return replace(record, trajectories=tuple(annotated))


class _EndedKeys:
    """Keys of groups that have ended, to tell a late answer from one that nobody asked for.

    Invariant: at most `REMEMBERED` keys; before the first is forgotten, the answer is certain.
    """

    REMEMBERED: Final = 200_000

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._has_forgotten = False

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str) -> None:
        """A group has ended."""
        self._keys[key] = None
        if len(self._keys) > self.REMEMBERED:
            self._keys.popitem(last=False)
            self._has_forgotten = True

    def may_contain(self, key: str) -> bool:
        """False only for a key that was certainly never added."""
        return self._has_forgotten or key in self._keys
