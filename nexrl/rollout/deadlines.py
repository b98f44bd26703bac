"""DeadlineQueue: one time limit for thousands of rollouts, with one timer.

The runner enters every rollout when it starts and removes it when its attempts are over; what is
still there at its deadline gets cancelled. `asyncio.timeout` does the same for a tenth of the
controller's whole time per trajectory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nexrl.rollout.group import Member


class DeadlineQueue:
    """Cancels the task of a member that is still entered at its deadline, and reports it once more
    after a grace, since a task may swallow its cancellation.

    Invariant: all limits are the same, so entries are in the order of their deadlines; the timer,
    when set, is due no later than the first of them.
    """

    def __init__(
        self, limit_s: float, *, grace_s: float, after_grace: Callable[[Member], None]
    ) -> None:
        self._limit_s = limit_s
        self._grace_s = grace_s
        self._after_grace = after_grace
        self._entries: dict[Member, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, entry: Member, loop: asyncio.AbstractEventLoop, now: float) -> None:
        """The limit counts from now."""
        entry.deadline = now + self._limit_s
        self._entries[entry] = None
        if self._timer is None:
            self._timer = loop.call_at(entry.deadline, self._fire, loop)

    def leave(self, entry: Member) -> None:
        """It is no longer limited."""
        self._entries.pop(entry, None)

    def close(self) -> None:
        """Let go of the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._entries.clear()

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for entry in tuple(self._entries):
            deadline = entry.deadline
            if deadline is None or deadline > now:
                self._timer = loop.call_at(deadline or now, self._fire, loop)
                return
            del self._entries[entry]
            entry.overdue = True
            if entry.task is not None:
                entry.task.cancel()
            loop.call_at(deadline + self._grace_s, self._after_grace, entry)
