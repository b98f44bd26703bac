"""Advantages of trajectories: compared within explicit groups, zero where nothing is to compare."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.algorithms.advantage_definition import (
    AdvantageDefinition,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
)
from nexrl.algorithms.advantages import ADVANTAGES, PROVIDERS, compute_advantages
from nexrl.algorithms.baseline_advantages import moved_baseline
from nexrl.algorithms.groups import Float64Array, IndexArray, group_index, group_statistics
from nexrl.errors import ConfigError, InvariantError

GROUP_RELATIVE = sorted(n for n, d in ADVANTAGES.items() if d.group_relative)
WHITENED = {"gdpo", "reinforce_pp_baseline"}


def make_inputs(rewards: list[float], groups: list[str], **more: Any) -> AdvantageInputs:
    """Inputs with trajectories of 3, 4, 5, ... tokens, the reward itself as its only part."""
    array = np.array(rewards, np.float64)
    given_inputs: dict[str, Any] = {
        "lengths": np.arange(len(rewards)) % 5 + 3,
        "reward_parts": {"answer": array},
        **more,
    }
    return AdvantageInputs(rewards=array, groups=group_index(groups), **given_inputs)


def taken(inputs: AdvantageInputs, which: IndexArray) -> AdvantageInputs:
    """Some of the trajectories, in that order."""
    assert inputs.lengths is not None
    greedy = inputs.greedy_rewards
    return AdvantageInputs(
        rewards=inputs.rewards[which],
        groups=inputs.groups[which],
        lengths=inputs.lengths[which],
        reward_parts={name: part[which] for name, part in inputs.reward_parts.items()},
        greedy_rewards=None if greedy is None else greedy[which],
    )


def advantages(name: str, rewards: list[float], groups: list[str], **settings: Any) -> Float64Array:
    found = compute_advantages(name, make_inputs(rewards, groups), AdvantageSettings(**settings))
    assert found.per_trajectory is not None
    return found.per_trajectory


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


def test_the_baseline_of_opo_weighs_rewards_by_length() -> None:
    inputs = make_inputs([1.0, 0.0, 5.0], ["a", "a", "b"], lengths=np.array([1, 3, 2]))
    result = compute_advantages("opo", inputs).per_trajectory
    assert result == pytest.approx([0.75, -0.25, 0.0])


def test_opo_without_trained_tokens_is_finite() -> None:
    inputs = make_inputs([1.0, 0.0], ["a", "a"], lengths=np.array([0, 0]))
    assert compute_advantages("opo", inputs).per_trajectory == pytest.approx([0.5, -0.5])


def test_pass_at_k_by_hand() -> None:
    """n = 4, one correct, k = 2: R = 1 - 3/6 = 1/2, s = 1/2; wrong: (1/2 - 2/3) / (1/2)."""
    result = advantages("pass_at_k", [0.0, 1.0, 0.0, 0.5], ["a"] * 4, pass_k=2)
    assert result == pytest.approx([-1 / 3, 1.0, -1 / 3, -1 / 3])


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 45))
def test_pass_at_k_is_the_papers_formula_for_every_n_c_k(n: int, correct: int, k: int) -> None:
    correct = min(correct, n)
    wrong = n - correct
    result = advantages("pass_at_k", [1.0] * correct + [0.0] * wrong, ["a"] * n, pass_k=k)
    reached = 1 - Fraction(comb(wrong, k), comb(n, k)) if k <= n else Fraction(1)
    std = float(reached * (1 - reached)) ** 0.5
    if std == 0.0:
        assert result.tolist() == [0.0] * n
        return
    fails_too = Fraction(comb(wrong - 1, k - 1), comb(n - 1, k - 1))
    expected = [float(1 - reached) / std] * correct + [float(1 - reached - fails_too) / std] * wrong
    np.testing.assert_allclose(result, expected, rtol=1e-12)


def test_pass_at_1_is_grpo_with_the_population_std() -> None:
    rewards, groups = [1.0, 0, 0, 1, 1, 0, 0], ["a"] * 4 + ["b"] * 3
    expected = advantages("grpo", rewards, groups, std="population")
    assert advantages("pass_at_k", rewards, groups, pass_k=1) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("k", [2, 1500, 2999])
def test_pass_at_k_does_not_overflow_for_thousands(k: int) -> None:
    result = advantages("pass_at_k", [1.0] + [0.0] * 2999, ["a"] * 3000, pass_k=k)
    assert result[0] == pytest.approx(((3000 - k) / k) ** 0.5, rel=1e-12)
    assert result.sum() == pytest.approx(0.0, abs=1e-9)


def test_gdpo_standardises_each_part_then_whitens_the_batch() -> None:
    parts = {"answer": np.array([1.0, 0, 1, 1]), "format": np.array([0.0, 4, 0, 8])}
    inputs = make_inputs([1.0, 4, 1, 9], ["a", "a", "b", "b"], reward_parts=parts)
    half = 0.5 / (0.5**0.5 + 1e-6)
    deep = {s: s / (s * 2**0.5 + 1e-6) for s in (2.0, 4.0)}
    sums = np.array([half - 3 * deep[2.0], 3 * deep[2.0] - half, -3 * deep[4.0], 3 * deep[4.0]])
    settings = AdvantageSettings(part_weights={"format": 3.0}, whiten=False)
    assert compute_advantages("gdpo", inputs, settings).per_trajectory == pytest.approx(sums)
    whitened = compute_advantages("gdpo", inputs, replace(settings, whiten=True)).per_trajectory
    assert whitened == pytest.approx(sums / (sums.std() + 1e-8))


def test_gdpo_tells_apart_what_has_an_equal_sum() -> None:
    parts = {"answer": np.array([0.0, 1, 2]), "format": np.array([1.0, 0, 0])}
    inputs = make_inputs([1.0, 1, 2], ["a"] * 3, reward_parts=parts)
    result = compute_advantages("gdpo", inputs).per_trajectory
    assert result is not None
    assert result[0] != result[1]


def test_gdpo_refuses_a_weight_for_a_part_that_no_reward_has() -> None:
    with pytest.raises(ConfigError, match=r"formt.*answer"):
        advantages("gdpo", [1.0, 0.0], ["a", "a"], part_weights={"formt": 1.0})


def test_gdpo_gives_a_group_of_equal_sums_what_its_parts_are_worth() -> None:
    """By the paper's equations a group is idle when every part is, not when the sum is."""
    parts = {"answer": np.array([1.0, 0, 1, 1]), "format": np.array([0.0, 1, 2, 2])}
    inputs = make_inputs([1.0, 1, 3, 3], ["a", "a", "b", "b"], reward_parts=parts)
    settings = AdvantageSettings(part_weights={"format": 3.0})
    result = compute_advantages("gdpo", inputs, settings).per_trajectory
    assert result == pytest.approx([-(2**0.5), 2**0.5, 0, 0], rel=1e-5)
    assert result is not None
    assert result[2:].tolist() == [0.0, 0.0]


