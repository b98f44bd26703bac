"""Advantages: compared within explicit groups, zero where there is nothing to compare."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    Float64Array,
    StdKind,
    compute_advantages,
    group_index,
)
from nexrl.errors import ConfigError, InvariantError

GROUP_RELATIVE = sorted(n for n, d in ADVANTAGES.items() if d.group_relative)


def advantages(
    name: str, rewards: list[float], groups: list[str], *, std: StdKind = "sample"
) -> Float64Array:
    inputs = AdvantageInputs(rewards=np.array(rewards, np.float64), groups=group_index(groups))
    return compute_advantages(name, inputs, std=std)


def test_numbers_by_hand() -> None:
    rewards, groups = [1.0, 2.0, 3.0, 6.0], ["a"] * 4
    deviations = np.array([-2.0, -1.0, 0.0, 3.0])
    sample, population = np.sqrt(14 / 3), np.sqrt(14 / 4)
    assert advantages("grpo", rewards, groups) == pytest.approx(deviations / (sample + 1e-6))
    assert advantages("grpo", rewards, groups, std="population") == pytest.approx(
        deviations / (population + 1e-6)
    )
    assert advantages("grpo", rewards, groups, std="none") == pytest.approx(deviations)
    assert advantages("dr_grpo", rewards, groups) == pytest.approx(deviations)
    assert advantages("rloo", rewards, groups) == pytest.approx(deviations * 4 / 3)
    assert advantages("reinforce", rewards, groups).tolist() == rewards


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    result = advantages("rloo", [1.0, 0.0, 4.0], ["a"] * 3)
    assert result == pytest.approx([1 - 2.0, 0 - 2.5, 4 - 0.5])


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_row_alone_in_its_group_has_advantage_zero(name: str) -> None:
    """FR-043: never 300000."""
    result = advantages(name, [1.0, 2.0, 3.0], ["a", "a", "b"])
    assert result[2] == 0.0
    assert result[0] < 0 < result[1]


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_groups_of_uneven_size_keep_to_themselves(name: str) -> None:
    """FR-044, FR-053: a constant group is 0 whatever the others hold, order is kept."""
    groups = ["a"] * 4 + ["b"] * 3 + ["c"] * 4
    rewards = [0.0, 1, 0, 1] + [5.0] * 3 + [9.0, 9, 9, 1]
    result = advantages(name, rewards, groups)
    assert result[4:7].tolist() == [0.0, 0.0, 0.0]
    assert result[:4] == pytest.approx(advantages(name, rewards[:4], groups[:4]))
    assert result[7:] == pytest.approx(advantages(name, rewards[7:], groups[7:]))


def test_centred_pair_and_singleton() -> None:
    """FR-044, second case."""
    assert advantages("dr_grpo", [1.0, 3.0, 5.0], ["a", "a", "b"]).tolist() == [-1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@pytest.mark.parametrize("reward", [0.1, 1e9, -3.3333333, 1e-9])
def test_a_constant_group_is_exactly_zero_whatever_its_rounding(name: str, reward: float) -> None:
    assert advantages(name, [reward] * 7, ["a"] * 7).tolist() == [0.0] * 7


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_spread_is_judged_relative_to_large_rewards(name: str) -> None:
    assert advantages(name, [1e9, 1e9 + 1], ["a", "a"]).tolist() == [0.0, 0.0]
    assert np.all(advantages(name, [1e9, 1e9 + 100], ["a", "a"]) != 0)


def test_reinforce_does_not_look_at_groups() -> None:
    assert advantages("reinforce", [2.0, 2.0], ["a", "b"]).tolist() == [2.0, 2.0]


def test_group_relative_advantages_sum_to_zero_when_std_is_the_batchs_own() -> None:
    """FR-056: rewards [3,3],[-3,-3] spread over the batch and not within a group."""
    assert advantages("grpo", [3.0, 3, -3, -3], ["a", "a", "b", "b"]).tolist() == [0.0] * 4


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-1e3, 1e3)), min_size=1, max_size=30))
def test_order_of_trajectories_does_not_matter(pairs: list[tuple[int, float]]) -> None:
    groups, rewards = [f"g{g}" for g, _ in pairs], [r for _, r in pairs]
    order = np.random.default_rng(len(pairs)).permutation(len(pairs))
    for name in ADVANTAGES:
        result = advantages(name, rewards, groups)
        shuffled = advantages(name, [rewards[i] for i in order], [groups[i] for i in order])
        np.testing.assert_allclose(shuffled, result[order], rtol=1e-9, atol=1e-9)
        assert np.isfinite(result).all()


def test_a_reward_that_is_not_finite_is_refused_here_too() -> None:
    with pytest.raises(InvariantError, match="not finite"):
        advantages("grpo", [1.0, float("nan")], ["a", "a"])


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="dr_grpo"):
        advantages("grop", [1.0], ["a"])
