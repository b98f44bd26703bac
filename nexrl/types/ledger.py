"""LedgerSnapshot: where every admitted rollout went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """Rollout counts by outcome; `admitted` equals the sum of all others."""

    admitted: int
    """Rollouts admitted so far."""
    in_flight: int
    """Started or about to start."""
    ready: int
    """Ended, all needs met, waiting."""
    handed_out: int
    """With the trainer."""
    trained: int
    """Consumed by a batch whose publish is done."""
    filtered: Mapping[str, int]
    """By reason."""
    failed: Mapping[str, int]
    """By reason."""
    stale: Mapping[str, int]
    """By reason."""
    cancelled: Mapping[str, int]
    """By reason."""

    @property
    def balanced(self) -> bool:
        """Whether the counts add up."""
        ended = (self.filtered, self.failed, self.stale, self.cancelled)
        parts = self.in_flight + self.ready + self.handed_out + self.trained
        return self.admitted == parts + sum(sum(m.values()) for m in ended)

    @classmethod
    def sum(cls, ledgers: Sequence[LedgerSnapshot]) -> LedgerSnapshot:
        """One ledger over several, for example over the stages of a run."""
        plain = ("admitted", "in_flight", "ready", "handed_out", "trained")
        counts: dict[str, Any] = {
            name: sum(getattr(one, name) for one in ledgers) for name in plain
        }
        for name in ("filtered", "failed", "stale", "cancelled"):
            reasons: Counter[str] = Counter()
            for ledger in ledgers:
                reasons.update(getattr(ledger, name))
            counts[name] = dict(reasons)
        return cls(**counts)