def test_reinforce_pp_baseline_whitens_over_the_tokens_of_the_batch() -> None:
    """Centred -1, 1, -2, 2 on 3, 4, 5, 6 tokens: mean 3/18, mean square 51/18."""
    result = advantages("reinforce_pp_baseline", [0.0, 2.0, 0.0, 4.0], ["a", "a", "b", "b"])
    scale = (51 / 18 - (3 / 18) ** 2) ** 0.5 + 1e-8
    assert result == pytest.approx((np.array([-1.0, 1, -2, 2]) - 3 / 18) / scale)
    alike = make_inputs([0.0, 2.0, 0.0, 4.0], ["a", "a", "b", "b"], lengths=None)
    once = compute_advantages("reinforce_pp_baseline", alike).per_trajectory
    assert once == pytest.approx(np.array([-1.0, 1, -2, 2]) / (2.5**0.5 + 1e-8))
    plain = advantages("reinforce_pp_baseline", [0.0, 2.0], ["a", "a"], whiten=False)
    assert plain.tolist() == [-1.0, 1.0]


def test_remax_compares_with_the_greedy_completion() -> None:
    inputs = make_inputs([1.0, 0.0], ["a", "b"], greedy_rewards=np.array([0.25, 1.0]))
    assert compute_advantages("remax", inputs).per_trajectory == pytest.approx([0.75, -1.0])


