"""What only asynchronous modes stress: staleness, windows, versions, pushes, two policies."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nexrl.errors import InvariantError
from nexrl.pool.store_reader import StoreReader
from nexrl.pool.trajectory_pool import TrajectoryPool
from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.testing.makers import (
    make_draw,
    make_pool,
    make_record,
    make_row,
    make_trajectory,
    make_version,
)
from nexrl.types import Batch, TokenRow, VersionSpan


def make_async_pool(threshold: int = 1, **fields: Any) -> TrajectoryPool:
    fields = {"rollout_repeat_n": 1, "mode": "sample-async", **fields}
    return make_pool(staleness_threshold=threshold, **fields)


async def end(pool: TrajectoryPool, item: int, **fields: Any) -> None:
    await pool.end_rollout(make_record(make_draw(item), **fields))


async def admit(pool: TrajectoryPool, *admitted: int) -> None:
    for item in admitted:
        await pool.admit(make_draw(item))


async def take(pool: TrajectoryPool, version: int) -> Batch:
    batch = await pool.take(version=version)
    assert batch is not None
    return batch


def items(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [g.group_key.partition("/")[0] for g in batch.groups]


async def is_waiting(task: asyncio.Task[Any]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


def mixed_row(*numbers: int, trained_from: int = 0) -> TokenRow:
    """Two tokens of each version; tokens before `trained_from` are not trained."""
    row = make_row(prompt_ids=(), response_ids=range(2 * len(numbers)), version=None)
    mask = row.loss_mask.copy()
    mask[:trained_from] = False
    spans = tuple(
        VersionSpan(start=2 * i, end=2 * i + 2, version=make_version(number))
        for i, number in enumerate(numbers)
    )
    return make_row(
        prompt_ids=(),
        response_ids=range(2 * len(numbers)),
        version=None,
        versions=spans,
        loss_mask=mask,
    )


# --- the bound --------------------------------------------------------------------------------


async def test_lookahead_admits_threshold_plus_one_batches() -> None:
    pool = make_async_pool(threshold=2, batch_size=2)
    await admit(pool, *range(6))
    late = asyncio.create_task(pool.admit(make_draw(6)))
    assert await is_waiting(late)
    pool.activate(1)
    await late


async def test_a_stale_group_is_refused_at_hand_out_with_both_versions_named() -> None:
    """FR-119: bound 1, all are older; the batch is filled with what is fresh."""
    pool = make_async_pool(threshold=1, on_bound="cancel", first_version=3)
    await admit(pool, 0)
    await end(pool, 0, version=3)
    pool.activate(5)
    task = asyncio.create_task(pool.take(version=5))
    assert await is_waiting(task)
    assert pool.ledger.stale == {"version 3 consumed at 5, bound 1": 1}
    await admit(pool, 1)
    await end(pool, 1, version=5)
    assert items(await task) == ["i1"]


async def test_with_wait_a_stale_group_means_that_admission_is_broken() -> None:
    pool = make_async_pool(threshold=1)
    await admit(pool, 0)
    await end(pool, 0)
    with pytest.raises(InvariantError, match="version 0 consumed at 2, bound 1"):
        await pool.take(version=2)


async def test_age_is_that_of_the_oldest_trained_token() -> None:
    """FR-119: of the tokens, not of the moment the rollout was queued."""
    pool = make_async_pool(threshold=3, batch_size=2, on_bound="cancel")
    await admit(pool, 0, 1)
    pool.activate(3)
    await end(pool, 0, rows=(mixed_row(1, 3),))
    await end(pool, 1, rows=(mixed_row(1, 3, trained_from=2),))
    await take(pool, 3)
    metrics = pool.metrics()
    assert (metrics["staleness/max"], metrics["staleness/mean"]) == (2, 1)


async def test_a_replica_ahead_of_the_slowest_one_may_stamp_the_next_version() -> None:
    pool = make_async_pool(threshold=1)
    await admit(pool, 0, 1)
    await end(pool, 0, version=0)
    await take(pool, 0)
    await end(pool, 1, version=1)
    with pytest.raises(InvariantError, match="newest version there can be is 1"):
        await pool.push(make_trajectory(version=2))


async def test_rows_without_logprobs_are_not_trained_off_policy() -> None:
    pool = make_async_pool(needs=("behavior_logprobs",))
    await admit(pool, 0)
    await end(pool, 0, logprobs=None)
    assert pool.ledger.filtered == {"unmet/behavior_logprobs": 1}


async def test_failures_count_the_same_in_both_modes() -> None:
    """FR-149: group of four, one raises."""
    ledgers = []
    for mode in ("sync", "sample-async"):
        pool = make_pool(rollout_repeat_n=4, min_group_size=3, mode=mode)
        await pool.admit(make_draw())
        for member in range(4):
            status = "completed" if member else "failed"
            await pool.end_rollout(make_record(make_draw(), member, status=status))
        ledgers.append(pool.ledger)
    assert ledgers[0] == ledgers[1]
    assert ledgers[0].ready == 3


# --- windows ----------------------------------------------------------------------------------


async def test_a_window_hands_out_what_is_ready_and_fifo_does_not() -> None:
    for hand_out, expected in (("windowed", ["i1"]), ("fifo", None)):
        pool = make_async_pool(hand_out=hand_out, window=2)
        await admit(pool, 0, 1)
        await end(pool, 1)
        task = asyncio.create_task(pool.take(version=0))
        if expected is None:
            assert await is_waiting(task)
            task.cancel()
        else:
            assert items(await task) == expected


async def test_a_group_at_the_bound_goes_into_the_next_batch() -> None:
    pool = make_async_pool(hand_out="windowed", window=2)
    await admit(pool, 0, 1)
    await end(pool, 1)
    pool.mark_trained(await take(pool, 0))
    pool.activate(1)
    await admit(pool, 2)
    await end(pool, 2, version=1)
    task = asyncio.create_task(pool.take(version=1))
    assert await is_waiting(task)
    await end(pool, 0)
    assert items(await task) == ["i0"]


async def test_with_cancel_a_running_group_at_the_bound_is_passed_over_and_then_stale() -> None:
    pool = make_async_pool(hand_out="windowed", window=2, on_bound="cancel")
    await admit(pool, 0, 1)
    for item, version in ((1, 0), (2, 1)):
        if item > 1:
            await admit(pool, item)
        await end(pool, item, version=version)
        pool.mark_trained(await take(pool, version))
        pool.activate(version + 1)
    await end(pool, 0)
    await admit(pool, 3)
    await end(pool, 3, version=2)
    assert items(await take(pool, 2)) == ["i3"]
    assert pool.ledger.stale == {"version 0 consumed at 2, bound 1": 1}


# --- pushes and two policies ------------------------------------------------------------------


async def test_a_pushed_trajectory_is_admitted_on_arrival_and_counted_apart() -> None:
    pool = make_async_pool()
    await pool.push(make_trajectory(trajectory_id="from-outside"))
    batch = await take(pool, 0)
    pool.mark_trained(batch)
    assert batch.trajectories[0].trajectory_id == "from-outside"
    assert pool.metrics()["pool/pushed"] == 1
    assert pool.drain_settled() == []


async def test_a_pushed_trajectory_of_another_policy_is_refused_and_nobody_waits_for_it() -> None:
    pool = make_async_pool()
    with pytest.raises(InvariantError, match="of policy 'critic'"):
        await pool.push(make_trajectory(policy="critic"))
    assert pool.ledger.admitted == 0


async def test_a_trajectory_pushed_twice_is_taken_once() -> None:
    pool = make_async_pool()
    for _ in range(2):
        await pool.push(make_trajectory(trajectory_id="t"))
    assert pool.ledger.admitted == 1


async def test_two_policies_share_a_store_and_nothing_else(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "store.sqlite")
    solver = make_pool(policy="solver", rollout_repeat_n=1, store=store)
    judge = make_pool(policy="judge", rollout_repeat_n=1, store=store, first_version=7)
    for pool, policy, version in ((solver, "solver", 0), (judge, "judge", 7)):
        await pool.admit(make_draw())
        await pool.end_rollout(make_record(make_draw(), policy=policy, version=version))
        pool.mark_trained(await take(pool, version))
    await store.aclose()
    with StoreReader(store.path) as reader:
        found = {s.policy: s.outcome_version for s in reader.read(outcome="trained")}
        lines = reader.ledger_lines(policy="judge")
    assert found == {"solver": 0, "judge": 7}
    assert [line["trained"] for line in lines] == [1]


async def test_a_mark_is_never_durable_before_its_record(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "store.sqlite", commit_every_s=3600)
    pool = make_pool(rollout_repeat_n=1, store=store)
    await pool.admit(make_draw())
    await pool.end_rollout(make_record(make_draw()))
    pool.mark_trained(await take(pool, 0))
    with StoreReader(store.path) as reader:
        assert list(reader.read()) == []
        await pool.flush()
        assert [s.outcome for s in reader.read()] == ["trained"]
    await store.aclose()
