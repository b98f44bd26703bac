"""Makes calls that arrive over a network take effect once each, in the order the client made them.

Consumes (seq, work) as requests arrive, which may be out of order and more than once; produces the
answer of the one execution. A request waits for the calls before it and is woken when the last of
them has been started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from nexrl.errors import DeadlineError, InvariantError

Work = Callable[[], Coroutine[Any, Any, Any]]


class CallOrder:
    """The calls of one client on one policy.

    Invariant: call n is started once, and only when every call below n was started, or is over
    for the client. A call in progress does not depend on the connection that brought it.
    """

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._next = 0
        self._acknowledged = 0
        self._calls: dict[int, asyncio.Task[Any]] = {}
        self._advanced = asyncio.Condition()

    async def run(self, seq: int, work: Work) -> Any:
        """The answer of call `seq`: started now, still awaited, or remembered from an earlier
        attempt. Errors are answers too."""
        if seq < self._acknowledged:
            raise InvariantError(f"call {seq} is over for its client; it is not run again")
        if seq not in self._calls:
            await self._wait_for_turn(seq)
        if seq not in self._calls:
            self._calls[seq] = asyncio.create_task(work())
            await self._advance_to(seq + 1)
        # Shielded: a lost connection neither stops the work nor makes a retry repeat it.
        return await asyncio.shield(self._calls[seq])

    async def _wait_for_turn(self, seq: int) -> None:
        try:
            async with asyncio.timeout(self._deadline_s), self._advanced:
                await self._advanced.wait_for(lambda: self._next >= seq)
        except TimeoutError as error:
            raise DeadlineError(
                f"call {seq} waited {self._deadline_s:g} s for call {self._next}, which never "
                "arrived"
            ) from error

    async def acknowledge(self, below: int) -> None:
        """The client needs no answer to calls below this number, nor will it send them again."""
        self._acknowledged = max(self._acknowledged, below)
        for seq in [n for n, call in self._calls.items() if n < below and call.done()]:
            call = self._calls.pop(seq)
            if not call.cancelled():
                call.exception()  # marks a failure that nobody waited for as seen
        await self._advance_to(below)

    async def _advance_to(self, number: int) -> None:
        if number > self._next:
            self._next = number
            async with self._advanced:
                self._advanced.notify_all()

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        return any(not call.done() for call in self._calls.values())

    async def aclose(self) -> None:
        """Wait until started calls have ended; their failures are their callers' business."""
        await asyncio.gather(*self._calls.values(), return_exceptions=True)
