"""Advantage estimators once more: plain loops in float64, written from the papers.

Independent of `nexrl.algorithms`, from which only the records of inputs and settings come. A group
is a list of positions with one key; a trajectory owns a run of trained tokens and a run of turns.
Each function is (inputs, settings) -> `Found`, zero rule included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nexrl.algorithms.advantage_definition import AdvantageInputs, AdvantageSettings
from tests.certify.reference_rules import without_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a reference estimator gives."""

    trajectories: list[float] | None = None
    """[T], or None when tokens differ."""
    tokens: list[float] = field(default_factory=list)
    """[M] when tokens differ."""
    returns: list[float] | None = None
    """[M] targets of a critic."""


Reference = Callable[[AdvantageInputs, AdvantageSettings], Found]


# --- groups, runs and moments ---------------------------------------------------------------------


def _groups(inputs: AdvantageInputs) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for position, key in enumerate(inputs.groups.tolist()):
        members.setdefault(key, []).append(position)
    return list(members.values())


def _runs(counts: Sequence[int]) -> Iterator[range]:
    start = 0
    for count in counts:
        yield range(start, start + count)
        start += count


def _ints(array: Any) -> list[int]:
    return [int(number) for number in array]


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def _deviation(numbers: Sequence[float], ddof: int) -> float:
    mean = _mean(numbers)
    degrees = max(len(numbers) - ddof, 1)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / degrees)


def _rewards(inputs: AdvantageInputs) -> list[float]:
    """[T] with further token rewards added up, for estimators that judge trajectories."""
    pairs = zip(inputs.rewards.tolist(), _token_sums(inputs), strict=True)
    return [reward + tokens for reward, tokens in pairs]


def _token_sums(inputs: AdvantageInputs) -> list[float]:
    if inputs.token_rewards is None:
        return [0.0] * len(inputs.rewards)
    runs = _runs(_ints(inputs.lengths))
    return [math.fsum(float(inputs.token_rewards[t]) for t in run) for run in runs]


def _centred(numbers: list[float], groups: list[list[int]]) -> list[float]:
    centred = list(numbers)
    for members in groups:
        mean = _mean([numbers[i] for i in members])
        for i in members:
            centred[i] = numbers[i] - mean
    return centred


def _whitened(numbers: list[float], settings: AdvantageSettings) -> list[float]:
    """Mean 0 and standard deviation 1 over all entries (ddof 0, epsilon 1e-8); a constant is 0."""
    if not settings.whiten or not numbers:
        return numbers
    mean, deviation = _mean(numbers), _deviation(numbers, 0)
    if max(numbers) - min(numbers) <= 1e-8 * max(1.0, *(abs(x) for x in numbers)):
        return [0.0] * len(numbers)
    return [(x - mean) / (deviation + 1e-8) for x in numbers]


def _by_group(
    inputs: AdvantageInputs, judge: Callable[[list[float], list[int]], list[float]]
) -> list[float]:
    """[T] `judge(rewards, members)` of each group that has a signal, 0 for the others."""
    rewards = _rewards(inputs)
    found = [0.0] * len(rewards)
    for members in _groups(inputs):
        group = [rewards[i] for i in members]
        if not without_signal(group):
            for i, advantage in zip(members, judge(group, members), strict=True):
                found[i] = advantage
    return found


def _grpo_of(group: list[float], std: str) -> list[float]:
    mean = _mean(group)
    if std == "none":
        return [r - mean for r in group]
    scale = _deviation(group, 1 if std == "sample" else 0) + 1e-6
    return [(r - mean) / scale for r in group]


# --- estimators of trajectories -------------------------------------------------------------------


def grpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """DeepSeekMath 2024, section 4.1.2: (r - mean) / std of the group."""
    return Found(trajectories=_by_group(inputs, lambda group, _: _grpo_of(group, settings.std)))


def dr_grpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """Understanding R1-Zero-like training 2025, section 3.2: r - mean."""
    return Found(trajectories=_by_group(inputs, lambda group, _: _grpo_of(group, "none")))


def rloo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """Ahmadian et al. 2024: r minus the mean of the other members."""

    def judge(group: list[float], _: list[int]) -> list[float]:
        return [r - (math.fsum(group) - r) / (len(group) - 1) for r in group]

    return Found(trajectories=_by_group(inputs, judge))


def opo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """OPO 2025: r minus the mean reward weighted by response length."""
    assert inputs.lengths is not None
    lengths = _ints(inputs.lengths)

    def judge(group: list[float], members: list[int]) -> list[float]:
        total = sum(lengths[i] for i in members)
        if not total:
            return _grpo_of(group, "none")
        products = [lengths[i] * r for i, r in zip(members, group, strict=True)]
        baseline = math.fsum(products) / total
        return [r - baseline for r in group]

    return Found(trajectories=_by_group(inputs, judge))


