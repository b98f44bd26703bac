"""Whitening: advantages of a whole batch to mean 0 and standard deviation 1.

Every entry counts once, tokens where the array is [M], trajectories where it is [T], or as often as
`counts` says. The standard deviation is that of the batch itself (ddof 0), so one entry is allowed,
and WHITEN_EPSILON is added to it. A batch without spread becomes exactly 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nexrl.algorithms.groups import CONSTANT_SPREAD, Float64Array, IndexArray
from nexrl.algorithms.segments import parts, plain_sum, sum_of_products

WHITEN_EPSILON = 1e-8


@dataclass(slots=True)
class Moments:
    """Mean and spread under construction.

    Invariant: what is known depends on the values added and not on how calls split them, up to
    rounding; deviations are from means near the values, so large means cost no precision.
    """

    count: int = 0
    """Values added."""
    mean: float = 0.0
    """Their mean."""
    squares: float = 0.0
    """Sum of squared deviations from it."""

    def add(self, values: Float64Array) -> None:
        """Take in further values (parallel update of Chan et al. 1979)."""
        if not values.size:
            return
        mean = plain_sum(values) / values.size
        squares = sum_of_products(values, values)
        if values.size * mean**2 < 0.5 * squares:
            squares -= values.size * mean**2  # cancels no more than a bit, and spares a pass
        else:
            deviations = values - values.dtype.type(mean)
            squares = sum_of_products(deviations, deviations)
        gap, total = mean - self.mean, self.count + values.size
        self.squares += squares + gap**2 * self.count * values.size / total
        self.mean += gap * values.size / total
        self.count = total

    @property
    def std(self) -> float:
        """Population standard deviation; 0 without values."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def scale(self, dtype: Any) -> float:
        """1 / (std + WHITEN_EPSILON); 0 without spread beyond the rounding of values of `dtype`."""
        # In float32 a constant batch has the spread of its rounding, which must not be blown up.
        smallest = max(CONSTANT_SPREAD, 16 * float(np.finfo(dtype).eps))
        if self.std <= smallest * max(1.0, abs(self.mean)):
            return 0.0
        return 1.0 / (self.std + WHITEN_EPSILON)


def whiten(values: Float64Array, counts: IndexArray | None = None) -> Float64Array:
    """[n] -> (x - mean) / (std + WHITEN_EPSILON), a new array.

    `counts` [n]: how often each entry stands in the batch, as if it were repeated; None is once.
    """
    moments = moments_of(values) if counts is None else _moments_of_repeated(values, counts)
    whitened = values.copy()
    whiten_in_place(whitened, moments)
    return whitened


def moments_of(values: Any) -> Moments:
    """Of [n] values that each count once."""
    moments = Moments()
    for part in parts(len(values)):
        moments.add(values[part])
    return moments


def _moments_of_repeated(values: Float64Array, counts: IndexArray) -> Moments:
    total = int(counts.sum())
    if not total:
        return Moments()
    mean = sum_of_products(counts, values) / total
    squares = sum_of_products(counts, (values - mean) ** 2)
    return Moments(count=total, mean=mean, squares=squares)


def whiten_in_place(values: Any, moments: Moments) -> None:
    """The same with the moments of `values` already known."""
    scale = moments.scale(values.dtype)
    for part in parts(len(values)):
        some = values[part]
        some -= moments.mean
        some *= scale
