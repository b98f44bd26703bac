"""Which groups make the next batch.

Used by `TrajectoryPool.take`. `fifo` is the case of a window of one batch: its candidates are
exactly the next B groups in admission order. A wider window hands out whatever is ready among its
candidates, but a group that has reached the staleness bound always goes into the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Candidate(Protocol):
    """An admitted group that waits in the window."""

    @property
    def admission(self) -> int:
        """Position in admission order."""
        ...

    @property
    def is_closed(self) -> bool:
        """All members have ended (a dropped group that is not replaced is closed, too)."""
        ...

    @property
    def oldest_version(self) -> int:
        """Lowest version that may have drawn its trained tokens."""
        ...


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Generic[C]):
    """What `select_groups` decided."""

    chosen: tuple[C, ...] = ()
    """The batch, in admission order; empty when there is none yet."""
    blocker: C | None = None
    """A group in flight that must be waited for before any batch can be chosen."""


def select_groups(
    candidates: Sequence[C],
    *,
    batch_size: int,
    version: int,
    threshold: int,
    wait_for_bound: bool,
    is_final: bool,
) -> Selection[C]:
    """Choose a batch among `candidates`, which stand in admission order.

    version: number that consumes the batch.
    wait_for_bound: with True a group in flight at the staleness bound blocks the hand-out; it would
    be stale in any later batch.
    is_final: nothing more will be admitted, so fewer than `batch_size` candidates make a batch.
    """
    wanted = min(batch_size, len(candidates)) if is_final else batch_size
    due: list[C] = []
    others: list[C] = []
    for candidate in candidates:
        at_bound = version - candidate.oldest_version >= threshold
        if not candidate.is_closed:
            if at_bound and wait_for_bound:
                return Selection(blocker=candidate)
        elif at_bound:
            due.append(candidate)
        else:
            others.append(candidate)
    if wanted == 0 or len(due) + len(others) < wanted:
        return Selection()
    chosen = (due + others)[:wanted]
    return Selection(chosen=tuple(sorted(chosen, key=lambda c: c.admission)))
