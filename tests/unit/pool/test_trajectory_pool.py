"""Admission, groups, needs, filters and hand-out of the pool in mode sync."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nexrl.algorithms.filters import constant_reward
from nexrl.errors import (
    DeadlineError,
    InvariantError,
    PoolClosedError,
    UserCodeError,
)
from nexrl.pool.trajectory_pool import TrajectoryPool
from nexrl.testing.makers import (
    RecordingTracker,
    make_draw,
    make_pool,
    make_record,
    make_row,
    make_trajectory,
)
from nexrl.types import Batch, RolloutGroup, Trajectory


async def run_group(
    pool: TrajectoryPool, item: int, rewards: Sequence[float | None], **fields: Any
) -> None:
    """Admit a group and end one rollout per reward."""
    draw = make_draw(item)
    await pool.admit(draw)
    for member, reward in enumerate(rewards):
        await pool.end_rollout(make_record(draw, member, reward=reward, **fields))


async def take(pool: TrajectoryPool, version: int = 0) -> Batch:
    batch = await pool.take(version=version)
    assert batch is not None
    return batch


def items(batch: Batch | None) -> list[str]:
    return [] if batch is None else [g.group_key.partition("/")[0] for g in batch.groups]


def train(pool: TrajectoryPool, batch: Batch) -> None:
    pool.mark_trained(batch)
    pool.activate(batch.version + 1)


async def is_waiting(task: asyncio.Task[Any]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


# --- hand-out ---------------------------------------------------------------------------------


async def test_a_batch_is_handed_out_in_admission_order_whatever_the_order_of_arrival() -> None:
    pool = make_pool(batch_size=3)
    draws = [make_draw(i) for i in range(3)]
    for draw in draws:
        await pool.admit(draw)
    for draw, member in [(draws[2], 1), (draws[0], 1), (draws[1], 0), (draws[2], 0)]:
        await pool.end_rollout(make_record(draw, member))
    for draw, member in [(draws[1], 1), (draws[0], 0)]:
        await pool.end_rollout(make_record(draw, member))
    batch = await take(pool)
    assert items(batch) == ["i0", "i1", "i2"]
    assert [r.member for g in batch.groups for r in g.records] == [0, 1] * 3


async def test_take_waits_until_the_last_member_has_ended() -> None:
    pool = make_pool()
    draw = make_draw()
    await pool.admit(draw)
    await pool.end_rollout(make_record(draw, 0))
    task = asyncio.create_task(pool.take(version=0))
    assert await is_waiting(task)
    await pool.end_rollout(make_record(draw, 1))
    assert items(await task) == ["i0"]


async def test_the_tail_of_the_data_is_a_short_batch_and_then_nothing() -> None:
    """FR-124: ids [0, 1, 2] in batches of 2 -> [0, 1], [2], exhausted."""
    pool = make_pool(batch_size=2)
    for item in (0, 1):
        await run_group(pool, item, [1.0, 0.0])
    first = await take(pool, 0)
    train(pool, first)
    await run_group(pool, 2, [1.0, 0.0], version=1)
    pool.close_source()
    last = await take(pool, 1)
    assert (items(first), items(last), last.num_expected_groups) == (["i0", "i1"], ["i2"], 2)
    assert await pool.take(version=1) is None


async def test_closing_the_source_wakes_a_trainer_that_waits() -> None:
    pool = make_pool(batch_size=2)
    task = asyncio.create_task(pool.take(version=0))
    assert await is_waiting(task)
    pool.close_source()
    assert await task is None


async def test_a_wait_that_reaches_its_deadline_names_the_missing_members() -> None:
    """FR-121, FR-122: a straggler cannot hang the trainer, and is named."""
    pool = make_pool(rollout_repeat_n=8, take_deadline_s=0.01)
    draw = make_draw(7)
    await pool.admit(draw)
    for member in (0, 2, 3, 4, 5, 6):
        await pool.end_rollout(make_record(draw, member))
    with pytest.raises(DeadlineError, match=r"waiting for i7/0 members 1, 7"):
        await pool.take(version=0)


async def test_a_pool_that_closes_ends_the_wait_of_trainer_and_admission() -> None:
    """FR-122: the consumer hears of the end of its producer."""
    pool = make_pool()
    await pool.admit(make_draw(0))
    waiting = [
        asyncio.create_task(pool.take(version=0)),
        asyncio.create_task(pool.admit(make_draw(1))),
    ]
    for task in waiting:
        assert await is_waiting(task)
    await pool.aclose()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(r) for r in results] == [PoolClosedError, PoolClosedError]


async def test_a_released_batch_is_handed_out_again_in_its_old_place() -> None:
    pool = make_pool(batch_size=2)
    for item in (0, 1):
        await run_group(pool, item, [1.0, 0.0])
    pool.release(await take(pool))
    assert pool.ledger.ready == 4
    assert items(await take(pool)) == ["i0", "i1"]


async def test_a_batch_can_be_trained_only_once() -> None:
    pool = make_pool()
    await run_group(pool, 0, [1.0, 0.0])
    batch = await take(pool)
    pool.mark_trained(batch)
    with pytest.raises(InvariantError, match="batch 0 is not handed out"):
        pool.mark_trained(batch)


# --- admission --------------------------------------------------------------------------------


async def test_a_slot_is_freed_only_when_engines_hold_the_new_version() -> None:
    pool = make_pool()
    await run_group(pool, 0, [1.0, 0.0])
    admission = asyncio.create_task(pool.admit(make_draw(1)))
    batch = await take(pool)
    pool.mark_trained(batch)
    assert await is_waiting(admission)
    pool.activate(1)
    await admission


async def test_a_group_that_ends_untrained_does_not_free_its_place_without_a_refill_budget() -> (
    None
):
    pool = make_pool(batch_size=2)
    await run_group(pool, 0, [1.0, 1.0], status="failed")
    await run_group(pool, 1, [1.0, 0.0])
    admission = asyncio.create_task(pool.admit(make_draw(2)))
    assert await is_waiting(admission)
    batch = await take(pool)
    assert (items(batch), batch.num_expected_groups) == (["i1"], 2)
    train(pool, batch)
    await admission


async def test_nothing_is_admitted_after_the_source_has_closed() -> None:
    pool = make_pool()
    pool.close_source()
    with pytest.raises(PoolClosedError, match="source of draws is closed"):
        await pool.admit(make_draw())


async def test_a_draw_is_admitted_once() -> None:
    pool = make_pool(batch_size=2)
    await run_group(pool, 0, [1.0, 0.0])
    with pytest.raises(InvariantError, match="i0/0 was admitted before"):
        await pool.admit(make_draw(0))


async def test_versions_are_activated_in_order() -> None:
    pool = make_pool(first_version=3)
    with pytest.raises(InvariantError, match="version 2 activated after version 3"):
        pool.activate(2)


# --- groups that lose members -----------------------------------------------------------------


async def test_one_failed_member_drops_its_group_and_nothing_else() -> None:
    """FR-142: 64 rollouts, one raises; the other groups are trained."""
    pool = make_pool(batch_size=32)
    for item in range(32):
        draw = make_draw(item)
        await pool.admit(draw)
        await pool.end_rollout(make_record(draw, 0))
        await pool.end_rollout(make_record(draw, 1, status="failed" if item == 9 else "completed"))
    batch = await take(pool)
    assert len(batch.trajectories) == 62
    assert pool.ledger.failed == {"infrastructure/ServiceError": 1}
    assert pool.ledger.filtered == {"group_incomplete": 1}


async def test_a_group_is_kept_while_enough_members_ended_well() -> None:
    """FR-143, FR-121: the other seven are trained; FR-053: any group size is accepted."""
    pool = make_pool(rollout_repeat_n=8, min_group_size=7)
    draw = make_draw()
    await pool.admit(draw)
    for member in range(8):
        await pool.end_rollout(
            make_record(draw, member, status="completed" if member else "failed")
        )
    batch = await take(pool)
    assert [r.member for r in batch.groups[0].records] == list(range(1, 8))


async def test_a_failed_member_leaves_no_row_and_no_reward() -> None:
    """FR-023: rewards [1, 1, 1] plus one that raised before any call: the mean is 1.0."""
    pool = make_pool(rollout_repeat_n=4, min_group_size=3)
    draw = make_draw()
    await pool.admit(draw)
    for member in range(3):
        await pool.end_rollout(make_record(draw, member))
    await pool.end_rollout(make_record(draw, 3, status="failed"))
    batch = await take(pool)
    metrics = pool.metrics()
    assert [t.reward for t in batch.trajectories] == [1.0, 1.0, 1.0]
    assert metrics["reward/all_mean"] == 1.0
    assert metrics["ledger/failed"] == 1


async def test_a_cancelled_surplus_member_does_not_count_as_lost() -> None:
    pool = make_pool()
    draw = make_draw()
    await pool.admit(draw)
    await pool.end_rollout(make_record(draw, 0))
    await pool.end_rollout(make_record(draw, 1, status="cancelled", reason="redundant"))
    assert len((await take(pool)).trajectories) == 1
    assert pool.ledger.cancelled == {"redundant": 1}


async def test_a_batch_whose_groups_were_all_dropped_is_empty_but_still_a_batch() -> None:
    pool = make_pool()
    await run_group(pool, 0, [1.0, 1.0], status="failed")
    batch = await take(pool)
    assert batch.groups == ()
    pool.mark_trained(batch)
    assert pool.drain_settled() == ["i0/0"]


# --- the door ---------------------------------------------------------------------------------


async def test_the_first_end_of_a_member_counts_and_later_ones_are_dropped() -> None:
    """FR-139: attempt 1 answers after attempt 2 was started; both arrive."""
    pool = make_pool()
    draw = make_draw()
    await pool.admit(draw)
    await pool.end_rollout(make_record(draw, 0, reward=1.0))
    await pool.end_rollout(make_record(draw, 0, reward=0.0))
    await pool.end_rollout(make_record(draw, 1))
    await pool.end_rollout(make_record(draw, 0, reward=0.0))
    batch = await take(pool)
    assert [t.reward for t in batch.trajectories] == [1.0, 1.0]
    metrics = pool.metrics()
    assert (metrics["pool/duplicate_ends"], metrics["pool/late_ends"]) == (1, 1)


async def test_the_end_of_a_rollout_that_was_never_admitted_stops_the_run() -> None:
    with pytest.raises(InvariantError, match="i5/0, which was never admitted"):
        await make_pool().end_rollout(make_record(make_draw(5)))


async def test_a_member_outside_its_group_stops_the_run() -> None:
    pool = make_pool()
    await pool.admit(make_draw())
    with pytest.raises(InvariantError, match="member 2 of i0/0, which has members 0 to 1"):
        await pool.end_rollout(make_record(make_draw(), 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "critic"}, "of policy 'critic', but this pool trains 'actor'"),
        ({"incarnation": 1}, "tokens of actor@1.0, but this pool trains 'actor' in incarnation 0"),
        ({"version": 1}, "tokens of actor@0.1, but the newest version there can be is 0"),
    ],
)
async def test_tokens_of_another_identity_are_refused_at_the_door(
    fields: dict[str, Any], message: str
) -> None:
    pool = make_pool()
    await pool.admit(make_draw())
    with pytest.raises(InvariantError, match=message):
        await pool.end_rollout(make_record(make_draw(), **fields))


async def test_versions_known_only_within_bounds_are_refused_in_sync() -> None:
    pool = make_pool()
    await pool.admit(make_draw())
    record = make_record(make_draw(), rows=(make_row(version_source="bounded"),))
    with pytest.raises(InvariantError, match="`bounded`"):
        await pool.end_rollout(record)


async def test_group_ids_default_to_the_draw_and_keep_roles_apart() -> None:
    """FR-046: solver and judge of one task are never compared with each other."""
    pool = make_pool(rollout_repeat_n=1)
    await pool.admit(make_draw())
    trajectories = [
        make_trajectory(role="solver"),
        make_trajectory(role="judge"),
        make_trajectory(),
    ]
    trajectories.append(make_trajectory(group_id="mine"))
    await pool.end_rollout(make_record(make_draw(), trajectories=trajectories))
    ids = [t.group_id for t in (await take(pool)).trajectories]
    assert ids == ["i0/0/solver", "i0/0/judge", "i0/0", "mine"]


async def test_a_group_with_different_starting_prompts_is_refused_where_prompts_are_fixed() -> None:
    """FR-049: a factory that draws a new problem for every member."""
    pool = make_pool(allow_mixed_prompts=False)
    await pool.admit(make_draw())
    for member in range(2):
        await pool.end_rollout(make_record(make_draw(), member, prompt_ids=[member, 9]))
    assert items(await take(pool)) == []
    assert pool.ledger.filtered == {"mixed_prompts": 2}


async def test_different_starting_prompts_are_counted_for_agents() -> None:
    pool = make_pool(batch_size=2)
    await run_group(pool, 0, [1.0, 0.0])
    await pool.admit(make_draw(1))
    for member in range(2):
        await pool.end_rollout(make_record(make_draw(1), member, prompt_ids=[member, 9]))
    assert items(await take(pool)) == ["i0", "i1"]
    assert pool.metrics()["group/prompt_mismatch_share"] == 0.5


# --- needs and annotators ---------------------------------------------------------------------


async def test_an_abstaining_member_leaves_its_group_and_is_never_scored_0() -> None:
    """FR-070: rewards [1, None, 0, 1] -> statistics over [1, 0, 1]."""
    pool = make_pool(rollout_repeat_n=4, needs=("reward",))
    await run_group(pool, 0, [1.0, None, 0.0, 1.0])
    assert [t.reward for t in (await take(pool)).trajectories] == [1.0, 0.0, 1.0]
    assert pool.ledger.filtered == {"unmet/reward": 1}


async def test_a_group_in_which_everyone_abstains_is_dropped_with_a_warning() -> None:
    """FR-071: all reward functions returned None."""
    tracker = RecordingTracker()
    pool = make_pool(needs=("reward",), tracker=tracker)
    await run_group(pool, 0, [None, None])
    assert (await take(pool)).groups == ()
    assert pool.ledger.filtered == {"unmet/reward": 2}
    assert "not scored 0" in tracker.warnings[0]


async def test_a_scored_rollout_needs_no_reward_when_the_trainer_needs_none() -> None:
    pool = make_pool()
    await run_group(pool, 0, [None, None])
    assert len((await take(pool)).trajectories) == 2


async def test_rows_without_logprobs_are_trained_in_sync_and_counted() -> None:
    pool = make_pool(needs=("behavior_logprobs",))
    await run_group(pool, 0, [1.0, 0.0], logprobs=None)
    assert len((await take(pool)).trajectories) == 2
    assert pool.metrics()["pool/rows_without_logprobs"] == 2


async def test_logprobs_of_a_truncated_distribution_do_not_meet_the_need() -> None:
    """FR-083"""
    pool = make_pool(needs=("behavior_logprobs",))
    await run_group(pool, 0, [1.0, 0.0], rows=(make_row(logprob_kind="truncated"),))
    assert pool.ledger.filtered == {"unmet/behavior_logprobs": 2}


async def test_a_rollout_that_left_no_row_is_filtered_and_not_trained() -> None:
    pool = make_pool(rollout_repeat_n=1)
    await pool.admit(make_draw())
    await pool.end_rollout(make_record(make_draw(), trajectories=[]))
    assert (await take(pool)).groups == ()
    assert pool.ledger.filtered == {"no_trainable_rows": 1}


class Scorer:
    """An annotator that gives a reward, raises, or never answers."""

    provides = "reward"
    deadline_s = 0.01

    def __init__(self, behavior: float | Exception | None) -> None:
        self.behavior = behavior

    async def annotate(self, trajectory: Trajectory) -> Trajectory:
        if isinstance(self.behavior, Exception):
            raise self.behavior
        if self.behavior is None:
            await asyncio.Event().wait()
        return replace(trajectory, reward=self.behavior)


async def test_an_annotator_meets_a_need_before_the_group_is_ready() -> None:
    pool = make_pool(needs=("reward",), annotators=[Scorer(0.5)])
    await run_group(pool, 0, [None, None])
    assert [t.reward for t in (await take(pool)).trajectories] == [0.5, 0.5]


@pytest.mark.parametrize("behavior", [ValueError("judge is down"), None])
async def test_an_annotator_that_raises_or_hangs_fails_the_rollout(
    behavior: Exception | None,
) -> None:
    tracker = RecordingTracker()
    pool = make_pool(needs=("reward",), annotators=[Scorer(behavior)], tracker=tracker)
    await run_group(pool, 0, [None, None])
    assert pool.ledger.failed == {"annotator/reward": 2}
    assert "annotator 'reward' failed for i0/0/0" in tracker.warnings[0]


async def test_a_second_end_during_annotation_is_a_duplicate() -> None:
    pool = make_pool(rollout_repeat_n=1, annotators=[Scorer(None)])
    await pool.admit(make_draw())
    ends = [pool.end_rollout(make_record(make_draw())) for _ in range(2)]
    await asyncio.gather(*ends)
    assert pool.ledger.failed == {"annotator/reward": 1}
    assert pool.metrics()["pool/duplicate_ends"] == 1


# --- filters and refill -----------------------------------------------------------------------


async def test_constant_groups_are_filtered_when_they_arrive_one_by_one() -> None:
    """FR-050: [1, 1], [0, 0], [1, 0]: only the third reaches the trainer."""
    pool = make_pool(batch_size=3, filters=[constant_reward])
    for item, rewards in enumerate([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]):
        await run_group(pool, item, rewards)
    assert items(await take(pool)) == ["i2"]
    assert sum(pool.ledger.filtered.values()) == 4


async def test_a_filtered_group_is_replaced_at_once_within_the_budget() -> None:
    """FR-127: the batch is refilled to its size."""
    pool = make_pool(batch_size=2, filters=[constant_reward], refill_factor=1.0)
    await run_group(pool, 0, [1.0, 1.0])
    await run_group(pool, 1, [1.0, 0.0])
    await run_group(pool, 2, [0.0, 1.0])
    assert items(await take(pool)) == ["i1", "i2"]
    assert pool.metrics()["pool/effective_batch"] == 2


async def test_with_the_budget_spent_the_batch_closes_short_and_counts_in_full() -> None:
    pool = make_pool(batch_size=2, filters=[constant_reward], refill_factor=0.5)
    for item in range(3):
        await run_group(pool, item, [1.0, 1.0] if item < 2 else [1.0, 0.0])
    admission = asyncio.create_task(pool.admit(make_draw(3)))
    assert await is_waiting(admission)
    batch = await take(pool)
    assert items(batch) == ["i2"]
    train(pool, batch)
    await admission
    metrics = pool.metrics()
    assert (metrics["pool/effective_batch"], metrics["pool/refills"]) == (1, 1)


async def test_the_budget_is_of_each_batch() -> None:
    pool = make_pool(filters=[constant_reward], refill_factor=1.0)
    for version in range(3):
        await run_group(pool, 2 * version, [1.0, 1.0], version=version)
        await run_group(pool, 2 * version + 1, [1.0, 0.0], version=version)
        batch = await take(pool, version)
        assert items(batch) == [f"i{2 * version + 1}"]
        train(pool, batch)


async def test_a_short_batch_can_be_skipped_for_a_new_one_at_the_same_version() -> None:
    pool = make_pool(batch_size=2, filters=[constant_reward], on_exhausted="skip")
    await run_group(pool, 0, [1.0, 1.0])
    await run_group(pool, 1, [1.0, 0.0])
    task = asyncio.create_task(pool.take(version=0))
    assert await is_waiting(task)
    for item in (2, 3):
        await run_group(pool, item, [1.0, 0.0])
    assert items(await task) == ["i2", "i3"]
    assert pool.ledger.filtered["batch_skipped"] == 2


async def test_a_short_batch_can_stop_the_run_with_its_numbers() -> None:
    pool = make_pool(batch_size=2, filters=[constant_reward], on_exhausted="stop")
    await run_group(pool, 0, [1.0, 1.0])
    await run_group(pool, 1, [1.0, 0.0])
    with pytest.raises(InvariantError, match=r"1 of 2 groups are left after 0 replacements"):
        await pool.take(version=0)


async def test_a_filter_that_raises_names_itself_and_its_line() -> None:
    def broken(group: RolloutGroup) -> str | None:
        raise KeyError("difficulty")

    pool = make_pool(filters=[broken])
    with pytest.raises(UserCodeError, match=r"group filter broken raised KeyError.*i0/0 at .*\.py"):
        await run_group(pool, 0, [1.0, 0.0])
    assert pool.ledger.failed == {"filter/broken": 2}


async def test_a_filter_that_answers_with_a_number_drops_nothing_in_silence() -> None:
    pool = make_pool(filters=[lambda group: 3])
    with pytest.raises(UserCodeError, match=r"must return a reason .* or None .* got 3 for .*i0/0"):
        await run_group(pool, 0, [1.0, 0.0])


async def test_a_ready_group_can_be_rejected_with_a_reason() -> None:
    pool = make_pool(batch_size=2)
    await run_group(pool, 0, [1.0, 0.0])
    pool.reject("i0/0", "poisoned")
    assert pool.ledger.filtered == {"poisoned": 2}
    with pytest.raises(InvariantError, match="i0/0 cannot be rejected"):
        pool.reject("i0/0", "again")


# --- metrics ----------------------------------------------------------------------------------


async def test_rewards_are_reported_over_all_and_over_trained_rollouts() -> None:
    """FR-128: groups of mean 1.0 and 0.0 are filtered, one of 0.5 is kept."""
    pool = make_pool(batch_size=3, filters=[constant_reward])
    for item, rewards in enumerate([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]):
        await run_group(pool, item, rewards)
    pool.mark_trained(await take(pool))
    metrics = pool.metrics()
    assert (metrics["reward/all_mean"], metrics["reward/trained_mean"]) == (0.5, 0.5)
    assert metrics["ledger/filtered/constant_reward"] == 4
    assert metrics["pool/trained_share/data"] == pytest.approx(1 / 3)


async def test_a_rollout_that_forks_into_three_rows_counts_once_in_the_reward_mean() -> None:
    """FR-079: A has reward 1 in three rows, B reward 0 in one row: the mean is 0.5."""
    pool = make_pool()
    await pool.admit(make_draw())
    await pool.end_rollout(make_record(make_draw(), 0, reward=1.0, rows=(make_row(),) * 3))
    await pool.end_rollout(make_record(make_draw(), 1, reward=0.0))
    assert pool.metrics()["reward/all_mean"] == 0.5
    assert pool.metrics()["pool/rows"] == 4


async def test_averages_start_over_after_each_report() -> None:
    pool = make_pool()
    await run_group(pool, 0, [1.0, 0.0])
    assert "reward/all_mean" in pool.metrics()
    assert "reward/all_mean" not in pool.metrics()