def pass_at_k(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """Pass@k training 2025, eqs. 14 and 15, from the numbers of right and wrong responses.

    A set of k passes unless all are wrong: R = 1 - C(wrong, k) / C(n, k), s = sqrt(R (1 - R)).
    Rightness is read from the reward alone; token rewards are centred in the group and added.
    """
    k, bar, groups = settings.pass_k, settings.success_reward, _groups(inputs)
    found = _centred(_token_sums(inputs), groups)
    for members in groups:
        rewards = [float(inputs.rewards[i]) for i in members]
        n, wrong = len(members), sum(r < bar for r in rewards)
        passed = 1.0 - math.comb(wrong, k) / math.comb(n, k) if n >= k else 1.0
        spread = math.sqrt(passed * (1.0 - passed))
        for i, reward in zip(members, rewards, strict=True):
            if spread and reward >= bar:
                found[i] += (1.0 - passed) / spread
            elif spread:
                others_wrong = math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
                found[i] += (1.0 - passed - others_wrong) / spread
    return Found(trajectories=_without_idle_groups(inputs, found))


def _without_idle_groups(inputs: AdvantageInputs, found: list[float]) -> list[float]:
    """The zero rule, by total rewards."""
    rewards = _rewards(inputs)
    for members in _groups(inputs):
        if without_signal([rewards[i] for i in members]):
            for i in members:
                found[i] = 0.0
    return found


def gdpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """GDPO 2026: parts standardised in the group, summed by weight, whitened over trajectories.

    Idle are groups in which no part and no sum of token rewards tells members apart.
    """
    groups = _groups(inputs)
    found = _centred(_token_sums(inputs), groups)
    judged = [_token_sums(inputs), *(part.tolist() for part in inputs.reward_parts.values())]
    for part, numbers in inputs.reward_parts.items():
        weight = settings.part_weights.get(part, 1.0)
        for members in groups:
            group = [float(numbers[i]) for i in members]
            if not without_signal(group):
                for i, advantage in zip(members, _grpo_of(group, "sample"), strict=True):
                    found[i] += weight * advantage
    found = _whitened(found, settings)
    for members in groups:
        if all(without_signal([numbers[i] for i in members]) for numbers in judged):
            for i in members:
                found[i] = 0.0
    return Found(trajectories=found)


def reinforce_pp_baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """REINFORCE++ 2025, eqs. 6 and 7: r - mean of the group, whitened over the batch's tokens.

    A trajectory without a token has no advantage (nan).
    """
    assert inputs.lengths is not None
    centred = _centred(_rewards(inputs), _groups(inputs))
    runs = list(_runs(_ints(inputs.lengths)))
    tokens = [value for value, run in zip(centred, runs, strict=True) for _ in run]
    whitened = _whitened(tokens, settings)
    first = [whitened[run[0]] if run else math.nan for run in runs]
    return Found(trajectories=_without_idle_groups(inputs, first))


def remax(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """Li et al. 2024: r minus the reward of the greedy response."""
    assert inputs.greedy_rewards is not None
    pairs = zip(_rewards(inputs), inputs.greedy_rewards.tolist(), strict=True)
    return Found(trajectories=[reward - greedy for reward, greedy in pairs])


def reinforce(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """Williams 1992: r minus nothing, the batch's mean, or a moving mean."""
    rewards = _rewards(inputs)
    baseline = 0.0
    if settings.baseline != "none" and rewards:
        baseline = _mean(rewards)
    if settings.baseline == "moving" and settings.moving_baseline is not None:
        baseline = settings.moving_baseline
    return Found(trajectories=[reward - baseline for reward in rewards])


def moved(present: float | None, inputs: AdvantageInputs, momentum: float) -> float | None:
    """The moving mean after a batch: momentum of what it was, the rest from the batch's mean total
    reward, which is all of it at first."""
    rewards = _rewards(inputs)
    if not rewards:
        return present
    return (
        _mean(rewards) if present is None else momentum * present + (1 - momentum) * _mean(rewards)
    )


# --- estimators over time -------------------------------------------------------------------------


def _earned(inputs: AdvantageInputs, run: range, reward: float) -> list[float]:
    """Reward at each token of a trajectory; the trajectory's own comes with its last token."""
    given = inputs.token_rewards
    earned = [0.0 if given is None else float(given[t]) for t in run]
    if earned:
        earned[-1] += reward
    return earned


def _generalised(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> list[float]:
    """GAE, Schulman et al. 2016, eq. 16, as the sum it is: sum_l (gamma lambda)^l delta_{t+l}."""
    following = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    count = len(deltas)
    return [
        math.fsum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, count))
        for t in range(count)
    ]


def gae(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """Schulman et al. 2016; targets A + V; VAPO 2025: decoupled and length-adaptive lambda."""
    lengths = _ints(inputs.lengths)
    found: list[float] = []
    returns: list[float] = []
    for i, run in enumerate(_runs(lengths)):
        earned = _earned(inputs, run, float(inputs.rewards[i]))
        values = [float(inputs.values[t]) for t in run]
        lam = settings.gae_lambda
        if settings.length_adaptive is not None and lengths[i]:
            lam = max(0.0, 1.0 - 1.0 / (settings.length_adaptive * lengths[i]))
        found += _generalised(earned, values, settings.gamma, lam)
        critic = settings.critic_lambda
        critic = settings.gae_lambda if critic is None else critic
        targets = _generalised(earned, values, settings.gamma, critic)
        returns += [a + v for a, v in zip(targets, values, strict=True)]
    return Found(tokens=_whitened(found, settings), returns=returns)


def _discounted(rewards: list[float], gamma: float) -> list[float]:
    count = len(rewards)
    return [math.fsum(gamma ** (u - t) * rewards[u] for u in range(t, count)) for t in range(count)]


def reinforce_pp(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """REINFORCE++ 2025: the return from each token on, whitened over the batch's tokens."""
    found: list[float] = []
    for i, run in enumerate(_runs(_ints(inputs.lengths))):
        found += _discounted(_earned(inputs, run, float(inputs.rewards[i])), settings.gamma)
    return Found(tokens=_whitened(found, settings))


def _turns(inputs: AdvantageInputs) -> tuple[list[range], list[list[float]]]:
    """Tokens of each turn, and by trajectory the reward earned within each of its turns."""
    assert inputs.turn_rewards is not None
    tokens = list(_runs(_ints(inputs.turn_lengths)))
    earned = []
    for i, turns in enumerate(_runs(_ints(inputs.turn_counts))):
        own = [float(inputs.turn_rewards[u]) for u in turns]
        if inputs.token_rewards is not None:
            for place, u in enumerate(turns):
                own[place] += math.fsum(float(inputs.token_rewards[t]) for t in tokens[u])
        if own:
            own[-1] += float(inputs.rewards[i])
        earned.append(own)
    return tokens, earned


def _on_tokens(per_turn: list[float], tokens: list[range]) -> list[float]:
    return [x for x, run in zip(per_turn, tokens, strict=True) for _ in run]


def step_returns(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """Discounted rewards of a turn and those after it, on all of the turn's tokens."""
    tokens, earned = _turns(inputs)
    returns = [x for own in earned for x in _discounted(own, settings.gamma)]
    return Found(tokens=_on_tokens(returns, tokens))


def gigpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """GiGPO 2025, eqs. 3, 6, 7, 8: grpo over trajectories plus grpo over turns from one state."""
    assert inputs.turn_anchors is not None
    tokens, earned = _turns(inputs)
    # A trajectory of which no turn is trained is compared like any other.
    totals = [
        math.fsum(own) if own else float(reward)
        for own, reward in zip(earned, inputs.rewards, strict=True)
    ]
    by_trajectory = [0.0] * len(totals)
    for members in _groups(inputs):
        group = [totals[i] for i in members]
        if not without_signal(group):
            for i, advantage in zip(members, _grpo_of(group, settings.std), strict=True):
                by_trajectory[i] = advantage
    owners = [i for i, own in enumerate(earned) for _ in own]
    returns = [x for own in earned for x in _discounted(own, settings.gamma)]
    found = [by_trajectory[i] for i in owners]
    for group_key in set(inputs.groups.tolist()):
        for anchor in set(inputs.turn_anchors.tolist()) - {-1}:
            same = [
                u
                for u, owner in enumerate(owners)
                if inputs.groups[owner] == group_key and inputs.turn_anchors[u] == anchor
            ]
            group = [returns[u] for u in same]
            if group and not without_signal(group):
                for u, advantage in zip(same, _grpo_of(group, settings.std), strict=True):
                    found[u] += settings.step_weight * advantage
    return Found(tokens=_on_tokens(found, tokens))


def distill(inputs: AdvantageInputs, settings: AdvantageSettings) -> Found:
    """On-policy distillation 2025: -beta (behavior - teacher) of each token, plus a share of grpo."""
    rewards = [float(r) for r in inputs.rewards]
    task = [0.0] * len(rewards)
    for members in _groups(inputs):
        group = [rewards[i] for i in members]
        if not without_signal(group):
            for i, advantage in zip(members, _grpo_of(group, settings.std), strict=True):
                task[i] = advantage
    found = []
    for i, run in enumerate(_runs(_ints(inputs.lengths))):
        for t in run:
            gap = float(inputs.behavior_logprobs[t]) - float(inputs.teacher_logprobs[t])
            dense = 0.0 if inputs.token_rewards is None else float(inputs.token_rewards[t])
            penalty = settings.distill_coefficient * gap
            found.append(settings.task_coefficient * task[i] + dense - penalty)
    return Found(tokens=found)


REFERENCES: dict[str, Reference] = {
    function.__name__: function
    for function in (
        grpo,
        dr_grpo,
        rloo,
        opo,
        pass_at_k,
        gdpo,
        reinforce_pp_baseline,
        remax,
        reinforce,
        gae,
        reinforce_pp,
        step_returns,
        gigpo,
        distill,
    )
}
