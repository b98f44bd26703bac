"""Metrics: each by the loss's own rule, with a stated unit, the same for any split."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from nexrl.algorithms.advantage_definition import AdvantageInputs, Advantages
from nexrl.algorithms.groups import group_index
from nexrl.algorithms.loss_definition import Settings
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.metrics import (
    METRIC_UNITS,
    MetricSums,
    add_correction,
    add_mismatch,
    add_ratio,
    add_reference_kl,
    add_values,
    reward_metrics,
)
from nexrl.testing.loss_inputs import make_loss_case

WITH_RATIO = sorted(n for n, d in LOSSES.items() if "proximal_logprobs" in d.required)


def ratio_metrics(name: str, splits: int = 1, config: Settings | None = None) -> dict[str, float]:
    case, sums = make_loss_case(name, rows=(4, 1, 9, 2, 3, 7)), MetricSums()
    for rows in np.array_split(np.arange(6), splits):
        part = case.at(np.flatnonzero(np.isin(case.rows, rows)))
        add_ratio(sums, part.loss, part.outputs, part.inputs, config or {})
    return sums.result()


def given(name: str, differences: list[float], advantages: list[float]) -> tuple[Any, Any]:
    inputs = {
        "advantage": np.array(advantages),
        "proximal_logprobs": np.full(len(advantages), -3.0),
    }
    return {"logprobs": np.array(differences) - 3.0}, {
        **inputs,
        "row": np.zeros(len(advantages), int),
    }


def token_metrics(splits: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    logprobs, behavior, reference, returns = (-generator.random(90) for _ in range(4))
    sums, value = MetricSums(), LOSSES["value"]
    for part in np.array_split(np.arange(90), splits):
        add_reference_kl(sums, logprobs[part], reference[part], "k3+")
        add_mismatch(sums, logprobs[part], behavior[part], part < 30)
        add_correction(sums, np.exp(logprobs - behavior)[part], part < 9)
        inputs = {"returns": returns[part], "old_values": behavior[part]}
        add_values(sums, value, {"values": logprobs[part]}, inputs, {"clip": 0.1})
    return sums.result()


@pytest.mark.parametrize("name", WITH_RATIO)
def test_ratio_metrics_of_every_loss_are_the_same_for_any_split_by_rows(name: str) -> None:
    whole = ratio_metrics(name)
    for splits in (2, 6):
        assert ratio_metrics(name, splits) == pytest.approx(whole, rel=1e-12)


def test_token_metrics_are_the_same_for_any_split() -> None:
    whole = token_metrics(1)
    for splits in (2, 7, 90):
        assert token_metrics(splits) == pytest.approx(whole, rel=1e-10)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("ppo", 0.25, 0.25),  # the sides that its clip removes
        ("cispo", 0.0, 0.0),  # caps at 5 only
        ("dppo", 0.0, 0.0),  # probabilities near exp(-3) hardly move
        ("gspo", 0.0, 0.5),  # one ratio for the row: exp(mean), above 1 + 4e-4
        ("gmpo", 0.25, 0.25),
    ],
)
def test_clip_shares_follow_the_rule_of_the_loss(name: str, low: float, high: float) -> None:
    sums = MetricSums()
    outputs, inputs = given(name, [-0.7, -0.7, 0.9, 0.9], [1.0, -1.0, 1.0, -1.0])
    add_ratio(sums, LOSSES[name], outputs, inputs, {})
    result = sums.result()
    assert result["ratio/clip_share_low"] == low
    assert result["ratio/clip_share_high"] == high


def test_a_loss_without_a_bound_has_no_clip_share_and_one_without_a_ratio_has_none() -> None:
    assert not any("clip" in name for name in ratio_metrics("importance_sampling"))
    sums = MetricSums()
    add_ratio(sums, LOSSES["reinforce"], {"logprobs": np.zeros(2)}, {}, {})
    assert sums.result() == {}


def test_row_losses_report_the_ratio_that_they_clip() -> None:
    sums = MetricSums()
    add_ratio(sums, LOSSES["gspo"], *given("gspo", [0.3, -0.1], [1.0, 1.0]), {})
    assert sums.result()["ratio/mean"] == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.0), ("k2", 0.125), ("k3", math.cosh(0.5) - 1)]
)
def test_the_reported_kl_is_the_estimator_that_is_trained_by_name(
    estimator: str, expected: float
) -> None:
    """FR-098: log ratios -0.5 and 0.5."""
    sums = MetricSums()
    add_reference_kl(sums, np.array([-0.5, 0.5]), np.zeros(2), estimator)
    assert sums.result() == {f"kl/{estimator}": pytest.approx(expected)}


def test_effective_sample_size_and_masked_share_by_hand() -> None:
    """Weights 1, 1, 2, 0: 16 / 6 of 4 tokens; FR-088: what is masked is counted."""
    sums = MetricSums()
    add_correction(sums, np.array([1.0, 1.0, 2.0, 0.0]), np.array([False, False, False, True]))
    assert sums.result() == {
        "correction/ess": pytest.approx(16 / 24),
        "correction/masked_share": 0.25,
    }


def test_an_effective_sample_of_nothing_is_0() -> None:
    sums = MetricSums()
    add_correction(sums, np.zeros(3), np.ones(3, np.bool_))
    assert sums.result() == {"correction/ess": 0.0, "correction/masked_share": 1.0}


def value_metrics(returns: list[float], old: list[float], values: list[float]) -> dict[str, float]:
    sums = MetricSums()
    inputs = {"returns": np.array(returns), "old_values": np.array(old)}
    add_values(sums, LOSSES["value"], {"values": np.array(values)}, inputs, {"clip": 0.2})
    return sums.result()


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_one_that_knows_the_mean() -> None:
    perfect = value_metrics([1.0, 3.0], [1.0, 3.0], [1.0, 3.0])
    mean = value_metrics([1.0, 3.0], [2.0, 2.0], [1.0, 2.1])
    assert perfect["values/explained_variance"] == 1.0
    assert mean["values/explained_variance"] == 0.0
    assert mean["values/clip_share"] == 0.5
    assert mean["values/return_mean"] == 2.0


def test_equal_returns_leave_nothing_to_explain() -> None:
    assert "values/explained_variance" not in value_metrics([0.1] * 3, [0.3, 0.4, 0.5], [0.1] * 3)


def judged(*rewards: float, groups: str) -> AdvantageInputs:
    return AdvantageInputs(rewards=np.array(rewards), groups=group_index(groups))


def test_spread_within_groups_and_over_the_batch_are_apart() -> None:
    """FR-056: batch std 3, every group constant."""
    result = reward_metrics(judged(3, 3, -3, -3, groups="aabb"), np.zeros(4))
    assert result["reward/trained_std"] == 3.0
    assert result["reward/group_std"] == 0.0
    assert result["group/constant_share"] == 1.0


def test_advantages_are_counted_by_trajectory_or_by_token_as_the_estimator_judges() -> None:
    inputs = judged(1, 0, groups="aa")
    per_trajectory = reward_metrics(inputs, Advantages(per_trajectory=np.array([3.0, -1.0])))
    per_token = reward_metrics(inputs, Advantages(per_token=np.array([3.0, 3.0, 3.0, -1.0])))
    assert (per_trajectory["advantage/mean"], per_token["advantage/mean"]) == (1.0, 2.0)
    assert per_token["advantage/positive_share"] == 0.75
    assert per_token["advantage/max_abs"] == 3.0


def test_every_metric_states_its_unit() -> None:
    rewards = reward_metrics(judged(1, groups="a"), np.zeros(1))
    names = {*token_metrics(1), *rewards, *(m for n in WITH_RATIO for m in ratio_metrics(n))}
    assert names <= set(METRIC_UNITS)
