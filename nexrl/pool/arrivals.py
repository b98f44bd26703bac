"""Arrivals: from a rollout that has ended to its place in its group.

Owned by `TrajectoryPool`, between `end_rollout` and the end of the group: the record passes the
door, is stored, annotated and judged, and its member leaves `in_flight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nexrl.errors import InvariantError
from nexrl.pool.door import check_identity, ledger_reason, prompt_fingerprint, with_group_ids
from nexrl.pool.ledger import Ledger
from nexrl.pool.open_group import EndedKeys, Member, OpenGroup
from nexrl.pool.pool_metrics import PoolMetrics
from nexrl.pool.record_keeper import RecordKeeper
from nexrl.pool.scoring import Scoring
from nexrl.protocols import Tracker
from nexrl.types import RolloutRecord


@dataclass(slots=True)
class Versions:
    """Version numbers as the pool knows them. Invariant: base <= active <= newest."""

    base: int
    """At which counting began: the first version of the stage or of the resume."""
    active: int
    """Lowest that any replica serves."""
    newest: int
    """Highest that any token may be of."""


class Arrivals:
    """The open groups by key, and how their rollouts end.

    Invariant: the first end of a member counts, a later one is only counted; a record is stored
    before anything is made of it; a rollout of a group that was never opened stops the run.
    """

    def __init__(
        self,
        *,
        policy: str,
        incarnation: int,
        is_sync: bool,
        versions: Versions,
        scoring: Scoring,
        keeper: RecordKeeper,
        metrics: PoolMetrics,
        tracker: Tracker,
    ) -> None:
        self._policy = policy
        self._incarnation = incarnation
        self._is_sync = is_sync
        self._versions = versions
        self._scoring = scoring
        self._keeper = keeper
        self._metrics = metrics
        self._tracker = tracker
        self._groups: dict[str, OpenGroup] = {}
        self._ended_keys = EndedKeys()
        self._counts = dict.fromkeys(("duplicate_ends", "late_ends", "rows_without_logprobs"), 0)

    def __contains__(self, key: str) -> bool:
        """Whether a group of this key was ever opened."""
        return key in self._groups or key in self._ended_keys

    @property
    def counts(self) -> Mapping[str, int]:
        """Ends that came twice or too late, and trained rows without logprobs."""
        return self._counts

    def open(self, group: OpenGroup) -> None:
        """Rollouts of this group may end from now on."""
        self._groups[group.draw.key] = group

    def close(self, group: OpenGroup) -> None:
        """All of its rollouts have ended."""
        del self._groups[group.draw.key]
        self._ended_keys.add(group.draw.key)

    def count_duplicate(self) -> None:
        """Something that is here already came once more."""
        self._counts["duplicate_ends"] += 1

    async def end(self, record: RolloutRecord, ledger: Ledger) -> OpenGroup | None:
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
            self.count_duplicate()
            return None
        member.is_ending = True
        try:
            await self._end_member(group, member, with_group_ids(record), ledger)
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

    async def _end_member(
        self, group: OpenGroup, member: Member, record: RolloutRecord, ledger: Ledger
    ) -> None:
        outcome, reason = ledger_reason(record)
        ended_well = outcome == "ready"
        oldest = self.oldest_version(record) if ended_well else None
        if self._keeper.is_full:
            await self._keeper.room()
        stored = self._keeper.keep(record, group)
        if ended_well:
            record, outcome, reason = await self._scoring.judge(record, stored)
        if stored is not None:
            member.store_row = stored.rollout
        ledger.count_record(record)
        if outcome == "ready":
            member.record = record
            member.oldest_version = oldest
            trainable = [t for t in record.trajectories if t.trainable]
            group.note_prompt(prompt_fingerprint(trainable[0]))
            for row in [row for t in trainable for row in t.rows]:
                self._counts["rows_without_logprobs"] += row.behavior_logprobs is None
        group.end_member(record.member, ledger, outcome, reason)
        if ended_well:
            self._metrics.rollout_ended(record)
        if outcome != "ready":
            self._keeper.outcome((member,), outcome, reason, version=self._versions.active)

    def _count_late_end(self, record: RolloutRecord) -> None:
        if not self._ended_keys.may_contain(record.group_key):
            raise InvariantError(
                f"rollout {record.rollout_id} ended for group {record.group_key}, "
                "which was never admitted"
            )
        self._counts["late_ends"] += 1
        self._tracker.warn(f"a rollout of group {record.group_key} ended after its group had")
