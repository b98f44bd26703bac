"""The open groups of a pool in admission order, and which of them make the next batch.

Owned by `TrajectoryPool`. The first groups are the window that a batch is chosen from; the rest
wait behind it, and the first of them takes the place of one that leaves. `fifo` is a window of one
batch: its groups are exactly the next B in admission order. A wider one hands out whatever is ready
in it, but a group that has reached the staleness bound always goes into the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from nexrl.pool.open_group import OpenGroup

NUM_NAMED: Final = 8
"""Groups that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOut:
    """What left with a batch."""

    groups: tuple[OpenGroup, ...]
    """Its groups, dropped ones that were not replaced included."""
    dropped: tuple[OpenGroup, ...]
    """Groups that ended untrained since the hand-out before."""
    refills: int
    """Replacements admitted since the hand-out before."""


class GroupWindow:
    """Invariant: the window holds the first `num_batches` batches of open groups in admission order
    (all of them when there are fewer), and `num_closed` counts those in it that have ended. Each
    operation but `choose` and `put_back` is O(1) amortised."""

    def __init__(
        self, *, batch_size: int, num_batches: int, threshold: int, wait_for_bound: bool
    ) -> None:
        """`threshold` is the staleness bound. With `wait_for_bound` a running group that has
        reached it blocks the hand-out, since it would be stale in any later batch."""
        self._batch_size = batch_size
        self._size = num_batches * batch_size
        self._threshold = threshold
        self._wait_for_bound = wait_for_bound
        self._window: dict[int, OpenGroup] = {}
        self._behind: deque[OpenGroup] = deque()
        self._removed_behind: set[int] = set()
        self._blocker: OpenGroup | None = None
        self.num_closed = 0
        self.is_final = False
        """Nothing more will be admitted, so fewer than `batch_size` groups make a batch."""

    def __len__(self) -> int:
        return len(self._window) + len(self._behind) - len(self._removed_behind)

    def __iter__(self) -> Iterator[OpenGroup]:
        yield from self._window.values()
        for group in self._behind:
            if group.admission not in self._removed_behind:
                yield group

    @property
    def is_exhausted(self) -> bool:
        """Nothing is left and nothing more will come."""
        return self.is_final and len(self) == 0

    def append(self, group: OpenGroup) -> None:
        """A group was admitted."""
        self._behind.append(group)
        self._refill()

    def note_closed(self, group: OpenGroup) -> None:
        """All members of an open group have ended."""
        if group.admission in self._window:
            self.num_closed += 1

    def remove(self, group: OpenGroup) -> None:
        """A closed group leaves: handed out, or dropped and replaced."""
        if self._window.pop(group.admission, None) is None:
            self._removed_behind.add(group.admission)
            return
        self.num_closed -= 1
        self._refill()

    def put_back(self, groups: Iterable[OpenGroup]) -> None:
        """Groups that were handed out return to their places in admission order."""
        self._behind = deque(sorted([*self, *groups], key=lambda g: g.admission))
        self._window.clear()
        self._removed_behind.clear()
        self.num_closed = 0
        self._refill()

    def may_choose(self) -> bool:
        """Whether `choose` may find a batch; cheap enough to ask at the end of each group."""
        if self._blocker is not None and not self._blocker.is_closed:
            return False
        return 0 < self._num_wanted <= self.num_closed

    def choose(self, version: int) -> list[OpenGroup]:
        """The groups that `version` consumes, in admission order; none while they cannot be told."""
        if not self.may_choose():
            return []
        self._blocker = None
        due: list[OpenGroup] = []
        others: list[OpenGroup] = []
        for group in self._window.values():
            at_bound = version - group.oldest_version >= self._threshold
            if group.is_closed:
                (due if at_bound else others).append(group)
            elif at_bound and self._wait_for_bound:
                self._blocker = group
                return []
        chosen = (due + others)[: self._num_wanted]
        return sorted(chosen, key=lambda group: group.admission)

    def describe_wait(self) -> str:
        """How many groups have ended, and who is waited for: `i3/0 members 1, 5; i4/0 ...`."""
        running = [group for group in self._window.values() if not group.is_closed]
        named = [group.describe_missing() for group in running[:NUM_NAMED]]
        if len(running) > NUM_NAMED:
            named.append(f"{len(running) - NUM_NAMED} more groups")
        waited_for = "; ".join(named) or "groups that nobody has started"
        return (
            f"{self.num_closed} of {self._batch_size} groups have ended; waiting for {waited_for}"
        )

    @property
    def _num_wanted(self) -> int:
        return min(self._batch_size, len(self._window)) if self.is_final else self._batch_size

    def _refill(self) -> None:
        while self._behind and len(self._window) < self._size:
            group = self._behind.popleft()
            if group.admission in self._removed_behind:
                self._removed_behind.discard(group.admission)
                continue
            self._window[group.admission] = group
            self.num_closed += group.is_closed
