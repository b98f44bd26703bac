"""Group filters, learning rates, and metrics that do not depend on how a step was split."""

from __future__ import annotations

import numpy as np
import pytest

from nexrl.algorithms.advantages import AdvantageInputs, group_index
from nexrl.algorithms.filters import constant_reward
from nexrl.algorithms.metrics import (
    METRIC_UNITS,
    MetricSums,
    add_mismatch,
    add_ratio,
    add_reference_kl,
    reward_metrics,
)
from nexrl.algorithms.schedule import Schedule, learning_rate
from nexrl.testing.makers import make_draw, make_group, make_record, make_trajectory


def test_constant_groups_are_dropped_one_by_one() -> None:
    """FR-050, FR-052: groups arrive singly and are judged by their own spread."""
    groups = [make_group((1.0, 1.0)), make_group((0.0, 0.0)), make_group((1.0, 0.0))]
    assert [constant_reward(g) for g in groups] == ["constant_reward", "constant_reward", None]


def test_abstaining_members_do_not_count_and_all_abstaining_is_constant() -> None:
    """FR-070"""
    assert constant_reward(make_group((1.0, None, 0.0))) is None
    assert constant_reward(make_group((1.0, None, 1.0))) == "constant_reward"
    assert constant_reward(make_group((None, None))) == "constant_reward"


def test_roles_are_compared_apart() -> None:
    """FR-046: solver and judge of one item have baselines of their own."""
    draw = make_draw()

    def record(member: int, solver: float, judge: float):  # type: ignore[no-untyped-def]
        return make_record(
            draw,
            member,
            trajectories=[
                make_trajectory(reward=solver, group_id="i0/0/solver"),
                make_trajectory(reward=judge, group_id="i0/0/judge"),
            ],
        )

    assert constant_reward(make_group(records=[record(0, 1, 0), record(1, 1, 0)]))
    assert constant_reward(make_group(records=[record(0, 1, 0), record(1, 1, 1)])) is None


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.8682, 0.55, 0.2318]),
    ],
)
def test_learning_rates_by_hand(schedule: Schedule, expected: list[float]) -> None:
    rates = [
        learning_rate(
            step, peak=1.0, warmup_steps=2, total_steps=6, schedule=schedule, min_ratio=0.1
        )
        for step in range(6)
    ]
    assert rates == pytest.approx(expected, abs=1e-4)


def test_the_learning_rate_stays_at_its_minimum_beyond_the_end() -> None:
    rate = learning_rate(
        99, peak=2.0, warmup_steps=0, total_steps=6, schedule="cosine", min_ratio=0.1
    )
    assert rate == pytest.approx(0.2)


def token_metrics(splits: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    arrays = [-generator.random(90) for _ in range(3)] + [generator.normal(size=90)]
    sums = MetricSums()
    for part in np.array_split(np.arange(90), splits):
        logprobs, proximal, reference, advantage = (a[part] for a in arrays)
        add_ratio(sums, logprobs, proximal, advantage, clip_low=0.2, clip_high=0.28)
        add_reference_kl(sums, logprobs, reference, "k3")
        add_mismatch(sums, logprobs, proximal, part < 30)
    return sums.result()


def test_token_metrics_are_the_same_for_any_split() -> None:
    whole = token_metrics(1)
    for splits in (2, 7, 90):
        assert token_metrics(splits) == pytest.approx(whole, rel=1e-12)


def test_clip_shares_count_only_tokens_whose_gradient_a_clip_removes() -> None:
    sums, ratio = MetricSums(), np.log([0.5, 0.5, 1.5, 1.5])
    add_ratio(sums, ratio, np.zeros(4), np.array([1.0, -1, 1, -1]), clip_low=0.2, clip_high=0.28)
    result = sums.result()
    assert result["ratio/clip_share_low"] == 0.25
    assert result["ratio/clip_share_high"] == 0.25
    assert result["ratio/max"] == pytest.approx(1.5)


def test_the_reported_kl_is_the_estimator_that_is_trained_by_name() -> None:
    """FR-098"""
    sums = MetricSums()
    add_reference_kl(sums, np.array([-0.5, 0.5]), np.zeros(2), "k2")
    assert sums.result() == {"kl/k2": 0.125}


def test_spread_within_groups_and_over_the_batch_are_apart() -> None:
    """FR-056: batch std 3, every group constant."""
    inputs = AdvantageInputs(
        rewards=np.array([3.0, 3, -3, -3]), groups=group_index(["a", "a", "b", "b"])
    )
    result = reward_metrics(inputs, np.zeros(4))
    assert result["reward/trained_std"] == 3.0
    assert result["reward/group_std"] == 0.0
    assert result["group/constant_share"] == 1.0


def test_every_metric_states_its_unit() -> None:
    inputs = AdvantageInputs(rewards=np.array([1.0]), groups=group_index(["a"]))
    names = {*token_metrics(1), *reward_metrics(inputs, np.zeros(1))}
    assert names <= set(METRIC_UNITS)
