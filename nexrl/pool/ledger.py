"""The ledger: what became of every admitted rollout.

Written by `TrajectoryPool` at each change, read as a `LedgerSnapshot` by everyone else. See
docs/design.md: `admitted = in_flight + ready + handed_out + trained + filtered + failed + stale +
cancelled`, counted in rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from nexrl.errors import InvariantError
from nexrl.types import LedgerSnapshot, RolloutRecord

Outcome = Literal[
    "in_flight", "ready", "handed_out", "trained", "filtered", "failed", "stale", "cancelled"
]

OPEN: Final[tuple[Outcome, ...]] = ("in_flight", "ready", "handed_out")
WITH_REASON: Final[tuple[Outcome, ...]] = ("filtered", "failed", "stale", "cancelled")
WITHOUT_REASON: Final[tuple[Outcome, ...]] = (*OPEN, "trained")
OUTCOMES: Final[tuple[Outcome, ...]] = (*WITHOUT_REASON, *WITH_REASON)


class Ledger:
    """Rollout counts by outcome.

    Invariant, asserted on each change: `admitted` equals the sum of all outcomes and no count is
    negative. A breach raises InvariantError with every number.
    """

    def __init__(self) -> None:
        self.admitted = 0
        self._counts: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        self._reasons: dict[Outcome, Counter[str]] = {o: Counter() for o in WITH_REASON}
        self.beside = dict.fromkeys(("pushed", "attempts", "trajectories", "rows", "tokens"), 0)
        """Rollouts among `admitted` that came by push; of rollouts that have ended their attempts,
        trajectories, token rows of those, and tokens, prompts included."""

    def __getitem__(self, outcome: Outcome) -> int:
        return self._counts[outcome]

    def admit(self, count: int) -> None:
        """`count` rollouts start."""
        self.admitted += count
        self._counts["in_flight"] += count
        self._check("in_flight")

    def move(self, source: Outcome, target: Outcome, count: int = 1, reason: str = "") -> None:
        """`count` rollouts change outcome; `reason` belongs to the target."""
        if count == 0:
            return
        self._counts[source] -= count
        self._counts[target] += count
        if target in self._reasons:
            self._reasons[target][reason] += count
        self._check(source)

    def count_record(self, record: RolloutRecord) -> None:
        """Count attempts, trajectories, rows and tokens of a rollout that has ended."""
        beside = self.beside
        beside["attempts"] += record.attempts
        for trajectory in record.trajectories:
            beside["trajectories"] += 1
            for row in trajectory.rows:
                beside["rows"] += 1
                beside["tokens"] += len(row.token_ids)

    def snapshot(self) -> LedgerSnapshot:
        """The counts as they are; the sums by reason are checked too."""
        counts: dict[str, Any] = {outcome: self._counts[outcome] for outcome in WITHOUT_REASON}
        reasons: dict[str, Any] = {outcome: dict(self._reasons[outcome]) for outcome in WITH_REASON}
        snapshot = LedgerSnapshot(admitted=self.admitted, **counts, **reasons)
        if not snapshot.balanced:
            raise InvariantError(f"ledger does not balance by reason: {self._numbers()}")
        return snapshot

    def to_state(self, not_final: Iterable[tuple[Outcome, str]]) -> dict[str, Any]:
        """JSON-compatible counts without the rollouts in `not_final` (outcome and reason of each),
        which a resumed run admits again."""
        counts: Counter[str] = Counter(self._counts)
        reasons = {o: Counter(c) for o, c in self._reasons.items()}
        admitted = self.admitted
        for outcome, reason in not_final:
            admitted -= 1
            counts[outcome] -= 1
            if outcome in reasons:
                reasons[outcome][reason] -= 1
        if admitted != sum(counts.values()) or any(counts[o] for o in OPEN):
            raise InvariantError(
                f"ledger state keeps open rollouts: {dict(counts)} of {admitted} admitted; "
                f"{self._numbers()}"
            )
        return {
            "admitted": admitted,
            "counts": dict(counts),
            "reasons": {o: {r: n for r, n in c.items() if n} for o, c in reasons.items()},
            **self.beside,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take the counts that `to_state` gave."""
        self.admitted = int(state["admitted"])
        self._counts = {outcome: int(state["counts"][outcome]) for outcome in OUTCOMES}
        self._reasons = {outcome: Counter(state["reasons"][outcome]) for outcome in WITH_REASON}
        self.beside = {name: int(state[name]) for name in self.beside}
        self.snapshot()
        self._check("in_flight")

    def _check(self, source: Outcome) -> None:
        """Eight additions: cheap enough for every change."""
        if self._counts[source] < 0 or self.admitted != sum(self._counts.values()):
            raise InvariantError(f"ledger does not balance: {self._numbers()}")

    def _numbers(self) -> str:
        parts = [f"admitted {self.admitted}"]
        for outcome in OUTCOMES:
            reasons = self._reasons.get(outcome)
            detail = f" {dict(reasons)}" if reasons else ""
            parts.append(f"{outcome} {self._counts[outcome]}{detail}")
        return ", ".join(parts)
