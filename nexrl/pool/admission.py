"""The admission rule: may another rollout group start? And the queue of those who ask.

Used by `TrajectoryPool.admit`. Bounding what starts is what bounds staleness: a group that starts
while version e is active stands among the first (e + threshold + 1) * B, so it is consumed at
version e + threshold at the latest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from nexrl.errors import PoolClosedError


def may_admit(*, started: int, active_version: int, threshold: int, batch_size: int) -> bool:
    """Whether one more group may start now.

    All counts are in rollout groups and relative to the version at which counting began, so that a
    stage or a resume may begin at any version: capacity comes from what this pool holds, never from
    an absolute version beside counters that begin at zero (FR-118).

    started: groups of batches that are trained or handed out (one closed short counts in full), in
    flight or ready, and dropped ones that are not replaced.
    active_version: lowest version active on any replica, minus the version counting began at.
    """
    return started < (active_version + threshold + 1) * batch_size


class SlotQueue:
    """Callers that wait for a slot, served in the order of asking.

    Invariant: a granted slot is reserved (`num_reserved`) until its owner runs, so that nobody else
    takes it meanwhile; an owner that is cancelled passes it on.
    """

    def __init__(self, has_slot: Callable[[], bool]) -> None:
        self._has_slot = has_slot
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.num_reserved = 0

    async def acquire(self) -> None:
        """Return once the caller may open a group. It must do so before it awaits anything."""
        if not self._waiting and not self.num_reserved and self._has_slot():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn.cancelled() and turn.exception() is None:
                self.num_reserved -= 1
                self.wake()
            raise
        self.num_reserved -= 1

    def wake(self) -> None:
        """Grant the slots that are free now."""
        while self._waiting and self._has_slot():
            turn = self._waiting.popleft()
            if not turn.done():
                self.num_reserved += 1
                turn.set_result(None)

    def refuse(self) -> None:
        """All who wait get PoolClosedError."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(PoolClosedError("closed while a draw waited for a slot"))
