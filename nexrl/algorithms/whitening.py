"""Whitening: advantages of a whole batch to mean 0 and standard deviation 1.

Every entry counts once, tokens where the array is [M], trajectories where it is [T], or as often as
`counts` says. The standard deviation is that of the batch itself (ddof 0), so one entry is allowed,
and WHITEN_EPSILON is added to it. A batch without spread becomes exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nexrl.algorithms.groups import CONSTANT_SPREAD, Float64Array, IndexArray
from nexrl.algorithms.segments import CHUNK, sum_of_products

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
        mean = float(values.mean())
        deviations = values - values.dtype.type(mean)
        gap, total = mean - self.mean, self.count + values.size
        squares = sum_of_products(deviations, deviations)
        self.squares += squares + gap**2 * self.count * values.size / total
        self.mean += gap * values.size / total
        self.count = total

    @property
    def std(self) -> float:
        """Population standard deviation; 0 without values."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


def whiten(values: Float64Array, counts: IndexArray | None = None) -> Float64Array:
    """[n] -> (x - mean) / (std + WHITEN_EPSILON), a new array.

    `counts` [n]: how often each entry stands in the batch, as if it were repeated; None is once.
    """
    moments = Moments()
    if counts is not None:
        moments = _moments_of_repeated(values, counts)
    else:
        for part in _parts(values):
            moments.add(part)
    whitened = values.copy()
    whiten_in_place(whitened, moments)
    return whitened


def _moments_of_repeated(values: Float64Array, counts: IndexArray) -> Moments:
    total = int(counts.sum())
    if not total:
        return Moments()
    mean = sum_of_products(counts, values) / total
    squares = sum_of_products(counts, (values - mean) ** 2)
    return Moments(count=total, mean=mean, squares=squares)


def whiten_in_place(values: Float64Array, moments: Moments) -> None:
    """The same with the moments of `values` already known."""
    # In float32 a constant batch has the spread of its rounding, which must not be blown up.
    smallest = max(CONSTANT_SPREAD, 16 * float(np.finfo(values.dtype).eps))
    if moments.std <= smallest * max(1.0, abs(moments.mean)):
        values[:] = 0.0
        return
    scale = 1.0 / (moments.std + WHITEN_EPSILON)
    for part in _parts(values):
        part -= moments.mean
        part *= scale


def _parts(values: Float64Array) -> Iterator[Float64Array]:
    """Views that fit a core's cache."""
    return (values[begin : begin + CHUNK] for begin in range(0, len(values), CHUNK))
