"""Calls over a network: in the client's order, once each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from nexrl.errors import DeadlineError, InvariantError
from nexrl.services.train.call_order import CallOrder


class Recorder:
    """Work that notes when it starts."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.changed = asyncio.Condition()
        self.release = asyncio.Event()
        self.release.set()

    def work(self, number: int) -> Callable[[], Coroutine[Any, Any, int]]:
        async def run() -> int:
            self.started.append(number)
            async with self.changed:
                self.changed.notify_all()
            await self.release.wait()
            return 10 * number

        return run

    async def wait_for_start(self, count: int) -> None:
        async with asyncio.timeout(5), self.changed:
            await self.changed.wait_for(lambda: len(self.started) >= count)


async def test_calls_that_arrive_in_any_order_start_in_the_clients_order() -> None:
    order, recorder = CallOrder(deadline_s=5.0), Recorder()
    answers = await asyncio.gather(*(order.run(n, recorder.work(n)) for n in (3, 1, 0, 2)))
    assert recorder.started == [0, 1, 2, 3]
    assert answers == [30, 10, 0, 20]


async def test_call_starts_before_the_one_before_it_has_ended() -> None:
    order, recorder = CallOrder(deadline_s=5.0), Recorder()
    recorder.release.clear()
    calls = [asyncio.ensure_future(order.run(n, recorder.work(n))) for n in (0, 1)]
    await recorder.wait_for_start(2)
    assert order.busy
    recorder.release.set()
    assert await asyncio.gather(*calls) == [0, 10]


async def test_repeated_call_gets_the_answer_of_the_first() -> None:
    order, recorder = CallOrder(deadline_s=5.0), Recorder()
    assert await order.run(0, recorder.work(0)) == 0
    assert await order.run(0, recorder.work(7)) == 0
    assert recorder.started == [0]


async def test_repeated_failure_is_the_same_failure() -> None:
    order = CallOrder(deadline_s=5.0)
    attempts = 0

    async def fail() -> None:
        nonlocal attempts
        attempts += 1
        raise InvariantError("bad row")

    for _ in range(2):
        with pytest.raises(InvariantError, match="bad row"):
            await order.run(0, fail)
    assert attempts == 1


async def test_lost_connection_neither_stops_nor_repeats_the_work() -> None:
    order, recorder = CallOrder(deadline_s=5.0), Recorder()
    recorder.release.clear()
    connection = asyncio.ensure_future(order.run(0, recorder.work(0)))
    await recorder.wait_for_start(1)
    connection.cancel()
    recorder.release.set()
    assert await order.run(0, recorder.work(0)) == 0
    assert recorder.started == [0]


async def test_gap_is_reported_with_both_numbers() -> None:
    order, recorder = CallOrder(deadline_s=0.02), Recorder()
    await order.run(0, recorder.work(0))
    with pytest.raises(DeadlineError, match=r"call 2 waited 0\.02 s for call 1"):
        await order.run(2, recorder.work(2))
    assert recorder.started == [0]


async def test_acknowledged_calls_are_forgotten_and_not_run_again() -> None:
    order, recorder = CallOrder(deadline_s=5.0), Recorder()
    await order.run(0, recorder.work(0))
    await order.acknowledge(1)
    with pytest.raises(InvariantError, match="call 0 is over"):
        await order.run(0, recorder.work(0))


async def test_acknowledgement_lets_calls_pass_that_waited_for_a_dead_one() -> None:
    order, recorder = CallOrder(deadline_s=5.0), Recorder()
    waiting = asyncio.ensure_future(order.run(1, recorder.work(1)))
    await asyncio.sleep(0)
    await order.acknowledge(1)
    assert await waiting == 10
