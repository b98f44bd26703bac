"""Random interleavings: the ledger balances, staleness stays within its bound, one outcome each."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexrl.algorithms.filters import constant_reward
from nexrl.pool.trajectory_pool import TrajectoryPool
from nexrl.testing.makers import make_draw, make_pool, make_record
from nexrl.types import Batch

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "end", "end", "end", "take", "train", "release", "activate"]),
        st.integers(0, 1_000),
    ),
    max_size=120,
)
POOLS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 3),
        "staleness_threshold": st.integers(0, 2),
        "window": st.integers(1, 3),
        "on_bound": st.sampled_from(["wait", "cancel"]),
        "min_group_size": st.sampled_from([None, 1]),
        "refill_factor": st.sampled_from([0.0, 1.0]),
        "on_exhausted": st.sampled_from(["train_short", "skip"]),
    }
)


class Driver:
    """Plays actions against a pool and keeps its own account of every rollout."""

    def __init__(self, settings: dict[str, Any]) -> None:
        settings["window"] = min(settings["window"], settings["staleness_threshold"] + 1)
        self.threshold = settings["staleness_threshold"]
        self.pool: TrajectoryPool = make_pool(
            mode="sample-async",
            hand_out="windowed",
            needs=("reward",),
            filters=[constant_reward],
            take_deadline_s=1000.0,
            **settings,
        )
        self.num_admitted = 0
        self.running: list[tuple[int, int, int]] = []
        self.batches: list[Batch] = []
        self.published = 0
        self.active = 0
        self.trained: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []

    async def play(self, action: str, number: int) -> None:
        await getattr(self, action)(number)
        await asyncio.sleep(0)
        self.check()

    async def admit(self, _: int) -> None:
        self.tasks.append(asyncio.create_task(self._admit_one()))
        await asyncio.sleep(0)

    async def _admit_one(self) -> None:
        item = self.num_admitted + len(self.tasks) * 1_000
        await self.pool.admit(make_draw(item))
        self.num_admitted += 2
        self.running += [(item, member, self.active) for member in range(2)]

    async def end(self, number: int) -> None:
        if self.running:
            item, member, version = self.running.pop(number % len(self.running))
            status = ("completed", "completed", "completed", "failed", "cancelled")[number % 5]
            reward = None if number % 7 == 0 else float(number % 2)
            record = make_record(
                make_draw(item), member, status=status, reward=reward, version=version
            )
            await self.pool.end_rollout(record)

    async def take(self, _: int) -> None:
        if self.batches:
            return
        task = asyncio.create_task(self.pool.take(version=self.published))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if task.done() and (batch := task.result()) is not None:
            self.batches.append(batch)
            for t in batch.trajectories:
                oldest = t.oldest_version()
                assert oldest is not None
                assert self.published - oldest.number <= self.threshold
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def train(self, _: int) -> None:
        if self.batches:
            batch = self.batches.pop()
            self.pool.mark_trained(batch)
            self.published += 1
            self.trained.update(r.rollout_id for g in batch.groups for r in g.records)

    async def release(self, _: int) -> None:
        if self.batches:
            self.pool.release(self.batches.pop())

    async def activate(self, _: int) -> None:
        self.active = self.published
        self.pool.activate(self.active)

    def check(self) -> None:
        ledger = self.pool.ledger
        assert ledger.balanced
        assert ledger.admitted == self.num_admitted
        assert ledger.in_flight == len(self.running)
        assert ledger.trained == self.trained.total()
        assert max(self.trained.values(), default=1) == 1

    async def close(self) -> None:
        await self.pool.aclose()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(POOLS, ACTIONS)
def test_any_interleaving_keeps_the_ledger_the_bound_and_one_outcome_for_each_rollout(
    pool_settings: dict[str, Any], actions: list[tuple[str, int]]
) -> None:
    async def play() -> None:
        driver = Driver(pool_settings)
        try:
            for action, number in actions:
                await driver.play(action, number)
            state = driver.pool.state_dict()
            assert state["ledger"]["counts"]["trained"] == driver.trained.total()
        finally:
            await driver.close()

    asyncio.run(play())


@pytest.mark.parametrize("on_bound", ["wait", "cancel"])
@pytest.mark.parametrize("seed", range(6))
async def test_a_long_random_run_keeps_them_too(seed: int, on_bound: str) -> None:
    """Long enough for groups to reach the bound while others overtake them."""
    choose = random.Random(seed)
    driver = Driver(
        {
            "batch_size": 2,
            "staleness_threshold": 2,
            "window": 3,
            "on_bound": on_bound,
            "min_group_size": 1,
            "refill_factor": float(seed % 2),
        }
    )
    for _ in range(1_000):
        action = choose.choice(["admit", "end", "end", "take", "train", "activate", "release"])
        if action != "release" or choose.random() < 0.1:
            # Small numbers end the newest rollouts first, so that old groups are overtaken.
            await driver.play(action, -1 - min(choose.randrange(40), choose.randrange(40)))
    assert driver.published > 20
    await driver.close()


@pytest.mark.parametrize("threshold", [0, 1, 3])
async def test_a_whole_run_ends_every_rollout_exactly_once(threshold: int) -> None:
    pool = make_pool(
        batch_size=4,
        mode="batch-async" if threshold else "sync",
        staleness_threshold=threshold,
    )

    async def produce() -> None:
        for item in range(30):
            draw = make_draw(item)
            await pool.admit(draw)
            for member in range(2):
                status = "failed" if item % 11 == 0 and member else "completed"
                await pool.end_rollout(make_record(draw, member, status=status, version=version))
        pool.close_source()

    version = 0
    producer = asyncio.create_task(produce())
    settled: list[str] = []
    while (batch := await pool.take(version=version)) is not None:
        pool.mark_trained(batch)
        settled += pool.drain_settled()
        version += 1
        pool.activate(version)
    await producer
    assert (pool.ledger.admitted, pool.ledger.trained) == (60, 54)
    assert sorted(settled) == sorted(f"i{i}/0" for i in range(30))
