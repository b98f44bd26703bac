"""An admitted rollout group, from admission until it is trained or dropped.

Owned by `TrajectoryPool`. It moves its members through the ledger and knows, when the last one has
ended, whether enough of them ended well.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Final, Literal

from nexrl.pool.ledger import WITH_REASON, Ledger, Outcome
from nexrl.types import Draw, RolloutGroup, RolloutRecord

State = Outcome | Literal["dropped"]
REDUNDANT: Final = "redundant"
UNMET: Final = "unmet/"


@dataclass(slots=True, eq=False)
class Member:
    """One rollout of a group."""

    oldest_version: int
    """Lowest version that may have drawn a trained token: the one active at admission, until the
    rollout's own stamps are known."""
    outcome: Outcome = "in_flight"
    """Where the ledger counts it."""
    reason: str = ""
    """Of that outcome."""
    is_ending: bool = False
    """Its end is being stored and annotated."""
    record: RolloutRecord | None = None
    """Set when it has ended well, until its group is dropped."""
    store_row: int | None = None
    """Its row in the store."""


@dataclass(slots=True, kw_only=True, eq=False)
class OpenGroup:
    """Invariant: each member is in exactly one ledger outcome; all leave `in_flight` before the
    group is closed; once dropped or trained nothing changes any more."""

    draw: Draw
    """What its rollouts are of."""
    policy: str
    """Model being trained."""
    size: InitVar[int]
    """Number of members."""
    admission: int
    """Position in admission order."""
    admitted_version: int
    """Lowest version active at admission."""
    is_pushed: bool = False
    """It came from outside and was asked for by nobody."""
    members: list[Member] = field(init=False)
    """Its rollouts."""
    num_running: int = field(init=False)
    """Members that have not ended."""
    state: State = "in_flight"
    """Where the group stands."""
    fingerprint: bytes | None = None
    """Starting prompt of the first member that ended well."""
    has_mixed_prompts: bool = False
    """Another member started from another prompt."""

    def __post_init__(self, size: int) -> None:
        self.members = [Member(self.admitted_version) for _ in range(size)]
        self.num_running = size

    @property
    def is_closed(self) -> bool:
        """All members have ended."""
        return self.num_running == 0

    @property
    def kept(self) -> list[Member]:
        """Members that ended well; they share one outcome."""
        return [m for m in self.members if m.record is not None]

    @property
    def oldest_version(self) -> int:
        """Lowest version that may have drawn a trained token of a kept member; the version active
        at admission while members run."""
        if self.state == "in_flight":
            return self.admitted_version
        return min((m.oldest_version for m in self.kept), default=self.admitted_version)

    def end_member(self, member: Member, ledger: Ledger, outcome: Outcome, reason: str) -> None:
        """A running member ends as ready, filtered, failed or cancelled."""
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
        excused = sum(
            m.reason.startswith(UNMET) or (m.outcome == "cancelled" and m.reason == REDUNDANT)
            for m in self.members
        )
        required = min_group_size or len(self.members) - excused
        return len(self.kept) >= max(1, required)

    def move(self, ledger: Ledger, outcome: Outcome, reason: str = "") -> list[Member]:
        """The closed group changes state, and with it all members that ended well: returns them."""
        kept = self.kept
        if kept:
            ledger.move(kept[0].outcome, outcome, len(kept), reason)
        self.state = "dropped" if outcome in WITH_REASON else outcome
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
