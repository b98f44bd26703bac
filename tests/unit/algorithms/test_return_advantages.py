"""Advantages that step over time: tokens and turns, never beyond a trajectory's end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.algorithms.advantage_definition import AdvantageInputs, AdvantageSettings
from nexrl.algorithms.advantages import compute_advantages
from nexrl.algorithms.groups import Float64Array, IndexArray
from nexrl.algorithms.segments import CHUNK, discounted_sums, segment_sums
from nexrl.algorithms.whitening import WHITEN_EPSILON, Moments, whiten
from nexrl.errors import ConfigError, InvariantError

PLAIN = AdvantageSettings(whiten=False)


def make_inputs(rewards: list[float], lengths: list[int], **more: Any) -> AdvantageInputs:
    arrays: dict[str, Any] = {name: np.asarray(values) for name, values in more.items()}
    return AdvantageInputs(
        rewards=np.array(rewards, np.float64),
        groups=np.zeros(len(rewards), np.int64),
        lengths=np.array(lengths),
        **arrays,
    )


def by_token(name: str, inputs: AdvantageInputs, **settings: Any) -> Float64Array:
    found = compute_advantages(name, inputs, replace(PLAIN, **settings))
    result: Float64Array = found.per_token
    return result


def test_gae_by_hand() -> None:
    """Two trajectories; delta of the first: 0 + .9 x 2 - 1 = .8 and 3 - 2 = 1."""
    inputs = make_inputs([3.0, 1.0], [2, 1], values=[1.0, 2.0, 0.5])
    found = compute_advantages("gae", inputs, replace(PLAIN, gamma=0.9, gae_lambda=0.5))
    assert found.per_token == pytest.approx([0.8 + 0.45 * 1.0, 1.0, 0.5])
    assert found.returns == pytest.approx([2.25, 3.0, 1.0])


def test_gae_with_lambda_1_is_the_return_minus_the_value() -> None:
    inputs = make_inputs([2.0], [3], values=[0.1, 0.2, 0.3], token_rewards=[-0.5, 0.0, -0.25])
    found = compute_advantages("gae", inputs, PLAIN)
    assert found.returns == pytest.approx([1.25, 1.75, 1.75])
    assert found.per_token == pytest.approx([1.15, 1.55, 1.45])


def test_gae_whitens_advantages_by_token_and_leaves_returns() -> None:
    inputs = make_inputs([3.0, 1.0], [2, 1], values=[1.0, 2.0, 0.5])
    plain, white = (
        compute_advantages("gae", inputs, replace(PLAIN, whiten=w)) for w in (False, True)
    )
    expected = (plain.per_token - plain.per_token.mean()) / (plain.per_token.std() + WHITEN_EPSILON)
    assert white.per_token == pytest.approx(expected)
    np.testing.assert_array_equal(white.returns, plain.returns)


def test_the_critic_may_have_a_lambda_of_its_own() -> None:
    """VAPO: advantages with lambda 0 are one-step, returns with lambda 1 are Monte Carlo."""
    inputs = make_inputs([3.0], [2], values=[1.0, 2.0])
    found = compute_advantages("gae", inputs, replace(PLAIN, gae_lambda=0.0, critic_lambda=1.0))
    assert found.per_token == pytest.approx([1.0, 1.0])
    assert found.returns == pytest.approx([3.0, 3.0])


def test_lambda_adapts_to_each_trajectorys_length() -> None:
    """alpha .5: lambda 1 - 1 / (.5 x 4) = .5; below two tokens it would be negative and is 0."""
    inputs = make_inputs([1.0, 1.0], [4, 1], values=np.zeros(5))
    result = by_token("gae", inputs, length_adaptive=0.5)
    assert result == pytest.approx([0.125, 0.25, 0.5, 1.0, 1.0])
    assert by_token("gae", inputs, length_adaptive=0.2)[:4].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_reinforce_pp_is_the_return_with_the_penalty_in_the_reward() -> None:
    inputs = make_inputs([1.0, 2.0], [2, 1], token_rewards=[-0.1, -0.2, -0.3])
    assert by_token("reinforce_pp", inputs, gamma=0.5) == pytest.approx([0.3, 0.8, 1.7])
    white = by_token("reinforce_pp", inputs, gamma=0.5, whiten=True)
    assert white == pytest.approx(whiten(np.array([0.3, 0.8, 1.7])))


def test_step_returns_discount_by_turn_and_hold_for_all_its_tokens() -> None:
    """Three turns in the first trajectory; its reward is earned in the last."""
    inputs = make_inputs(
        [4.0, 1.0],
        [5, 1],
        turn_rewards=[1.0, 0.0, 2.0, 0.0],
        turn_lengths=[2, 1, 2, 1],
        turn_counts=[3, 1],
    )
    assert by_token("step_returns", inputs, gamma=0.5).tolist() == [2.5, 2.5, 3, 6, 6, 1]


def make_turns(**more: Any) -> AdvantageInputs:
    """Two trajectories of two turns, one token each; both start from state 7, then part."""
    given_inputs: dict[str, Any] = {
        "turn_rewards": np.zeros(4),
        "turn_lengths": np.ones(4, np.int64),
        "turn_counts": np.array([2, 2]),
        "turn_anchors": np.array([7, 1, 7, 2]),
        **more,
    }
    return make_inputs([1.0, 0.0], [2, 2], **given_inputs)


def test_gigpo_adds_a_comparison_of_turns_from_the_same_state() -> None:
    """Only the two turns from state 7 are compared: returns .5 and 0 about .25."""
    result = by_token("gigpo", make_turns(), std="none", gamma=0.5, step_weight=2.0)
    assert result == pytest.approx([0.5 + 2 * 0.25, 0.5, -0.5 - 2 * 0.25, -0.5])
    scaled = by_token("gigpo", make_turns(), gamma=0.5)
    assert scaled == pytest.approx(np.array([2.0, 1.0, -2.0, -1.0]) / 2**0.5, rel=1e-5)


def test_gigpo_does_with_the_reward_of_the_outcome_alone() -> None:
    outcome = replace(make_turns(), turn_rewards=None)
    np.testing.assert_array_equal(
        by_token("gigpo", outcome, gamma=0.5), by_token("gigpo", make_turns(), gamma=0.5)
    )


def test_turn_baselines_do_not_cross_groups_and_unknown_states_have_none() -> None:
    apart = replace(make_turns(), groups=np.array([0, 1]))
    assert by_token("gigpo", apart).tolist() == [0.0] * 4
    unknown = make_turns(turn_anchors=np.full(4, -1))
    assert by_token("gigpo", unknown, std="none").tolist() == [0.5, 0.5, -0.5, -0.5]


def test_gigpo_compares_one_state_at_several_times() -> None:
    """Paper: a state visited twice gives two members, also within a trajectory."""
    inputs = make_turns(turn_anchors=np.array([7, 7, 7, 3]), turn_rewards=np.array([2.0, 0, 0, 0]))
    result = by_token("gigpo", inputs, std="none")
    assert result == pytest.approx([1.5 + 5 / 3, 1.5 - 1 / 3, -1.5 - 4 / 3, -1.5])


def test_equal_totals_may_still_differ_turn_by_turn() -> None:
    """Trajectories of equal sums have no first part, their turns differ all the same."""
    inputs = make_turns(turn_rewards=np.array([0.0, 0, 1, 0]), turn_anchors=np.array([7, 7, 1, 1]))
    result = by_token("gigpo", inputs, std="none")
    assert result == pytest.approx([0.0, 0.0, 0.5, -0.5])


def test_distill_is_minus_the_sampled_reverse_kl_with_a_task_part_on_request() -> None:
    inputs = make_inputs(
        [1.0, 0.0], [2, 1], behavior_logprobs=[-1.0, -2, -80], teacher_logprobs=[-1.5, -1, 0]
    )
    assert by_token("distill", inputs, distill_coefficient=2.0).tolist() == [-1.0, 2.0, 160.0]
    mixed = by_token("distill", inputs, task_coefficient=3.0, std="none")
    assert mixed == pytest.approx([-0.5 + 1.5, 1 + 1.5, 80 - 1.5])
    with pytest.raises(ConfigError, match="task_coefficient"):
        by_token("distill", replace(inputs, lengths=None), task_coefficient=1.0)


def recurrence(values: Float64Array, lengths: IndexArray, factors: Float64Array) -> Float64Array:
    """The definition, entry by entry."""
    result = values.copy()
    for end, length, factor in zip(np.cumsum(lengths), lengths, factors, strict=True):
        for t in range(end - 2, end - length - 1, -1):
            result[t] += factor * result[t + 1]
    return result


@given(
    st.lists(st.one_of(st.integers(0, 40), st.integers(0, 900)), min_size=1, max_size=12),
    st.sampled_from([0.0, 1e-20, 0.01, 0.5, 0.95, 0.999, 1.0]),
    st.booleans(),
    st.sampled_from([(np.float64, 1e-12), (np.float32, 4e-6)]),
    st.integers(0, 9),
)
def test_discounted_sums_are_the_recurrence(
    sizes: list[int],
    factor: float,
    one_for_each: bool,
    precision: tuple[type[np.floating], float],
    seed: int,
) -> None:
    lengths, generator = np.array(sizes), np.random.default_rng(seed)
    values = generator.exponential(size=sum(sizes))  # of one sign, so that errors are relative
    factors = np.full(len(sizes), factor)
    if one_for_each:
        factors = factors * generator.random(len(sizes))
    dtype, tolerance = precision
    found = values.astype(dtype)
    discounted_sums(found, lengths, factors if one_for_each else factor)
    np.testing.assert_allclose(found, recurrence(values, lengths, factors), rtol=tolerance)


def test_a_segment_keeps_its_precision_beside_much_larger_ones() -> None:
    lengths = np.array([5, 11, 300, 7, 1, 40])
    values = np.concatenate([np.full(n, 10.0 ** (15 * (i % 2))) for i, n in enumerate(lengths)])
    found = values.copy()
    discounted_sums(found, lengths, 0.9)
    np.testing.assert_allclose(found, recurrence(values, lengths, np.full(6, 0.9)), rtol=1e-13)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any),
    st.sampled_from([0.0, 0.5, 0.99, 1 - 1e-6, 1.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
def test_gae_and_reinforce_pp_are_the_plain_recurrence(
    sizes: list[int], gamma: float, with_token_rewards: bool, white: bool, seed: int
) -> None:
    """Empty trajectories and those of one token among them; the critic and policy differ."""
    generator, lengths, total = np.random.default_rng(seed), np.array(sizes), sum(sizes)
    token_rewards = generator.normal(size=total) if with_token_rewards else None
    inputs = make_inputs(
        generator.normal(size=len(sizes)).tolist(), sizes, values=generator.normal(size=total)
    )
    inputs = replace(inputs, token_rewards=token_rewards)
    rewards, following = np.zeros(total), np.append(inputs.values[1:], 0.0)
    rewards += 0.0 if token_rewards is None else token_rewards
    ends = np.cumsum(lengths)[lengths > 0] - 1
    rewards[ends] += inputs.rewards[lengths > 0]
    following[ends] = 0.0
    deltas = rewards + gamma * following - inputs.values
    expected = {
        "reinforce_pp": recurrence(rewards, lengths, np.full(len(sizes), gamma)),
        "gae": recurrence(deltas, lengths, np.full(len(sizes), gamma * 0.7)),
    }
    for name, plain in expected.items():
        found = by_token(name, inputs, gamma=gamma, gae_lambda=0.7, whiten=white)
        wanted = whiten(plain) if white else plain
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


def test_returns_of_a_large_common_reward_are_whitened_by_their_differences() -> None:
    """Without token rewards; a discount so near 1 that its powers are all but equal, too."""
    differing = make_inputs([1e6 + 1, 1e6 - 1, 1e6 + 1], [3, 4, 1])
    assert by_token("reinforce_pp", differing, whiten=True) == pytest.approx(
        [1.0] * 3 + [-1.0] * 4 + [1.0], abs=1e-6
    )
    equal = make_inputs([1e6, 1e6], [3000, 2])
    assert by_token("reinforce_pp", equal, whiten=True).tolist() == [0.0] * 3002
    decaying = by_token("reinforce_pp", make_inputs([1e4], [3000]), gamma=1 - 1e-9, whiten=True)
    np.testing.assert_allclose(decaying, whiten(np.arange(3000.0)), atol=1e-4)


@pytest.mark.parametrize("many", [1, CHUNK, 1 << 22])
@pytest.mark.parametrize("discount", [0.0, 0.3, 1.0])
def test_long_and_many_trajectories_are_the_same_as_one_at_a_time(
    discount: float, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that are worked on at a time need not end where trajectories do."""
    monkeypatch.setattr("nexrl.algorithms.segments.MANY", many)
    lengths = [CHUNK + 77, 0, 1, 5000, CHUNK - 3, 0]
    generator = np.random.default_rng(0)
    total = sum(lengths)
    inputs = make_inputs(
        [1.0, 2, 3, 4, 5, 6],
        lengths,
        values=generator.normal(size=total),
        token_rewards=generator.normal(size=total),
    )
    settings = {"gamma": discount, "gae_lambda": 0.9}
    result = by_token("gae", inputs, **settings)
    begin = 0
    for reward, length in zip(inputs.rewards.tolist(), lengths, strict=True):
        part = slice(begin, begin + length)
        alone = make_inputs(
            [reward], [length], values=inputs.values[part], token_rewards=inputs.token_rewards[part]
        )
        expected = by_token("gae", alone, **settings)
        np.testing.assert_allclose(result[part], expected, rtol=1e-9, atol=1e-12)
        begin += length


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 9))
def test_order_of_trajectories_does_not_matter(sizes: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    inputs = make_inputs(
        generator.normal(size=len(sizes)).tolist(), sizes, values=generator.normal(size=sum(sizes))
    )
    order = generator.permutation(len(sizes))
    pieces = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    tokens = np.concatenate([pieces[i] for i in order])
    shuffled = make_inputs(
        inputs.rewards[order].tolist(), [sizes[i] for i in order], values=inputs.values[tokens]
    )
    for name in ("gae", "reinforce_pp"):
        for settings in ({"length_adaptive": 0.3}, {"gae_lambda": 0.7, "gamma": 0.9}):
            result, again = (by_token(name, i, **settings) for i in (inputs, shuffled))
            np.testing.assert_allclose(again, result[tokens], rtol=1e-9, atol=1e-12)


def test_whitening_is_finite_for_one_entry_and_exactly_zero_without_spread() -> None:
    assert whiten(np.array([7.0])).tolist() == [0.0]
    assert whiten(np.full(1000, 1e9 + 0.1)).tolist() == [0.0] * 1000
    assert len(whiten(np.zeros(0))) == 0
    assert by_token("gae", make_inputs([5.0], [1], values=[1.0]), whiten=True).tolist() == [0.0]


def test_moments_do_not_depend_on_how_values_come() -> None:
    values = np.random.default_rng(0).normal(1e6, 1e-2, size=999)
    moments = Moments()
    for part in np.split(values, [0, 1, 5, 700]):
        moments.add(part)
    assert moments.mean == pytest.approx(values.mean(), rel=1e-14)
    assert moments.std == pytest.approx(values.std(), rel=1e-6)


def test_empty_segments_sum_to_zero() -> None:
    sums = segment_sums(np.array([1.0, 2.0, 4.0], np.float32), np.array([0, 2, 0, 1, 0]))
    assert sums.tolist() == [0.0, 3.0, 0.0, 4.0, 0.0]
    assert segment_sums(np.zeros(0), np.array([0, 0])).tolist() == [0.0, 0.0]


def test_sums_of_many_and_long_segments_are_those_of_each_alone_in_float64() -> None:
    lengths = np.array([7, 0, CHUNK, 3 * CHUNK + 5, 0, 1, 2, CHUNK - 9, 4, 0])
    values = np.random.default_rng(0).normal(1e3, size=lengths.sum()).astype(np.float32)
    pieces = np.split(values, np.cumsum(lengths)[:-1])
    expected = [piece.sum(dtype=np.float64) for piece in pieces]
    np.testing.assert_allclose(segment_sums(values, lengths), expected, rtol=1e-14)


def test_a_value_that_is_not_finite_is_named() -> None:
    inputs = make_inputs([1.0], [2], values=[0.0, np.nan])
    with pytest.raises(InvariantError, match=r"gae: per_token is not finite.*values"):
        by_token("gae", inputs)


def test_turns_must_hold_exactly_the_trained_tokens_of_their_trajectory() -> None:
    with pytest.raises(InvariantError, match="trajectory 1 of 2 have 3 trained tokens"):
        make_turns(turn_lengths=np.array([1, 1, 2, 1]))
