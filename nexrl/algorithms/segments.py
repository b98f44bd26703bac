"""Sums over segments: consecutive runs of a flat array, one for each trajectory or turn.

Estimators step over time here. No segment touches another, and an empty one is allowed anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from nexrl.algorithms.groups import Float64Array, IndexArray

BLOCK = 16
"""Entries that a row of a matrix product steps over; larger multiplies more, smaller recurses deeper.
"""
FEW_BLOCKS = 16
"""Blocks with one factor that a matrix product is worth calling for."""
ONE_THREAD = 1 << 18
"""Multiplications of a matrix product that BLAS still does in the calling thread. Its worker threads
spin, and cost more than they bring while a model trains beside."""
CHUNK = 1 << 16
"""Entries worked on at a time: their arrays stay in a core's cache."""
MANY = 1 << 22
"""Entries that are worked on over and over again: their arrays stay in the cores' common cache."""


def plain_sum(values: Any) -> float:
    """Sum of values [n], in half the time of np.sum, which adds pairwise."""
    return float(np.einsum("i->", values))


def sum_of_products(values: Any, others: Any) -> float:
    """Sum of values [n] x others [n], in the calling thread alone: see ONE_THREAD."""
    return float(np.einsum("i,i", values, others))


def working_dtype(*arrays: Any) -> Any:
    """float32 where every per-token array given is: what comes from a model has no more digits, and
    half the memory is half the time. Else float64."""
    given = [array for array in arrays if array is not None]
    return np.float32 if given and all(a.dtype == np.float32 for a in given) else np.float64


def segment_sums(values: Any, lengths: IndexArray) -> Float64Array:
    """[S] sum of each segment of [M] values, in float64; an empty segment is 0."""
    sums = np.zeros(len(lengths))
    filled = np.flatnonzero(lengths > 0)
    ends = np.cumsum(lengths[filled])
    starts = ends - lengths[filled]
    # reduceat converts all that it is given at once: some segments at a time stay in the cache.
    groups = np.searchsorted(starts, np.arange(0, len(values), CHUNK))
    for low, high in pairwise(np.unique([*groups, len(filled)]).tolist()):
        some = values[starts[low] : ends[high - 1]]
        sums[filled[low:high]] = np.add.reduceat(
            some, starts[low:high] - starts[low], dtype=np.float64
        )
    return sums


def segment_ends(lengths: IndexArray) -> IndexArray:
    """Position of the last entry of each segment that has one."""
    return np.cumsum(lengths)[lengths > 0] - 1


def parts(num: int) -> Iterator[slice]:
    """Consecutive slices of CHUNK entries, the last one shorter."""
    return (slice(begin, min(begin + CHUNK, num)) for begin in range(0, num, CHUNK))


def whole_segments(lengths: IndexArray) -> Iterator[tuple[slice, slice]]:
    """(segments, entries) of consecutive whole segments with at most MANY entries, or of one."""
    ends = np.cumsum(lengths)
    begin, done = 0, 0
    while begin < len(lengths):
        end = max(begin + 1, int(np.searchsorted(ends, done + MANY, side="right")))
        until = int(ends[end - 1])
        yield slice(begin, end), slice(done, until)
        begin, done = end, until


def discounted_sums(values: Any, lengths: IndexArray, factor: float | Float64Array) -> None:
    """In place, [M] x_t -> y_t = x_t + factor y_{t+1} within each segment, y = 0 behind its end.

    `factor` is one number or [S], one for each segment. Only powers of it are multiplied and
    nothing is divided or subtracted, so small factors lose no precision, nor do segments beside
    much larger ones.
    """
    filled = lengths > 0
    factors = np.broadcast_to(np.asarray(factor, np.float64), lengths.shape)[filled]
    _discount(values, np.cumsum(lengths[filled]), factors)


