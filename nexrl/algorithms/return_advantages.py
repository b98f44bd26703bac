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
    chunks,
    discounted_sums,
    segment_ends,
    segment_starts,
    segment_sums,
)
from nexrl.algorithms.whitening import Moments, whiten_in_place


def _gae(inputs: AdvantageInputs, _: GroupStatistics, settings: AdvantageSettings) -> Advantages:
    """A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; whitened by token

    Returns, what the critic shall learn, are A_t + V_t before whitening, with `critic_lambda` where
    it is given (decoupled). `length_adaptive` alpha makes the policy's lambda 1 - 1 / (alpha len)
    by trajectory, at least 0. GAE, Schulman et al. 2016, equation 16; whitening as in Ouyang et
    al. 2022; decoupled and length-adaptive lambda: VAPO 2025.
    """
    lengths = _lengths(inputs)
    critic_lambda = settings.gae_lambda
    if settings.critic_lambda is not None:
        critic_lambda = settings.critic_lambda
    policy_factors = settings.gamma * _policy_lambdas(lengths, settings)
    critic_factor = float(settings.gamma * critic_lambda)
    shared = settings.length_adaptive is None and critic_lambda == settings.gae_lambda
    num_tokens, dtype = int(lengths.sum()), _working_dtype(inputs.values, inputs.token_rewards)
    advantages, returns = np.empty(num_tokens, dtype), np.empty(num_tokens, dtype)
    moments = Moments()
    for some, tokens in chunks(lengths):
        deltas = _token_rewards(inputs, some, tokens, dtype)
        values = np.asarray(inputs.values[tokens], dtype)
        bootstrap = values * dtype(settings.gamma)
        bootstrap[segment_starts(lengths[some])] = 0.0
        deltas[:-1] += bootstrap[1:]
        deltas -= values
        to_critic = discounted_sums(deltas, lengths[some], critic_factor)
        np.add(to_critic, values, out=returns[tokens])
        if not shared:
            factors = policy_factors if isinstance(policy_factors, float) else policy_factors[some]
            to_critic = discounted_sums(deltas, lengths[some], factors)
        advantages[tokens] = to_critic
        moments.add(to_critic)
    if settings.whiten:
        whiten_in_place(advantages, moments)
    return Advantages(per_token=advantages, returns=returns)


def _policy_lambdas(lengths: IndexArray, settings: AdvantageSettings) -> float | Float64Array:
    if settings.length_adaptive is None:
        return float(settings.gae_lambda)
    return np.maximum(0.0, 1.0 - 1.0 / (settings.length_adaptive * np.maximum(lengths, 1)))


def _reinforce_pp(
    inputs: AdvantageInputs, _: GroupStatistics, settings: AdvantageSettings
) -> Advantages:
    """A_t = r_t + gamma A_{t+1}; whitened by token

    The return of each token, with the KL penalty among the token rewards. REINFORCE++, Hu et al.
    2025, equations 4 and 5.
    """
    lengths = _lengths(inputs)
    dtype = _working_dtype(inputs.token_rewards)
    advantages, moments = np.empty(int(lengths.sum()), dtype), Moments()
    for some, tokens in chunks(lengths):
        rewards = _token_rewards(inputs, some, tokens, dtype)
        found = discounted_sums(rewards, lengths[some], float(settings.gamma))
        advantages[tokens] = found
        moments.add(found)
    if settings.whiten:
        whiten_in_place(advantages, moments)
    return Advantages(per_token=advantages)


def _lengths(inputs: AdvantageInputs) -> IndexArray:
    assert inputs.lengths is not None
    return inputs.lengths


def _working_dtype(*arrays: Any) -> Any:
    """float32 where every per-token array given is: what comes from a model has no more digits, and
    half the memory is half the time. Else float64."""
    given = [array for array in arrays if array is not None]
    return np.float32 if given and all(a.dtype == np.float32 for a in given) else np.float64


def _token_rewards(inputs: AdvantageInputs, some: slice, tokens: slice, dtype: Any) -> Any:
    """Reward at each token of some trajectories, a new array; theirs is earned at the last one."""
    lengths = _lengths(inputs)[some]
    rewards = np.zeros(tokens.stop - tokens.start, dtype)
    if inputs.token_rewards is not None:
        rewards += inputs.token_rewards[tokens]
    rewards[segment_ends(lengths)] += inputs.rewards[some][lengths > 0]
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
    earned = earned.copy()
    earned[segment_ends(inputs.turn_counts)] += inputs.rewards[inputs.turn_counts > 0]
    found: Float64Array = discounted_sums(earned, inputs.turn_counts, float(settings.gamma))
    return found


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
