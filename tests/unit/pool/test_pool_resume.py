"""A pool's state: what is final is kept, everything else is drawn again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nexrl.algorithms.filters import constant_reward
from nexrl.errors import InvariantError
from nexrl.pool.store_reader import StoreReader
from nexrl.pool.trajectory_pool import TrajectoryPool
from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.testing.makers import make_draw, make_pool, make_record


async def end(pool: TrajectoryPool, item: int, **fields: Any) -> None:
    await pool.end_rollout(make_record(make_draw(item), **fields))


async def train_one(pool: TrajectoryPool, version: int) -> None:
    batch = await pool.take(version=version)
    assert batch is not None
    pool.mark_trained(batch)
    pool.activate(version + 1)


async def test_every_draw_is_trained_or_drawn_again_after_a_resume() -> None:
    """FR-131: trained 0-39, in flight 40-63, buffered 64-71: 40-71 are not consumed."""
    pool = make_pool(batch_size=8, rollout_repeat_n=1, mode="batch-async", staleness_threshold=8)
    settled: list[str] = []
    for item in range(72):
        await pool.admit(make_draw(item))
    for item in (*range(40), *range(64, 72)):
        await end(pool, item)
    for version in range(5):
        await train_one(pool, version)
        settled += pool.drain_settled()
    state = json.loads(json.dumps(pool.state_dict()))
    assert settled == [f"i{i}/0" for i in range(40)]
    assert state["not_consumed"] == [f"i{i}/0" for i in range(40, 72)]
    resumed = make_pool(batch_size=8, rollout_repeat_n=1)
    resumed.load_state_dict(state)
    assert (resumed.ledger.admitted, resumed.ledger.trained) == (40, 40)


async def test_capacity_after_a_resume_is_that_of_an_empty_pool() -> None:
    """FR-118: batch 4, bound 2, resumed at version 100: 12 groups may start, not 412."""
    state = make_pool(first_version=100).state_dict()
    pool = make_pool(batch_size=4, rollout_repeat_n=1, mode="batch-async", staleness_threshold=2)
    pool.load_state_dict(state)
    for item in range(12):
        await pool.admit(make_draw(item))
    late = asyncio.create_task(pool.admit(make_draw(12)))
    await asyncio.sleep(0)
    assert not late.done()
    for item in range(12):
        await end(pool, item, version=100)
    for version in range(100, 103):
        batch = await pool.take(version=version)
        assert batch is not None
    assert pool.metrics()["staleness/max"] == 2
    late.cancel()


async def test_a_batch_handed_out_but_not_trained_is_drawn_again() -> None:
    pool = make_pool(rollout_repeat_n=1)
    await pool.admit(make_draw(0))
    await end(pool, 0)
    await pool.take(version=0)
    state = pool.state_dict()
    assert (state["not_consumed"], state["next_batch_id"]) == (["i0/0"], 0)
    assert state["ledger"]["admitted"] == 0


async def test_a_group_dropped_on_the_way_to_a_batch_is_settled_with_that_batch() -> None:
    """Else the resumed batch would have another composition than the one not stopped."""
    pool = make_pool(batch_size=2, filters=[constant_reward], refill_factor=1.0)
    for item in range(3):
        await pool.admit(make_draw(item))
        for member in range(2):
            reward = float(member and item > 0)
            await pool.end_rollout(make_record(make_draw(item), member, reward=reward))
    assert pool.drain_settled() == []
    assert pool.state_dict()["not_consumed"] == ["i0/0", "i1/0", "i2/0"]
    assert pool.state_dict()["ledger"]["admitted"] == 0
    await train_one(pool, 0)
    assert pool.drain_settled() == ["i0/0", "i1/0", "i2/0"]
    assert pool.state_dict()["ledger"]["admitted"] == 6


async def test_a_released_batch_keeps_what_was_dropped_on_its_way() -> None:
    pool = make_pool(filters=[constant_reward], refill_factor=1.0)
    for item in range(2):
        await pool.admit(make_draw(item))
        for member in range(2):
            reward = float(member and item > 0)
            await pool.end_rollout(make_record(make_draw(item), member, reward=reward))
    batch = await pool.take(version=0)
    assert batch is not None
    pool.release(batch)
    await train_one(pool, 0)
    assert pool.drain_settled() == ["i0/0", "i1/0"]


async def test_state_is_loaded_before_anything_is_admitted_and_by_the_same_policy() -> None:
    state = make_pool().state_dict()
    with pytest.raises(InvariantError, match="policy 'actor' cannot be loaded"):
        make_pool(policy="critic").load_state_dict(state)
    pool = make_pool()
    await pool.admit(make_draw())
    with pytest.raises(InvariantError, match="before the first draw"):
        pool.load_state_dict(state)


async def test_what_was_trained_after_the_checkpoint_is_marked_as_rolled_back(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store.sqlite"
    store = TrajectoryStore(path)
    pool = make_pool(rollout_repeat_n=1, store=store)
    states = []
    for item in range(2):
        await pool.admit(make_draw(item))
        await end(pool, item, version=item)
        await train_one(pool, item)
        states.append(pool.state_dict())
    await store.aclose()
    store = TrajectoryStore(path, incarnation=1)
    resumed = make_pool(rollout_repeat_n=1, store=store, incarnation=1)
    resumed.load_state_dict(states[0])
    await resumed.aclose()
    await store.aclose()
    with StoreReader(path) as reader:
        outcomes = {s.item_id: s.outcome for s in reader.read()}
    assert outcomes == {"i0": "trained", "i1": "rolled_back"}
