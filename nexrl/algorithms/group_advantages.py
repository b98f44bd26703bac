"""Group-relative advantages: what a trajectory earned against others that began like it.

r is the reward of a trajectory, token rewards included; mu, sd and n are its baseline group's mean,
standard deviation and size. All are [T], order of the trajectories as given. Groups of one and
groups whose rewards spread by no more than 1e-8 x max(1, |r|) get exactly 0, also after whitening.
"""

from __future__ import annotations

import math

import numpy as np

from nexrl.algorithms.advantage_definition import (
    AdvantageDefinition,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    StdKind,
)
from nexrl.algorithms.groups import Float64Array, GroupStatistics, group_statistics
from nexrl.algorithms.segments import segment_sums
from nexrl.algorithms.whitening import whiten
from nexrl.errors import ConfigError

STD_EPSILON = 1e-6


def standardised(statistics: GroupStatistics, std: StdKind) -> Float64Array:
    """[n] (r - mu) / (sd + 1e-6); with `none`, r - mu."""
    if std == "none":
        return statistics.deviations
    degrees = statistics.sizes - (1.0 if std == "sample" else 0.0)
    variances = statistics.sums(statistics.deviations**2) / np.maximum(degrees, 1.0)
    return statistics.deviations / (np.sqrt(variances) + STD_EPSILON)[statistics.inverse]


def _grpo(
    _: AdvantageInputs, statistics: GroupStatistics, settings: AdvantageSettings
) -> Advantages:
    """(r - mu) / (sd + 1e-6)

    sd has ddof 1 (`std: sample`), ddof 0 (`population`) or is left out (`none`).
    DeepSeekMath, Shao et al. 2024, section 4.1.2.
    """
    return Advantages(per_trajectory=standardised(statistics, settings.std))


def _dr_grpo(_: AdvantageInputs, statistics: GroupStatistics, __: AdvantageSettings) -> Advantages:
    """r - mu

    Belongs with aggregation `constant`. Understanding R1-Zero-like training, Liu et al. 2025.
    """
    return Advantages(per_trajectory=statistics.deviations)


def _rloo(_: AdvantageInputs, statistics: GroupStatistics, __: AdvantageSettings) -> Advantages:
    """r - mean of the others = n / (n - 1) (r - mu)

    Back to basics, Ahmadian et al. 2024 (REINFORCE leave-one-out).
    """
    factors = statistics.sizes / np.maximum(statistics.sizes - 1.0, 1.0)
    return Advantages(per_trajectory=factors[statistics.inverse] * statistics.deviations)


def _opo(inputs: AdvantageInputs, statistics: GroupStatistics, _: AdvantageSettings) -> Advantages:
    """r - sum(len_j r_j) / sum(len_j)

    len is a trajectory's trained tokens: the baseline of least variance when a gradient's squared
    norm grows with length. A group without trained tokens is compared with mu.
    On-policy RL with optimal reward baseline, Hao et al. 2025.
    """
    assert inputs.lengths is not None
    lengths = inputs.lengths.astype(np.float64)
    weighted = statistics.sums(lengths * statistics.deviations)
    # Deviations in place of rewards: a large mean common to all costs no precision.
    shifts = weighted / np.maximum(statistics.sums(lengths), 1.0)
    return Advantages(per_trajectory=statistics.deviations - shifts[statistics.inverse])


def _pass_at_k(
    inputs: AdvantageInputs, statistics: GroupStatistics, settings: AdvantageSettings
) -> Advantages:
    """R = 1 - C(neg, k) / C(n, k), s = sqrt(R (1 - R)); correct: (1 - R) / s;
    wrong: (1 - R - C(neg - 1, k - 1) / C(n - 1, k - 1)) / s

    A trajectory is correct when its reward, without token rewards, is at least `success_reward`;
    neg are the wrong ones of n. 0 where s = 0: all wrong, fewer than k wrong (in particular all
    correct), and k >= n. Token rewards are summed, centred in the group and added, so that a penalty
    cannot turn a correct trajectory into a wrong one.
    Pass@k training, Chen et al. 2025, equations 14 and 15 (analytical derivation).
    """
    correct = inputs.rewards >= settings.success_reward
    num_correct = statistics.sums(correct)
    pairs = np.stack([statistics.sizes, num_correct], axis=1).astype(np.int64)
    distinct, which = np.unique(pairs, axis=0, return_inverse=True)
    table = np.array([_pass_at_k_pair(n, c, settings.pass_k) for n, c in distinct.tolist()])
    by_group = table.reshape(-1, 2)[which.reshape(-1)]
    advantages = by_group[statistics.inverse, correct.astype(np.int64)]
    penalties = group_statistics(_token_reward_sums(inputs), inputs.groups).deviations
    return Advantages(per_trajectory=advantages + penalties)