def test_reinforce_with_a_batch_and_a_moving_baseline() -> None:
    rewards, groups = [2.0, 4.0], ["a", "b"]
    assert advantages("reinforce", rewards, groups, baseline="batch").tolist() == [-1.0, 1.0]
    assert advantages("reinforce", rewards, groups, baseline="moving").tolist() == [-1.0, 1.0]
    moving = advantages("reinforce", rewards, groups, baseline="moving", moving_baseline=0.5)
    assert moving.tolist() == [1.5, 3.5]


def test_the_moving_baseline_starts_at_the_first_mean_and_follows_total_rewards() -> None:
    inputs = make_inputs([2.0, 4.0], ["a", "b"], lengths=np.array([1, 1]), token_rewards=[0.0, 2.0])
    assert moved_baseline(None, inputs) == 4.0
    assert moved_baseline(1.0, inputs, momentum=0.75) == pytest.approx(1.75)
    assert moved_baseline(1.0, make_inputs([], [])) == 1.0


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_row_alone_in_its_group_has_advantage_zero(name: str) -> None:
    """FR-043: never 300000."""
    result = advantages(name, [0.0, 1.0, 3.0], ["a", "a", "b"], pass_k=1)
    assert result[2] == 0.0
    assert result[0] < 0 < result[1]


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_groups_of_uneven_size_keep_to_themselves(name: str) -> None:
    """FR-044, FR-053: a constant group is 0 whatever the others hold, order is kept."""
    groups = ["a"] * 4 + ["b"] * 3 + ["c"] * 4
    rewards = [0.0, 1, 0, 1] + [5.0] * 3 + [9.0, 9, 9, 1]
    result = advantages(name, rewards, groups)
    assert result[4:7].tolist() == [0.0, 0.0, 0.0]
    if name not in WHITENED:
        last = taken(make_inputs(rewards, groups), np.arange(7, 11))
        assert result[:4] == pytest.approx(advantages(name, rewards[:4], groups[:4]))
        assert result[7:] == pytest.approx(compute_advantages(name, last).per_trajectory)


def test_centred_pair_and_singleton() -> None:
    """FR-044, second case."""
    assert advantages("dr_grpo", [1.0, 3.0, 5.0], ["a", "a", "b"]).tolist() == [-1.0, 1.0, 0.0]


def test_two_prompts_with_three_and_two_survivors() -> None:
    """FR-053: sizes are counted, never divided."""
    result = advantages("dr_grpo", [3.0, 0, 0, 1, 0], ["a", "a", "a", "b", "b"])
    assert result == pytest.approx([2.0, -1, -1, 0.5, -0.5])


def test_siblings_are_found_by_key_and_roles_are_kept_apart() -> None:
    """FR-046: solver and judge of one task; display names play no part."""
    groups = ["t1/solver", "t1/judge", "t1/solver", "t1/judge"]
    assert advantages("dr_grpo", [1.0, 0, 0, 1], groups) == pytest.approx([0.5, -0.5, -0.5, 0.5])


def test_a_rollout_counts_once_however_many_turns_it_has() -> None:
    """FR-047: turns 2, 1, 2, 1: the baseline is 0.5, and all tokens share the advantage."""
    inputs = make_inputs([1.0, 0, 1, 0], ["q"] * 4, lengths=np.array([2, 1, 2, 1]))
    found = compute_advantages("dr_grpo", inputs)
    assert found.per_trajectory == pytest.approx([0.5, -0.5, 0.5, -0.5])
    assert found.spread(inputs.lengths).tolist() == [0.5, 0.5, -0.5, 0.5, 0.5, -0.5]  # type: ignore[arg-type]
    assert found.spread(inputs.lengths, np.float32).dtype == np.float32  # type: ignore[arg-type]


