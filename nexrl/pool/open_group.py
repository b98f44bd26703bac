"""An admitted rollout group, from admission until it is trained or dropped.

Owned by `TrajectoryPool`. It moves its members through the ledger and decides, when the last one
has ended, whether the group is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal

from nexrl.pool.ledger import Ledger, Outcome
from nexrl.types import Draw, RolloutGroup, RolloutRecord

State = Literal["in_flight", "ready", "handed_out", "trained", "dropped"]
GROUP_INCOMPLETE: Final = "group_incomplete"
REDUNDANT: Final = "redundant"
UNMET: Final = "unmet/"


class Member:
    """One rollout of a group; `record` is set when it has ended well."""

    __slots__ = ("is_ending", "oldest_version", "outcome", "reason", "record", "store_row")

    def __init__(self) -> None:
        self.outcome: Outcome = "in_flight"
        self.reason = ""
        self.is_ending = False
        self.record: RolloutRecord | None = None
        self.oldest_version: int | None = None
        self.store_row: int | None = None


class OpenGroup:
    """Invariant: each member is in exactly one ledger outcome; all leave `in_flight` before the
    group is closed; once dropped or trained nothing changes any more."""

    __slots__ = (
        "admission",
        "admitted_version",
        "draw",
        "fingerprint",
        "has_mixed_prompts",
        "is_pushed",
        "members",
        "num_running",
        "policy",
        "state",
    )

    def __init__(
        self,
        draw: Draw,
        *,
        policy: str,
        size: int,
        admission: int,
        admitted_version: int,
        is_pushed: bool = False,
    ) -> None:
        self.draw = draw
        self.policy = policy
        self.admission = admission
        self.admitted_version = admitted_version
        self.is_pushed = is_pushed
        self.members = [Member() for _ in range(size)]
        self.num_running = size
        self.state: State = "in_flight"
        self.fingerprint: bytes | None = None
        self.has_mixed_prompts = False

    @property
    def is_closed(self) -> bool:
        """All members have ended."""
        return self.num_running == 0

    @property
    def oldest_version(self) -> int:
        """Lowest version that may have drawn a trained token: the stamps of kept members, or the
        version that was active at admission while members run or say nothing."""
        if self.state == "in_flight":
            return self.admitted_version
        stamps = [
            self.admitted_version if m.oldest_version is None else m.oldest_version
            for m in self.members
            if m.record is not None
        ]
        return min(stamps, default=self.admitted_version)

    def end_member(self, index: int, ledger: Ledger, outcome: Outcome, reason: str = "") -> None:
        """A running member ends as ready, filtered, failed or cancelled."""
        member = self.members[index]
        ledger.move("in_flight", outcome, 1, reason)
        member.outcome = outcome
        member.reason = reason
        self.num_running -= 1

    def note_prompt(self, fingerprint: bytes) -> None:
        """Compare a member's starting prompt with its siblings' (FR-049)."""
        if self.fingerprint is None:
            self.fingerprint = fingerprint
        elif self.fingerprint != fingerprint:
            self.has_mixed_prompts = True

    def is_complete(self, min_group_size: int | None) -> bool:
        """Whether enough members ended well, asked when all have ended.

        With no minimum every member must have, save those that abstained (an unmet need: FR-070)
        and those that were superfluous.
        """
        num_well = sum(m.record is not None for m in self.members)
        excused = sum(
            m.reason.startswith(UNMET) or (m.outcome == "cancelled" and m.reason == REDUNDANT)
            for m in self.members
        )
        required = min_group_size or len(self.members) - excused
        return num_well >= max(1, required)

    def move_kept(self, ledger: Ledger, outcome: Outcome, reason: str = "") -> list[Member]:
        """Move all members that ended well (they share one outcome), and return them."""
        kept = [m for m in self.members if m.record is not None]
        if kept:
            ledger.move(kept[0].outcome, outcome, len(kept), reason)
        for member in kept:
            member.outcome = outcome
            member.reason = reason
        return kept

    def to_rollout_group(self) -> RolloutGroup:
        """What filters and the trainer see."""
        return RolloutGroup(
            group_key=self.draw.key,
            policy=self.policy,
            source=self.draw.source,
            admission=self.admission,
            admitted_version=self.admitted_version,
            records=tuple(m.record for m in self.members if m.record is not None),
        )

    def describe_missing(self) -> str:
        """`i3/0 members 1, 5`."""
        running = [str(i) for i, m in enumerate(self.members) if m.outcome == "in_flight"]
        return f"{self.draw.key} members {', '.join(running)}"


class EndedKeys:
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
