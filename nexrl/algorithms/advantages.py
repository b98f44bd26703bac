"""Advantages of trajectories from their rewards, compared within explicit baseline groups.

The trainer calls `compute_advantages` once a batch. Everything is float64 and vectorised over
trajectories; groups are found by index, never by position or stride, so any group sizes in any
order work (FR-043, FR-044, FR-053). A trajectory counts once however many rows it has (FR-047).

With r the rewards of a group of n, mu their mean and sd their standard deviation:

    grpo       (r - mu) / (sd + 1e-6)     DeepSeekMath 2024, section 4.1.2
    dr_grpo    r - mu                     Liu et al. 2025, "Understanding R1-Zero-like training"
    rloo       n / (n - 1) (r - mu)       Ahmadian et al. 2024, eq. 8
    reinforce  r

Group-relative estimators give exactly 0 to a group of one and to a constant group, one with
max - min <= 1e-8 * max(1, |r|).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from nexrl.errors import ConfigError, InvariantError

Float64Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]
StdKind = Literal["sample", "population", "none"]

STD_EPSILON = 1e-6
CONSTANT_SPREAD = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may use of n trajectories. Equal lengths and finite rewards hold."""

    rewards: Float64Array
    """[n] scalar rewards; a trajectory without one is not among them (FR-070)."""
    groups: IndexArray
    """[n] index of the baseline group, see `group_index`."""
    lengths: IndexArray | None = None
    """[n] trained tokens of each trajectory, over all its rows; for estimators that weigh by it."""

    def __post_init__(self) -> None:
        for name, array in (("groups", self.groups), ("lengths", self.lengths)):
            if array is not None and len(array) != len(self.rewards):
                raise InvariantError(
                    f"advantages: {name} has {len(array)} entries for {len(self.rewards)} rewards"
                )
        if not np.isfinite(self.rewards).all():
            raise InvariantError("advantages: a reward is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Per-group sizes, means and spreads of n rewards in G groups."""

    inverse: IndexArray
    """[n] position of each trajectory's group in the arrays below."""
    sizes: Float64Array
    """[G] trajectories."""
    means: Float64Array
    """[G] mean reward."""
    spreads: Float64Array
    """[G] max - min."""
    constant: npt.NDArray[np.bool_]
    """[G] whether the group carries no signal: one member, or no spread beyond rounding."""


Estimator = Callable[[AdvantageInputs, GroupStatistics, StdKind], Float64Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageDefinition:
    """One estimator."""

    name: str
    """Name in `trainer.algorithm.advantage`."""
    group_relative: bool
    """Whether groups without signal get exactly 0."""
    estimate: Estimator
    """(inputs, statistics, std) -> [n] advantages, before the zero rule."""


def group_index(keys: Iterable[Hashable]) -> IndexArray:
    """[n] a number for each key, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64)


def group_statistics(rewards: Float64Array, groups: IndexArray) -> GroupStatistics:
    """Sizes, means and spreads by group; works for any group sizes in any order."""
    _, inverse = np.unique(groups, return_inverse=True)
    count = int(inverse.max(initial=-1)) + 1
    sizes = np.bincount(inverse, minlength=count).astype(np.float64)
    # Means of rewards relative to the group's smallest: rounding cannot give a constant group a
    # deviation, however large its rewards.
    lowest = np.full(count, np.inf)
    highest = np.full(count, -np.inf)
    np.minimum.at(lowest, inverse, rewards)
    np.maximum.at(highest, inverse, rewards)
    above = np.bincount(inverse, weights=rewards - lowest[inverse], minlength=count)
    spreads = highest - lowest
    magnitude = np.maximum(1.0, np.maximum(np.abs(lowest), np.abs(highest)))
    return GroupStatistics(
        inverse=inverse.astype(np.int64, copy=False),
        sizes=sizes,
        means=lowest + above / sizes,
        spreads=spreads,
        constant=(sizes < 2) | (spreads <= CONSTANT_SPREAD * magnitude),
    )


def compute_advantages(
    name: str, inputs: AdvantageInputs, *, std: StdKind = "sample"
) -> Float64Array:
    """[n] advantage of each trajectory, in the order given; `std` concerns grpo only."""
    if name not in ADVANTAGES:
        raise ConfigError(
            f"no advantage estimator is named {name!r} (accepted: {sorted(ADVANTAGES)})"
        )
    definition = ADVANTAGES[name]
    statistics = group_statistics(inputs.rewards, inputs.groups)
    advantages = definition.estimate(inputs, statistics, std)
    if definition.group_relative:
        advantages[statistics.constant[statistics.inverse]] = 0.0
    return advantages


def _centred(inputs: AdvantageInputs, statistics: GroupStatistics) -> Float64Array:
    return inputs.rewards - statistics.means[statistics.inverse]


def _grpo(inputs: AdvantageInputs, statistics: GroupStatistics, std: StdKind) -> Float64Array:
    deviations = _centred(inputs, statistics)
    if std == "none":
        return deviations
    degrees = statistics.sizes - (1.0 if std == "sample" else 0.0)
    squares = np.bincount(statistics.inverse, weights=deviations**2, minlength=len(degrees))
    scale = np.sqrt(squares / np.maximum(degrees, 1.0)) + STD_EPSILON
    return deviations / scale[statistics.inverse]


def _dr_grpo(inputs: AdvantageInputs, statistics: GroupStatistics, _: StdKind) -> Float64Array:
    return _centred(inputs, statistics)


def _rloo(inputs: AdvantageInputs, statistics: GroupStatistics, _: StdKind) -> Float64Array:
    factor = statistics.sizes / np.maximum(statistics.sizes - 1.0, 1.0)
    return factor[statistics.inverse] * _centred(inputs, statistics)


def _reinforce(inputs: AdvantageInputs, _: GroupStatistics, __: StdKind) -> Float64Array:
    return inputs.rewards.copy()


ADVANTAGES: Mapping[str, AdvantageDefinition] = {
    definition.name: definition
    for definition in (
        AdvantageDefinition(name="grpo", group_relative=True, estimate=_grpo),
        AdvantageDefinition(name="dr_grpo", group_relative=True, estimate=_dr_grpo),
        AdvantageDefinition(name="rloo", group_relative=True, estimate=_rloo),
        AdvantageDefinition(name="reinforce", group_relative=False, estimate=_reinforce),
    )
}
