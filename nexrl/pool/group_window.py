"""The open groups of a pool in admission order, and which of them may be handed out next.

Owned by `TrajectoryPool`. The first `size` groups are the window that `hand_out.select_groups`
chooses from; the rest wait behind it. A removed group's place is taken by the next one behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from nexrl.pool.open_group import OpenGroup

NUM_NAMED: Final = 8
"""Groups that a message names."""


class GroupWindow:
    """Invariant: the window holds the first `size` open groups in admission order (all of them when
    there are fewer), and `num_closed` counts those in it that have ended. Each operation but
    `put_back` is O(1) amortised."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._window: dict[int, OpenGroup] = {}
        self._behind: deque[OpenGroup] = deque()
        self._removed_behind: set[int] = set()
        self.num_closed = 0

    def __len__(self) -> int:
        return len(self._window) + len(self._behind) - len(self._removed_behind)

    def __iter__(self) -> Iterator[OpenGroup]:
        yield from self._window.values()
        for group in self._behind:
            if group.admission not in self._removed_behind:
                yield group

    @property
    def candidates(self) -> list[OpenGroup]:
        """The window, in admission order."""
        return list(self._window.values())

    @property
    def num_candidates(self) -> int:
        """Groups in the window."""
        return len(self._window)

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
        everything = sorted([*self, *groups], key=lambda g: g.admission)
        self._window.clear()
        self._removed_behind.clear()
        self.num_closed = 0
        self._behind = deque(everything)
        self._refill()

    def describe_running(self) -> str:
        """`i3/0 members 1, 5; i4/0 members 0`: who is waited for; empty when nobody is."""
        running = [group for group in self._window.values() if not group.is_closed]
        named = [group.describe_missing() for group in running[:NUM_NAMED]]
        if len(running) > NUM_NAMED:
            named.append(f"{len(running) - NUM_NAMED} more groups")
        return "; ".join(named)

    def _refill(self) -> None:
        while self._behind and len(self._window) < self._size:
            group = self._behind.popleft()
            if group.admission in self._removed_behind:
                self._removed_behind.discard(group.admission)
                continue
            self._window[group.admission] = group
            self.num_closed += group.is_closed