def test_spread_is_flagged_by_group_and_not_by_sample() -> None:
    """FR-052: two groups of two, one flag each."""
    statistics = group_statistics(np.array([1.0, 0, 1, 1]), np.array([0, 0, 1, 1]))
    assert (~statistics.constant).tolist() == [True, False]
    assert statistics.silent.tolist() == [False, False, True, True]


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@pytest.mark.parametrize("reward", [0.1, 1e9, -3.3333333, 1e-9])
def test_a_constant_group_is_exactly_zero_whatever_its_rounding(name: str, reward: float) -> None:
    assert advantages(name, [reward] * 7, ["a"] * 7).tolist() == [0.0] * 7
    beside = advantages(name, [*[reward] * 7, 0.0, 0.0, 1.0], ["a"] * 7 + ["b"] * 3)
    assert beside[:7].tolist() == [0.0] * 7
    assert beside[7] < 0


@pytest.mark.parametrize("name", sorted({*GROUP_RELATIVE} - {"pass_at_k"}))
def test_spread_is_judged_relative_to_large_rewards(name: str) -> None:
    assert advantages(name, [1e9, 1e9 + 1], ["a", "a"]).tolist() == [0.0, 0.0]
    assert np.all(advantages(name, [1e9, 1e9 + 100], ["a", "a"]) != 0)


def test_rewards_that_spread_over_the_batch_alone_carry_no_signal() -> None:
    """FR-056: rewards [3,3],[-3,-3]."""
    assert advantages("grpo", [3.0, 3, -3, -3], ["a", "a", "b", "b"]).tolist() == [0.0] * 4


@pytest.mark.parametrize("name", sorted({*GROUP_RELATIVE} - {"gdpo"}))
def test_with_token_rewards_the_sum_decides_what_is_constant(name: str) -> None:
    """Group a: equal rewards made unequal by a penalty; group b: unequal ones made equal."""
    penalties = np.array([0.0, 0, -0.25, 0, -1.0, 0, 0])
    inputs = make_inputs(
        [1.0, 1, 1, 0],
        ["a", "a", "b", "b"],
        lengths=np.array([2, 2, 1, 2]),
        token_rewards=penalties,
    )
    result = compute_advantages(name, inputs).per_trajectory
    assert result is not None
    assert result[0] > 0 > result[1]
    assert result[2:].tolist() == [0.0, 0.0]


def test_a_penalty_does_not_turn_a_correct_trajectory_into_a_wrong_one() -> None:
    inputs = make_inputs(
        [1.0, 0.0], ["a", "a"], lengths=np.array([1, 1]), token_rewards=np.array([-0.2, 0.0])
    )
    result = compute_advantages("pass_at_k", inputs, AdvantageSettings(pass_k=1)).per_trajectory
    assert result == pytest.approx([1.0 - 0.1, -1.0 + 0.1])


CASES = st.lists(st.tuples(st.integers(0, 3), st.floats(-1e3, 1e3)), min_size=1, max_size=30)


@pytest.mark.parametrize("name", [*GROUP_RELATIVE, "reinforce", "remax"])
@given(pairs=CASES, seed=st.integers(0, 9))
def test_order_does_not_matter(name: str, pairs: list[tuple[int, float]], seed: int) -> None:
    groups, rewards = [f"g{g}" for g, _ in pairs], [r for _, r in pairs]
    order = np.random.default_rng(seed).permutation(len(pairs))
    inputs = make_inputs(rewards, groups, greedy_rewards=np.array(rewards) / 2)
    shuffled = taken(inputs, order)
    result = compute_advantages(name, inputs).per_trajectory
    again = compute_advantages(name, shuffled).per_trajectory
    assert result is not None
    assert again is not None
    assert np.isfinite(result).all()
    np.testing.assert_allclose(again, result[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted({*GROUP_RELATIVE} - WHITENED))
@given(pairs=CASES, further=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5))
def test_a_further_group_changes_nothing(
    name: str, pairs: list[tuple[int, float]], further: list[float]
) -> None:
    groups, rewards = [f"g{g}" for g, _ in pairs], [r for _, r in pairs]
    before = advantages(name, rewards, groups)
    after = advantages(name, rewards + further, groups + ["new"] * len(further))
    np.testing.assert_array_equal(after[: len(before)], before)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@given(pairs=CASES)
