"""Advantages that step over time: tokens (gae, reinforce_pp) and turns (step_returns, gigpo).

All are [M]. Time is trained tokens only, the rows of a trajectory chained in order: an observation
is no step, so it neither discounts nor bootstraps. A trajectory's reward is earned at its last
trained token, or at the end of its last turn; nothing follows after that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nexrl.algorithms.advantage_definition import (
    AdvantageDefinition,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
)
from nexrl.algorithms.group_advantages import standardised
from nexrl.algorithms.groups import Float64Array, GroupStatistics, IndexArray, group_statistics
from nexrl.algorithms.segments import (
    discounted_sums,
    parts,
    segment_ends,
    segment_sums,
    whole_segments,
    working_dtype,
)
from nexrl.algorithms.whitening import Moments, moments_of, whiten_in_place


def _gae(inputs: AdvantageInputs, _: GroupStatistics, settings: AdvantageSettings) -> Advantages:
    """A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; whitened by token

    Returns, what the critic shall learn, are A_t + V_t before whitening, with `critic_lambda` where
    it is given (decoupled). `length_adaptive` alpha makes the policy's lambda 1 - 1 / (alpha len)
    by trajectory, at least 0. GAE, Schulman et al. 2016, equation 16; whitening as in Ouyang et
    al. 2022; decoupled and length-adaptive lambda: VAPO 2025.
    """
    lengths = _lengths(inputs)
    critic_lambda = settings.critic_lambda
    if critic_lambda is None:
        critic_lambda = settings.gae_lambda
    shared = settings.length_adaptive is None and critic_lambda == settings.gae_lambda
    policy_factors = settings.gamma * _policy_lambdas(lengths, settings)
    dtype = working_dtype(inputs.values, inputs.token_rewards)
    advantages, returns = np.empty(len(inputs.values), dtype), np.empty(len(inputs.values), dtype)
    moments = Moments()
    for some, tokens in whole_segments(lengths):
        found, targets = advantages[tokens], returns[tokens]
        _put_deltas(found, _part_of(inputs, some, tokens), settings.gamma)
        if not shared:
            targets[:] = found
            discounted_sums(targets, lengths[some], settings.gamma * critic_lambda)
        discounted_sums(found, lengths[some], policy_factors[some])
        np.add(found if shared else targets, inputs.values[tokens], out=targets)
        for part in parts(len(found)):
            moments.add(found[part])
    if settings.whiten:
        whiten_in_place(advantages, moments)
    return Advantages(per_token=advantages, returns=returns)


def _part_of(inputs: AdvantageInputs, some: slice, tokens: slice) -> AdvantageInputs:
    """What `_put_deltas` reads of some trajectories, which have these tokens."""
    rewards = inputs.token_rewards
    return AdvantageInputs(
        rewards=inputs.rewards[some],
        groups=inputs.groups[some],
        lengths=_lengths(inputs)[some],
        values=inputs.values[tokens],
        token_rewards=None if rewards is None else rewards[tokens],
    )


def _put_deltas(deltas: Any, inputs: AdvantageInputs, gamma: float) -> None:
    """[M] r_t + gamma V_{t+1} - V_t; no value follows a trajectory's last token."""
    values, token_rewards = inputs.values, inputs.token_rewards
    for part in parts(len(values)):
        following = values[part.start + 1 : part.stop + 1]
        some = deltas[part]
        np.multiply(following, gamma, out=some[: len(following)], dtype=deltas.dtype)
        some[len(following) :] = 0.0
        some -= values[part]
        if token_rewards is not None:
            some += token_rewards[part]
    ends = segment_ends(_lengths(inputs))
    deltas[ends] = _last_rewards(inputs) - values[ends]


def _policy_lambdas(lengths: IndexArray, settings: AdvantageSettings) -> Float64Array:
    if settings.length_adaptive is None:
        return np.full(len(lengths), settings.gae_lambda)
    return np.maximum(0.0, 1.0 - 1.0 / (settings.length_adaptive * np.maximum(lengths, 1)))


def _reinforce_pp(
    inputs: AdvantageInputs, _: GroupStatistics, settings: AdvantageSettings
) -> Advantages:
    """A_t = r_t + gamma A_{t+1}; whitened by token

    The return of each token, with the KL penalty among the token rewards. REINFORCE++, Hu et al.
    2025, equations 4 and 5.
    """
    if inputs.token_rewards is None:
        return Advantages(per_token=_decayed_rewards(inputs, settings))
    lengths = _lengths(inputs)
    advantages = np.array(inputs.token_rewards, working_dtype(inputs.token_rewards))
    advantages[segment_ends(lengths)] = _last_rewards(inputs)
    discounted_sums(advantages, lengths, settings.gamma)
    if settings.whiten:
        whiten_in_place(advantages, moments_of(advantages))
    return Advantages(per_token=advantages)


def _decayed_rewards(inputs: AdvantageInputs, settings: AdvantageSettings) -> Float64Array:
    """[M] reward x gamma ** (tokens still to come): all there is without token rewards."""
    lengths = _lengths(inputs)[_lengths(inputs) > 0]
    rewards = _last_rewards(inputs)
    powers = settings.gamma ** np.arange(lengths.max(initial=0), dtype=np.float64)[::-1]
    found = np.empty(int(lengths.sum()))
    shift, stop = 0.0, 0
    if settings.whiten:
        moments = _decayed_moments(rewards, lengths, settings.gamma)
        scale = moments.scale(found.dtype)
        rewards, shift = rewards * scale, -moments.mean * scale
    for reward, length in zip(rewards.tolist(), lengths.tolist(), strict=True):
        some = found[stop : stop + length]
        np.multiply(powers[len(powers) - length :], reward, out=some)
        some += shift
        stop += length
    return found


