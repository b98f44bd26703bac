"""Baseline groups: which trajectories are compared, found by key and never by position or stride.

Everything group-relative starts here: estimators, the dynamic-sampling filter and the reward
metrics agree on what a group without signal is, because they ask the same function.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]

CONSTANT_SPREAD = 1e-8


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
    deviations: Float64Array
    """[n] reward minus the group's mean; exactly 0 in a group without signal."""

    @property
    def silent(self) -> npt.NDArray[np.bool_]:
        """[n] whether the trajectory is in a group without signal."""
        return self.constant[self.inverse]

    def sums(self, values: npt.NDArray[np.number | np.bool_]) -> Float64Array:
        """[G] sum of [n] values in each group."""
        sums = np.bincount(self.inverse, weights=values, minlength=len(self.sizes))
        return sums.astype(np.float64, copy=False)


def group_index(keys: Iterable[Hashable]) -> IndexArray:
    """[n] a number for each key, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64)


def group_statistics(rewards: Float64Array, groups: IndexArray) -> GroupStatistics:
    """Sizes, means and spreads by group; works for any group sizes in any order."""
    _, inverse = np.unique(groups, return_inverse=True)
    count = int(inverse.max(initial=-1)) + 1
    sizes = np.bincount(inverse, minlength=count).astype(np.float64)
    lowest = np.full(count, np.inf)
    highest = np.full(count, -np.inf)
    np.minimum.at(lowest, inverse, rewards)
    np.maximum.at(highest, inverse, rewards)
    # Means of rewards relative to the group's smallest: rounding cannot give a constant group a
    # deviation, however large its rewards.
    above = rewards - lowest[inverse]
    mean_above = np.bincount(inverse, weights=above, minlength=count) / sizes
    spreads = highest - lowest
    magnitude = np.maximum(1.0, np.maximum(np.abs(lowest), np.abs(highest)))
    constant = (sizes < 2) | (spreads <= CONSTANT_SPREAD * magnitude)
    return GroupStatistics(
        inverse=inverse.astype(np.int64, copy=False),
        sizes=sizes,
        means=lowest + mean_above,
        spreads=spreads,
        constant=constant,
        deviations=np.where(constant[inverse], 0.0, above - mean_above[inverse]),
    )
