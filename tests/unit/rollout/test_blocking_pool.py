"""BlockingPool: blocking calls in owned threads, and what becomes of those that never return."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from nexrl.blocking_pool import BlockingPool
from nexrl.errors import UserCodeError

VARIABLE = contextvars.ContextVar("variable", default="unset")


async def abandon(pool: BlockingPool, release: threading.Event) -> asyncio.CancelledError:
    """Start a call that blocks until released and cancel its waiter."""
    running = threading.Event()

    def block() -> None:
        running.set()
        release.wait(30.0)

    task = asyncio.create_task(pool.run(block))
    await asyncio.to_thread(running.wait, 10.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    return caught.value


async def test_result_and_context_variables_go_along() -> None:
    pool = BlockingPool(1, name="test")
    VARIABLE.set("mine")
    assert await pool.run(VARIABLE.get) == "mine"
    await pool.aclose()


async def test_no_more_threads_than_allowed() -> None:
    pool = BlockingPool(2, name="test")
    names = await asyncio.gather(
        *(pool.run(lambda: threading.current_thread().name) for _ in range(20))
    )
    assert set(names) <= {"test-1", "test-2"}
    await pool.aclose()


async def test_abandoned_call_is_counted_named_and_replaced() -> None:
    pool, release = BlockingPool(1, name="test"), threading.Event()
    error = await abandon(pool, release)
    assert pool.num_abandoned == 1
    assert "test_blocking_pool.py:" in error.__notes__[0]
    assert await pool.run(lambda: 7) == 7
    release.set()
    await pool.aclose()


async def test_an_abandoned_thread_that_returns_is_no_longer_counted() -> None:
    pool, release = BlockingPool(1, name="test"), threading.Event()
    before = set(threading.enumerate())
    await abandon(pool, release)
    (stuck,) = [t for t in threading.enumerate() if t not in before and t.name == "test-1"]
    release.set()
    await asyncio.to_thread(stuck.join, 10.0)
    assert pool.num_abandoned == 0
    await pool.aclose()


async def test_too_many_abandoned_calls_refuse_further_ones_and_say_where() -> None:
    pool, release = BlockingPool(2, name="step of Slow", max_abandoned=2), threading.Event()
    for _ in range(2):
        await abandon(pool, release)
    with pytest.raises(UserCodeError, match=r"step of Slow: 2 blocking calls never.*pool\.py:"):
        await pool.run(lambda: 7)
    release.set()
    await pool.aclose()


async def test_a_call_cancelled_while_it_waits_for_a_thread_never_runs() -> None:
    pool, release = BlockingPool(1, name="test"), threading.Event()
    ran: list[int] = []
    first = asyncio.create_task(pool.run(lambda: release.wait(30.0)))
    second = asyncio.create_task(pool.run(lambda: ran.append(1)))
    await asyncio.sleep(0)
    second.cancel()
    release.set()
    await asyncio.wait([first, second])
    await pool.aclose()
    assert (ran, pool.num_abandoned) == ([], 0)


async def test_closing_leaves_no_thread_and_refuses_calls() -> None:
    pool = BlockingPool(3, name="closing")
    await asyncio.gather(*(pool.run(lambda: None) for _ in range(3)))
    await pool.aclose()
    await pool.aclose()
    assert not [t for t in threading.enumerate() if t.name.startswith("closing-")]
    with pytest.raises(UserCodeError, match="after the pool closed"):
        await pool.run(lambda: None)