def _decayed_moments(rewards: Float64Array, lengths: IndexArray, gamma: float) -> Moments:
    """Of reward x gamma ** (tokens still to come), from sums over the longest trajectory's powers.

    1 - gamma ** k is summed in place of the powers: near gamma 1 these are all but equal, and
    their spread would be lost.
    """
    if not len(lengths):
        return Moments()
    lost = 1.0 - gamma ** np.arange(lengths.max(), dtype=np.float64)
    sums, squares = np.cumsum(lost)[lengths - 1], np.cumsum(lost**2)[lengths - 1]
    means = rewards * (1.0 - sums / lengths)
    within = rewards**2 * (squares - sums**2 / lengths)
    total = int(lengths.sum())
    mean = float((lengths * means).sum()) / total
    spread = float((within + lengths * (means - mean) ** 2).sum())
    return Moments(count=total, mean=mean, squares=spread)


def _lengths(inputs: AdvantageInputs) -> IndexArray:
    assert inputs.lengths is not None
    return inputs.lengths


def _last_rewards(inputs: AdvantageInputs) -> Float64Array:
    """Reward at the last token of each trajectory that has one."""
    rewards = inputs.rewards[_lengths(inputs) > 0]
    if inputs.token_rewards is not None:
        rewards = rewards + inputs.token_rewards[segment_ends(_lengths(inputs))]
    return rewards


def _step_returns(
    inputs: AdvantageInputs, _: GroupStatistics, settings: AdvantageSettings
) -> Advantages:
    """A_u = r_u + gamma A_{u+1}

    The discounted return of each turn u, on all of its tokens. r_u is the turn's reward with the
    token rewards inside it; the trajectory's reward is earned in the last turn.
    """
    return _spread_turns(inputs, _turn_returns(inputs, _turn_rewards(inputs), settings))


def _gigpo(inputs: AdvantageInputs, _: GroupStatistics, settings: AdvantageSettings) -> Advantages:
    """(R - mu) / (sd + 1e-6) + step_weight (R_u - mu_a) / (sd_a + 1e-6)

    R is the sum of a trajectory's rewards, compared in its baseline group. R_u is the discounted
    return from turn u, compared with those of all turns of the same baseline group that started
    from the same anchor state a, in whatever trajectory and at whatever time. A turn with an
    unknown anchor has no second part. Without turn rewards, the trajectory's own, earned in its
    last turn, is discounted back to all of them. Either part is exactly 0 where it compares with
    nothing or with equals. `std` as in grpo, for both.
    GiGPO, Feng et al. 2025 (episode and step relative advantages).
    """
    assert inputs.turn_counts is not None
    assert inputs.turn_anchors is not None
    earned = _turn_rewards(inputs)
    totals = inputs.rewards + segment_sums(earned, inputs.turn_counts)
    of_trajectory = standardised(group_statistics(totals, inputs.groups), settings.std)
    found = np.repeat(of_trajectory, inputs.turn_counts)
    known = inputs.turn_anchors >= 0
    anchors = inputs.turn_anchors[known]
    groups = np.repeat(inputs.groups, inputs.turn_counts)[known]
    states = groups * (anchors.max(initial=0) + 1) + anchors
    returns = _turn_returns(inputs, earned, settings)[known]
    of_turn = standardised(group_statistics(returns, states), settings.std)
    found[known] += settings.step_weight * of_turn
    return _spread_turns(inputs, found)


def _turn_rewards(inputs: AdvantageInputs) -> Float64Array:
    """[U] rewards earned within each turn."""
    assert inputs.turn_lengths is not None
    earned = np.zeros(len(inputs.turn_lengths))
    if inputs.turn_rewards is not None:
        earned += inputs.turn_rewards
    if inputs.token_rewards is not None:
        earned += segment_sums(inputs.token_rewards, inputs.turn_lengths)
    return earned


def _turn_returns(
    inputs: AdvantageInputs, earned: Float64Array, settings: AdvantageSettings
) -> Float64Array:
    """[U] discounted rewards from each turn on."""
    assert inputs.turn_counts is not None
    returns = earned.copy()
    returns[segment_ends(inputs.turn_counts)] += inputs.rewards[inputs.turn_counts > 0]
    discounted_sums(returns, inputs.turn_counts, settings.gamma)
    return returns


def _spread_turns(inputs: AdvantageInputs, per_turn: Float64Array) -> Advantages:
    assert inputs.turn_lengths is not None
    return Advantages(per_token=np.repeat(per_turn, inputs.turn_lengths))


_TURNS = ("turn_lengths", "turn_counts")
RETURN_ADVANTAGES = tuple(
    AdvantageDefinition(
        name=name, group_relative=False, estimate=estimate, needs=needs, folds_token_rewards=False
    )
    for name, estimate, needs in (
        ("gae", _gae, ("lengths", "values")),
        ("reinforce_pp", _reinforce_pp, ("lengths",)),
        ("step_returns", _step_returns, (*_TURNS, "turn_rewards")),
        ("gigpo", _gigpo, (*_TURNS, "turn_anchors")),
    )
)
