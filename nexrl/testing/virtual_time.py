"""A loop whose time jumps to the next timer, so that tests of deadlines take no time.

Waits of hours pass at once and in the right order; a test that can never go on fails instead of
hanging. Only for tests whose waits are timers, locks and queues: a thread or a socket takes real
time, which virtual time would run past.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")
_STUCK_S = 5.0


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of sleeping until the next timer it moves the loop's clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(_STUCK_S if timeout is None else 0)
        if timeout is None and not ready:
            raise RuntimeError("every task waits and no timer is set: nothing can ever happen")
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop under virtual time, which starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._jumping.now


def virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test under virtual time.

    Example: `@virtual_time` above `async def test_a_day_passes() -> None: await asyncio.sleep(86400)`
    """

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
