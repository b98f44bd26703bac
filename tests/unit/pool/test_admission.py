"""The admission rule and the queue of those who wait for a slot."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.errors import PoolClosedError
from nexrl.pool.admission import SlotQueue, may_admit


@given(st.integers(0, 5), st.integers(0, 50), st.integers(1, 64))
def test_groups_of_later_batches_start_only_within_the_bound(
    threshold: int, version: int, batch_size: int
) -> None:
    """A group that starts at version e is consumed at e + threshold at the latest."""
    started = 0
    while may_admit(
        started=version * batch_size + started,
        active_version=version,
        threshold=threshold,
        batch_size=batch_size,
    ):
        started += 1
        consumed_at = (version * batch_size + started - 1) // batch_size
        assert consumed_at - version <= threshold
    assert started == (threshold + 1) * batch_size


class Slots:
    """A number of free slots beside a queue."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.queue = SlotQueue(lambda: self.free - self.queue.num_reserved > 0)
        self.order: list[str] = []

    async def enter(self, name: str) -> None:
        await self.queue.acquire()
        self.free -= 1
        self.order.append(name)


async def test_slots_are_granted_in_the_order_of_asking() -> None:
    slots = Slots(free=0)
    tasks = [asyncio.create_task(slots.enter(name)) for name in "abc"]
    await asyncio.sleep(0)
    slots.free = 2
    slots.queue.wake()
    late = asyncio.create_task(slots.enter("d"))
    await asyncio.gather(*tasks[:2])
    assert slots.order == ["a", "b"]
    for task in (tasks[2], late):
        task.cancel()


async def test_a_slot_granted_to_a_cancelled_caller_is_passed_on() -> None:
    slots = Slots(free=0)
    first, second = (asyncio.create_task(slots.enter(name)) for name in "ab")
    await asyncio.sleep(0)
    slots.free = 1
    slots.queue.wake()
    first.cancel()
    await second
    assert slots.order == ["b"]
    assert slots.queue.num_reserved == 0


async def test_a_caller_cancelled_while_waiting_leaves_the_queue() -> None:
    slots = Slots(free=0)
    first, second = (asyncio.create_task(slots.enter(name)) for name in "ab")
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    slots.free = 1
    slots.queue.wake()
    await second
    assert slots.order == ["b"]


async def test_all_who_wait_are_refused_when_the_queue_closes() -> None:
    slots = Slots(free=0)
    task = asyncio.create_task(slots.enter("a"))
    await asyncio.sleep(0)
    slots.queue.refuse()
    with pytest.raises(PoolClosedError):
        await task