def test_groups_without_signal_are_zero(name: str, pairs: list[tuple[int, float]]) -> None:
    groups, rewards = [f"g{g}" for g, _ in pairs], [float(g) if g else r for g, r in pairs]
    result = advantages(name, rewards, groups)
    assert all(a == 0.0 for a, (g, _) in zip(result, pairs, strict=True) if g)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_missing_input_is_named_with_who_provides_it(name: str) -> None:
    inputs = AdvantageInputs(rewards=np.array([1.0]), groups=np.array([0]))
    for need in ADVANTAGES[name].needs:
        with pytest.raises(ConfigError, match=f"{name} needs .*{need}") as caught:
            compute_advantages(name, inputs)
        assert PROVIDERS[need] in str(caught.value)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("lengths", [[], [0], [1], [4096], [0, 1]])
def test_every_estimator_is_finite_at_the_extremes(name: str, lengths: list[int]) -> None:
    num, tokens = len(lengths), np.zeros(sum(lengths), np.float32)
    counts = np.minimum(np.array(lengths, np.int64), 1)
    inputs = make_inputs(
        [1e6] * num,
        ["a"] * num,
        lengths=np.array(lengths, np.int64),
        token_rewards=tokens - 80,
        values=tokens,
        turn_rewards=np.zeros(counts.sum()),
        turn_lengths=np.array([n for n in lengths if n], np.int64),
        turn_counts=counts,
        turn_anchors=np.zeros(counts.sum(), np.int64),
        greedy_rewards=np.zeros(num),
        behavior_logprobs=tokens,
        teacher_logprobs=tokens - 80,
    )
    spread = compute_advantages(name, inputs).spread(inputs.lengths)  # type: ignore[arg-type]
    assert spread.shape == tokens.shape
    assert np.isfinite(spread).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_estimator_states_its_formula(name: str) -> None:
    assert (ADVANTAGES[name].estimate.__doc__ or "").strip()


def test_ones_own_estimator_gets_total_rewards_and_is_checked() -> None:
    def estimate(inputs: AdvantageInputs, *_: Any) -> Advantages:
        return Advantages(per_trajectory=inputs.rewards * 2)

    own = AdvantageDefinition(name="twice", group_relative=False, estimate=estimate)
    inputs = make_inputs([1.0], ["a"], lengths=np.array([1]), token_rewards=np.array([0.5]))
    assert compute_advantages(own, inputs).per_trajectory == pytest.approx([3.0])
    broken = replace(own, estimate=lambda *_: Advantages(per_trajectory=np.zeros(2)))
    with pytest.raises(InvariantError, match=r"twice: per_trajectory has shape \(2,\)"):
        compute_advantages(broken, inputs)


def test_a_reward_that_is_not_finite_is_refused_here_too() -> None:
    with pytest.raises(InvariantError, match="not finite"):
        advantages("grpo", [1.0, float("nan")], ["a", "a"])


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="dr_grpo"):
        advantages("grop", [1.0], ["a"])


def test_arrays_of_unequal_length_are_refused_by_name() -> None:
    with pytest.raises(InvariantError, match="greedy_rewards has 3 entries, expected 2"):
        make_inputs([1.0, 0.0], ["a", "a"], greedy_rewards=np.zeros(3))


def test_columns_in_place_of_flat_arrays_are_refused_by_name() -> None:
    with pytest.raises(InvariantError, match=r"rewards has shape \(2, 1\), expected \(2,\)"):
        AdvantageInputs(rewards=np.ones((2, 1)), groups=np.zeros(2, np.int64))
    with pytest.raises(InvariantError, match=r"greedy_rewards has shape \(2, 1\), expected \(2,\)"):
        make_inputs([1.0, 0.0], ["a", "a"], greedy_rewards=np.zeros((2, 1)))