def _discount(values: Any, ends: IndexArray, factors: Float64Array) -> None:
    """The same for segments that have entries, each ending before `ends` [S].

    The array is cut into blocks, wherever segments end. The sum at a block's first entry follows
    the same recurrence over blocks, with factor ** BLOCK, and a chain of them ends with the block
    in which a segment does. Then each block is solved, given what comes in from the next. Blocks
    without an end inside are rows of matrix products; the rest are solved entry by entry, all at
    once.
    """
    if np.diff(ends, prepend=0).max(initial=0) <= 1:
        return
    num_whole, num_blocks = len(values) // BLOCK, -(-len(values) // BLOCK)
    blocks = values[: num_whole * BLOCK].reshape(-1, BLOCK)
    closing, at_edge = (ends - 1) // BLOCK, ends % BLOCK == 0
    products = _products(ends, factors, values.dtype)
    is_apart = np.ones(num_blocks, np.bool_)
    for rows, _ in products:
        is_apart[rows] = False
    is_apart[closing[~at_edge]] = True
    apart = _BlocksApart(values, np.flatnonzero(is_apart), ends, factors)

    sums = np.zeros(num_blocks, values.dtype)
    for rows, kernel in products:
        np.matmul(blocks[rows], kernel[:, 0], out=sums[rows])
    sums[is_apart] = apart.solved[0]
    chains, first = np.unique(closing, return_index=True)
    _discount(sums, chains + 1, factors[first] ** BLOCK)

    incoming = np.zeros(num_blocks, values.dtype)
    incoming[:-1] = sums[1:]
    incoming[closing[at_edge]] = 0.0
    for rows, kernel in products:
        block = blocks[rows]
        block[:, -1] += kernel[-1, -2] * incoming[rows]
        np.matmul(block, kernel, out=block)  # NumPy sees that the two overlap
    apart.write(values, incoming[is_apart])


def _products(ends: IndexArray, factors: Float64Array, dtype: Any) -> list[tuple[slice, Any]]:
    """(blocks, kernel [BLOCK, BLOCK]) of whole blocks with one factor, in parts without threads.

    A kernel says what an entry (row) adds to the sum at an earlier one (column).
    """
    changes = np.flatnonzero(np.diff(factors, prepend=np.nan))
    begins = np.append(0, ends)[changes]
    powers = np.zeros((len(changes), BLOCK + 1))
    powers[:, :BLOCK] = factors[changes, None] ** np.arange(BLOCK)
    steps = np.subtract.outer(np.arange(BLOCK), np.arange(BLOCK))
    kernels = powers.astype(dtype)[:, np.where(steps < 0, BLOCK, steps)]
    lows, highs = -(-begins // BLOCK), np.append(begins[1:], ends[-1]) // BLOCK
    many, size = highs - lows >= FEW_BLOCKS, ONE_THREAD // BLOCK**2
    return [
        (slice(low, min(low + size, high)), kernel)
        for begin, high, kernel in zip(
            lows[many].tolist(), highs[many].tolist(), kernels[many], strict=True
        )
        for low in range(begin, high, size)
    ]


class _BlocksApart:
    """Blocks solved entry by entry. Invariant: what comes in from the next block is not in yet."""

    def __init__(
        self, values: Any, which: IndexArray, ends: IndexArray, factors: Float64Array
    ) -> None:
        """`which` [B] blocks of `values`, in order; entries behind the last end are ignored."""
        self.positions = which * BLOCK + np.arange(BLOCK)[:, None]
        """[BLOCK, B] of each entry in `values`."""
        last = ends - 1
        rank = np.searchsorted(which, last // BLOCK)
        here = np.append(which, -1)[rank] == last // BLOCK
        is_end = np.zeros(self.positions.shape, np.int64)
        is_end[last[here] % BLOCK, rank[here]] = 1
        owner = np.searchsorted(ends, self.positions[0], side="right")
        owner = owner + np.cumsum(is_end, axis=0) - is_end
        steps = np.where(is_end, 0.0, np.append(factors, 0.0)[owner])
        self.steps = steps.astype(values.dtype)
        """[BLOCK, B] factor of the sum that follows an entry."""
        self.solved = values.take(self.positions, mode="clip")
        """[BLOCK, B] the sum at each entry."""
        for row in range(BLOCK - 2, -1, -1):
            self.solved[row] += self.steps[row] * self.solved[row + 1]

    def write(self, values: Any, incoming: Any) -> None:
        """Add what comes in [B], the sum at the next block's first entry, and put the sums back."""
        for row in range(BLOCK - 1, -1, -1):
            incoming = incoming * self.steps[row]
            self.solved[row] += incoming
        inside = self.positions < len(values)
        values[self.positions[inside]] = self.solved[inside]
