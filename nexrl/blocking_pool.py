"""BlockingPool: runs blocking user code in owned threads, off the event loop.

Used by the rollout runner for a blocking `step` and by the reward service for a blocking scorer.
Unlike the standard executor it survives calls that never return: Python cannot end a thread, so
a call whose waiter gave up is abandoned together with its thread, counted, and named.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from nexrl.errors import UserCodeError, user_place

T = TypeVar("T")

_CLOSE_GRACE_S = 0.5
"""Seconds that closing waits for calls in progress; what still runs is abandoned."""


class _State(Enum):
    QUEUED = 1
    RUNNING = 2
    DONE = 3
    ABANDONED = 4


class _Call:
    """One call on its way through a thread."""

    __slots__ = ("context", "function", "future", "loop", "state", "thread")

    def __init__(self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.function = function
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.context = contextvars.copy_context()
        self.state = _State.QUEUED
        self.thread: int | None = None

    def execute(self) -> Callable[[], None]:
        """Run the function; returns what the loop must do with the outcome."""
        try:
            result = self.context.run(self.function)
        except StopIteration as error:
            # A future refuses StopIteration, so the waiter would never wake.
            outcome = UserCodeError(f"StopIteration({error.value!r}) escaped from blocking code")
            outcome.__cause__ = error
            return lambda: self._fail(outcome)
        except BaseException as error:  # noqa: BLE001 - handed to the waiter, whatever it is
            failure = error
            return lambda: self._fail(failure)
        return lambda: self._succeed(result)

    def _succeed(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class BlockingPool:
    """Threads that take blocking calls in turn, one call a thread.

    Invariant: at most `num_threads` threads take calls. An abandoned thread takes no further call,
    is replaced when needed, and ends when its call returns; more than `max_abandoned` of them at
    once and every further call is refused with a UserCodeError that says where they are stuck.
    Threads are daemons for one reason: a stuck one must not keep the process from exiting.
    """

    def __init__(self, num_threads: int, *, name: str, max_abandoned: int = 16) -> None:
        self._num_threads = num_threads
        self._name = name
        self._max_abandoned = max_abandoned
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._serving: set[threading.Thread] = set()
        self._num_pending = 0
        self._abandoned: dict[int, str] = {}
        self._num_started = 0
        self._closed = False
        self._all_left: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def num_abandoned(self) -> int:
        """Threads whose call nobody waits for any more and which still run."""
        return len(self._abandoned)

    async def run(self, function: Callable[[], T]) -> T:
        """The function's result, or its exception; context variables go along.

        When the waiter is cancelled while the function runs, its thread is abandoned and the
        CancelledError gets a note with the place where the function is stuck.
        """
        call = _Call(function, asyncio.get_running_loop())
        self._submit(call)
        try:
            result: T = await call.future
        except asyncio.CancelledError as error:
            if (place := self._abandon(call)) is not None:
                error.add_note(f"blocking code is at {place}")
            raise
        return result

    async def aclose(self) -> None:
        """End the threads; those still busy after a grace are abandoned. Idempotent."""
        left = asyncio.Event()
        with self._lock:
            self._closed = True
            threads = list(self._serving)
            if not threads:
                return
            self._all_left = (asyncio.get_running_loop(), left)
        for _ in threads:
            self._queue.put(None)
        try:
            async with asyncio.timeout(_CLOSE_GRACE_S):
                await left.wait()
        except TimeoutError:
            with self._lock:
                for thread in self._serving:
                    self._abandoned[thread.ident or 0] = _place(thread.ident)
                self._serving.clear()
            return
        for thread in threads:  # each has said that it leaves: a matter of microseconds
            thread.join(_CLOSE_GRACE_S)

    def _submit(self, call: _Call) -> None:
        with self._lock:
            if self._closed:
                raise UserCodeError(f"{self._name}: a blocking call was made after the pool closed")
            if len(self._abandoned) >= self._max_abandoned:
                places = ", ".join(sorted(set(self._abandoned.values())))
                raise UserCodeError(
                    f"{self._name}: {len(self._abandoned)} blocking calls never returned (at "
                    f"{places}); no further one is started"
                )
            self._num_pending += 1
            starting = len(self._serving) < min(self._num_threads, self._num_pending)
            if starting:
                self._num_started += 1
                thread = threading.Thread(
                    target=self._serve, name=f"{self._name}-{self._num_started}", daemon=True
                )
                self._serving.add(thread)
        self._queue.put(call)
        if starting:
            thread.start()

    def _abandon(self, call: _Call) -> str | None:
        """Nobody waits for the call any more; where its thread is, if it had begun."""
        with self._lock:
            if call.state not in (_State.QUEUED, _State.RUNNING):
                return None
            running = call.state is _State.RUNNING
            call.state = _State.ABANDONED
            self._num_pending -= 1
            if not running or call.thread is None:
                return None
            place = self._abandoned[call.thread] = _place(call.thread)
            self._serving = {t for t in self._serving if t.ident != call.thread}
            return place

    def _serve(self) -> None:
        """Consumes queued calls; ends on a None or after a call that was abandoned."""
        me = threading.current_thread()
        while (call := self._queue.get()) is not None:
            with self._lock:
                if call.state is not _State.QUEUED:
                    continue
                call.state = _State.RUNNING
                call.thread = me.ident
            deliver = call.execute()
            with self._lock:
                if call.state is _State.ABANDONED:
                    self._abandoned.pop(me.ident or 0, None)
                    return
                call.state = _State.DONE
                self._num_pending -= 1
            if not call.loop.is_closed():
                call.loop.call_soon_threadsafe(deliver)
            del call, deliver
        self._leave(me)

    def _leave(self, thread: threading.Thread) -> None:
        with self._lock:
            self._serving.discard(thread)
            self._abandoned.pop(thread.ident or 0, None)
            waiting = self._all_left if not self._serving else None
        if waiting is not None and not waiting[0].is_closed():
            waiting[0].call_soon_threadsafe(waiting[1].set)


def _place(thread: int | None) -> str:
    """`file:line` where a thread is now: the last frame outside NexRL and libraries."""
    frame = sys._current_frames().get(thread or 0)
    return "unknown" if frame is None else user_place(traceback.extract_stack(frame))
