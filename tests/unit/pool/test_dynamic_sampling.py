"""Refills within a budget, the named action at its end, and needs of estimators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nexrl.algorithms.filters import constant_reward
from nexrl.errors import InvariantError
from nexrl.pool.dynamic_sampling import ADVICE_AFTER_BATCHES, DynamicSampling
from nexrl.pool.trajectory_pool import TrajectoryPool
from nexrl.testing.makers import RecordingTracker, make_draw, make_pool, make_record

SIGNAL, NONE = (1.0, 0.0), (1.0, 1.0)


async def run_groups(pool: TrajectoryPool, *groups: Sequence[float], first: int = 0) -> None:
    """Admit and end one group of two for each pair of rewards."""
    for item, rewards in enumerate(groups, start=first):
        draw = make_draw(item)
        await pool.admit(draw)
        for member, reward in enumerate(rewards):
            await pool.end_rollout(make_record(draw, member, reward=reward))


def sampling(**fields: Any) -> tuple[DynamicSampling, RecordingTracker]:
    tracker = RecordingTracker()
    defaults = {"batch_size": 8, "refill_factor": 0.0, "on_exhausted": "train_short"}
    return DynamicSampling(tracker=tracker, **{**defaults, **fields}), tracker


def test_the_budget_is_the_factor_times_the_batch_size_without_rounding_loss() -> None:
    """0.29 x 100 is 28.999... as floats."""
    found, _ = sampling(batch_size=100, refill_factor=0.29)
    assert sum(found.may_replace() for _ in range(100)) == 29
    assert found.counts()["pool/refills"] == 29


def test_a_batch_that_comes_back_brings_what_was_spent_on_it() -> None:
    found, _ = sampling(batch_size=2, refill_factor=1.0)
    assert [found.may_replace(), found.may_replace(), found.may_replace()] == [True, True, False]
    spent = found.handed_out()
    assert found.may_replace()
    found.put_back(spent)
    assert not found.may_replace()


async def test_a_batch_closed_short_names_the_action_and_its_numbers() -> None:
    tracker = RecordingTracker()
    pool = make_pool(batch_size=2, filters=[constant_reward], refill_factor=0.5, tracker=tracker)
    await run_groups(pool, NONE, NONE, SIGNAL)
    batch = await pool.take(version=0)
    assert batch is not None
    assert len(batch.groups) == 1
    assert tracker.warnings[-1] == (
        "batch 0 is short: 1 of 2 groups are left after 1 replacements (budget 1); "
        "trajectory_pool.dynamic_sampling.on_exhausted is `train_short`"
    )
    assert pool.metrics()["pool/short_batches/train_short"] == 1


async def test_a_skipped_batch_names_the_action_and_starts_the_budget_over() -> None:
    tracker = RecordingTracker()
    pool = make_pool(
        batch_size=2,
        filters=[constant_reward],
        refill_factor=0.5,
        on_exhausted="skip",
        tracker=tracker,
    )
    await run_groups(pool, NONE, NONE, SIGNAL)
    pool.close_source()
    assert await pool.take(version=0) is None
    assert "on_exhausted is `skip`" in tracker.warnings[-1]
    metrics = pool.metrics()
    assert metrics["pool/short_batches/skip"] == 1
    assert metrics["ledger/filtered/batch_skipped"] == 2


async def test_stopping_names_the_action_and_its_numbers() -> None:
    pool = make_pool(batch_size=2, filters=[constant_reward], on_exhausted="stop")
    await run_groups(pool, NONE, SIGNAL)
    with pytest.raises(InvariantError, match=r"1 of 2 groups are left .*on_exhausted is `stop`"):
        await pool.take(version=0)


async def test_a_batch_without_any_group_is_handed_out_empty() -> None:
    """FR-050: if all are constant, the step is skipped explicitly: its batch has no groups and its
    version is published unchanged."""
    pool = make_pool(batch_size=2, filters=[constant_reward])
    await run_groups(pool, NONE, NONE)
    batch = await pool.take(version=0)
    assert batch is not None
    assert (batch.groups, batch.num_expected_groups) == ((), 2)


async def test_full_batches_are_no_matter_of_the_budget() -> None:
    tracker = RecordingTracker()
    pool = make_pool(batch_size=2, filters=[constant_reward], refill_factor=1.0, tracker=tracker)
    await run_groups(pool, NONE, SIGNAL, SIGNAL)
    assert await pool.take(version=0)
    assert tracker.warnings == []
    assert not [name for name in pool.metrics() if "short_batches" in name]


def test_many_groups_without_signal_give_advice_after_ten_batches_in_a_row() -> None:
    """FR-055: with the filter on, the trainer never sees them."""
    found, tracker = sampling()
    for batch in range(2 * ADVICE_AFTER_BATCHES - 1):
        for reason in ("constant_reward", "constant_reward", None):
            found.group_closed(reason)
        found.handed_out()
        assert len(tracker.warnings) == (batch >= ADVICE_AFTER_BATCHES - 1)
    assert "raise data.rollout_repeat_n" in tracker.warnings[0]


@pytest.mark.parametrize("reasons", [(None, "constant_reward"), ("group_incomplete",), ()])
def test_groups_with_signal_or_dropped_for_other_reasons_give_none(
    reasons: tuple[str | None, ...],
) -> None:
    """FR-055: 70% of groups of two are alike at a success rate of 0.18, 50% is bearable."""
    found, tracker = sampling()
    for _ in range(2 * ADVICE_AFTER_BATCHES):
        for reason in reasons:
            found.group_closed(reason)
        found.handed_out()
    assert tracker.warnings == []


@pytest.mark.parametrize(
    ("extra", "is_kept"),
    [
        ({"greedy_reward": 0.0}, True),
        ({}, False),
        ({"greedy_reward": None}, False),
        ({"greedy_reward": float("nan")}, False),
        ({"greedy_reward": "0.5"}, False),
    ],
)
async def test_a_needed_greedy_reward_is_a_finite_number_or_the_rollout_is_filtered(
    extra: Mapping[str, Any], is_kept: bool
) -> None:
    """FR-071: what is absent is never 0."""
    pool = make_pool(rollout_repeat_n=1, needs=("reward", "greedy_reward"))
    await pool.admit(make_draw())
    await pool.end_rollout(make_record(make_draw(), extra=extra))
    assert pool.ledger.ready == is_kept
    assert pool.ledger.filtered == ({} if is_kept else {"unmet/greedy_reward": 1})