def _pass_at_k_pair(n: int, correct: int, k: int) -> tuple[float, float]:
    """Advantages of a wrong and of a correct one among n.

    With q = C(neg, k) / C(n, k) and C(neg - 1, k - 1) / C(n - 1, k - 1) = q n / neg the two are
    -correct / neg sqrt(q / (1 - q)) and sqrt(q / (1 - q)). The quotient of exact integers is
    rounded once, so that n and k may be in the thousands.
    """
    wrong = n - correct
    missed, reached = math.comb(wrong, k), math.comb(n, k) - math.comb(wrong, k)
    if not missed or not reached:
        return 0.0, 0.0
    scale = math.sqrt(missed / reached)
    return -scale * correct / wrong, scale


def _gdpo(inputs: AdvantageInputs, _: GroupStatistics, settings: AdvantageSettings) -> Advantages:
    """whiten(sum over parts of weight (part - mu_part) / (sd_part + 1e-6))

    Each part is standardised in the group (ddof 1; 0 where it has no spread there), the weighted
    sum over the batch of trajectories. Token rewards are no part: they are summed, centred in the
    group and added before whitening, undivided, so that their coefficient keeps its meaning. A
    group is without signal when every part and the token rewards are constant in it, whatever
    their sum. GDPO, 2026 (arXiv 2601.05242).
    """
    unknown = sorted(set(settings.part_weights) - set(inputs.reward_parts))
    if unknown:
        raise ConfigError(
            f"trainer.algorithm.advantage.part_weights names {unknown}, which no reward has "
            f"(accepted: {sorted(inputs.reward_parts)})"
        )
    sums = group_statistics(_token_reward_sums(inputs), inputs.groups)
    total, silent = sums.deviations, sums.silent
    for name, part in inputs.reward_parts.items():
        of_part = group_statistics(part, inputs.groups)
        total = total + settings.part_weights.get(name, 1.0) * standardised(of_part, "sample")
        silent = silent & of_part.silent
    # Such a group is 0 already; it stays in the batch that is whitened over.
    return Advantages(
        per_trajectory=whiten(total) if settings.whiten else total,
        silent=silent,
    )


def _reinforce_pp_baseline(
    inputs: AdvantageInputs, statistics: GroupStatistics, settings: AdvantageSettings
) -> Advantages:
    """whiten(r - mu)

    Whitened over the batch by token: a trajectory counts by its trained tokens, once where lengths
    are not given. Groups without signal stay in that batch, as the zeros they are.
    REINFORCE++, Hu et al. 2025, equations 6 and 7 (baseline variant).
    """
    values = statistics.deviations
    return Advantages(per_trajectory=whiten(values, inputs.lengths) if settings.whiten else values)


def _token_reward_sums(inputs: AdvantageInputs) -> Float64Array:
    """[T] sums of token rewards, 0 without any."""
    if inputs.token_rewards is None or inputs.lengths is None:
        return np.zeros(len(inputs.rewards))
    return segment_sums(inputs.token_rewards, inputs.lengths)


GROUP_ADVANTAGES = (
    AdvantageDefinition(name="grpo", group_relative=True, estimate=_grpo),
    AdvantageDefinition(name="dr_grpo", group_relative=True, estimate=_dr_grpo),
    AdvantageDefinition(name="rloo", group_relative=True, estimate=_rloo),
    AdvantageDefinition(name="opo", group_relative=True, estimate=_opo, needs=("lengths",)),
    AdvantageDefinition(
        name="pass_at_k", group_relative=True, estimate=_pass_at_k, folds_token_rewards=False
    ),
    AdvantageDefinition(
        name="gdpo",
        group_relative=True,
        estimate=_gdpo,
        needs=("reward_parts",),
        folds_token_rewards=False,
    ),
    AdvantageDefinition(
        name="reinforce_pp_baseline", group_relative=True, estimate=_reinforce_pp_baseline
    ),
)
