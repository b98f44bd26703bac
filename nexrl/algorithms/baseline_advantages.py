"""Advantages of single trajectories: a reward less a baseline that is not of its group.

All are [T]; r is the reward of a trajectory, token rewards included. Group sizes and groups without
signal make no difference here.
"""

from __future__ import annotations

from nexrl.algorithms.advantage_definition import (
    AdvantageDefinition,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
)
from nexrl.algorithms.groups import GroupStatistics

MOMENTUM = 0.9
"""Share of the moving baseline that a batch leaves as it was."""


def _remax(inputs: AdvantageInputs, _: GroupStatistics, __: AdvantageSettings) -> Advantages:
    """r - reward of the greedy completion of the same draw

    ReMax, Li et al. 2024.
    """
    assert inputs.greedy_rewards is not None
    return Advantages(per_trajectory=inputs.rewards - inputs.greedy_rewards)


def _reinforce(
    inputs: AdvantageInputs, _: GroupStatistics, settings: AdvantageSettings
) -> Advantages:
    """r - baseline

    The baseline is 0 (`none`), the mean of the batch (`batch`), or the mean of batches before
    (`moving`, see `moved_baseline`). Williams 1992.
    """
    return Advantages(per_trajectory=inputs.rewards - _baseline(inputs, settings))


def _baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> float:
    if settings.baseline == "none" or not len(inputs.rewards):
        return 0.0
    if settings.baseline == "moving" and settings.moving_baseline is not None:
        return settings.moving_baseline
    return float(inputs.rewards.mean())


def moved_baseline(
    present: float | None, inputs: AdvantageInputs, *, momentum: float = MOMENTUM
) -> float | None:
    """The moving baseline after a batch: momentum x present + (1 - momentum) x mean total reward.

    Taken after the batch's advantages, so that a reward is never its own baseline. The first batch
    gives its mean; a batch without a reward changes nothing.
    """
    if not len(inputs.rewards):
        return present
    mean = float(inputs.total_rewards().mean())
    return mean if present is None else momentum * present + (1.0 - momentum) * mean


BASELINE_ADVANTAGES = (
    AdvantageDefinition(
        name="remax", group_relative=False, estimate=_remax, needs=("greedy_rewards",)
    ),
    AdvantageDefinition(name="reinforce", group_relative=False, estimate=_reinforce),
)
