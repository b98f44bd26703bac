"""Sums over segments: consecutive runs of a flat array, one for each trajectory or turn.

Estimators step over time here. No segment touches another, and an empty one is allowed anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from nexrl.algorithms.groups import Float64Array, IndexArray

BLOCK = 16
"""Entries that one matrix product steps over; larger multiplies more, smaller recurses deeper."""
CHUNK = 1 << 16
"""Entries worked on at a time: their arrays stay in a core's cache."""


def segment_sums(values: Any, lengths: IndexArray) -> Float64Array:
    """[S] sum of each segment of [M] values; an empty segment is 0."""
    sums = np.zeros(len(lengths))
    filled = lengths > 0
    if filled.any():
        sums[filled] = np.add.reduceat(values, segment_starts(lengths), dtype=np.float64)
    return sums


def segment_ends(lengths: IndexArray) -> IndexArray:
    """Position of the last entry of each segment that has one."""
    return np.cumsum(lengths)[lengths > 0] - 1


def segment_starts(lengths: IndexArray) -> IndexArray:
    """Position of the first entry of each segment that has one."""
    return (np.cumsum(lengths) - lengths)[lengths > 0]


def chunks(lengths: IndexArray) -> Iterator[tuple[slice, slice]]:
    """(segments, entries) of consecutive whole segments with about CHUNK entries together."""
    ends = np.cumsum(lengths)
    begin, done = 0, 0
    while begin < len(lengths):
        end = max(begin + 1, int(np.searchsorted(ends, done + CHUNK, side="right")))
        until = int(ends[end - 1])
        yield slice(begin, end), slice(done, until)
        begin, done = end, until


def discounted_sums(
    values: Float64Array, lengths: IndexArray, factor: float | Float64Array
) -> Float64Array:
    """[M] y_t = x_t + factor y_{t+1} within each segment, y = 0 behind its end.

    `factor` is one number or [S], one for each segment. Blocks are solved at once, given what
    comes in from the next block; what comes in is the same recurrence over the blocks' own sums,
    with factor ** BLOCK. Only powers of the factor are multiplied and nothing is divided or
    subtracted, so small factors lose no precision.
    """
    if lengths.max(initial=0) <= 1:
        return values.copy()
    num_blocks = -(-lengths // BLOCK)
    blocks, filled = _blocks(values, lengths, num_blocks)
    of_block = factor if isinstance(factor, float) else np.repeat(factor, num_blocks)
    if num_blocks.max() > 1:
        below = factor**BLOCK
        sums = discounted_sums(_first_of_block(blocks, of_block), num_blocks, below)
        incoming = np.zeros(len(blocks))
        incoming[:-1] = sums[1:]
        incoming[segment_ends(num_blocks)] = 0.0
        blocks[:, -1] += of_block * incoming
    solved = _solve(blocks, of_block).reshape(-1)
    return solved if filled is None else solved[filled]


def _blocks(
    values: Float64Array, lengths: IndexArray, num_blocks: IndexArray
) -> tuple[Float64Array, Any]:
    """A copy as [blocks, BLOCK], each segment filled up with zeros, and where its entries are."""
    missing = num_blocks * BLOCK - lengths
    if not missing.any():
        return values.reshape(-1, BLOCK).copy(), None
    filled = np.ones(int(num_blocks.sum()) * BLOCK, np.bool_)
    before = np.cumsum(missing) - missing
    offsets = np.cumsum(num_blocks) * BLOCK - missing
    filled[np.repeat(offsets - before, missing) + np.arange(int(missing.sum()))] = False
    padded = np.zeros(len(filled))
    padded[filled] = values
    return padded.reshape(-1, BLOCK), filled


def _first_of_block(blocks: Float64Array, factor: float | Float64Array) -> Float64Array:
    """[blocks] the sum at each block's first entry, nothing coming in."""
    if isinstance(factor, float):
        return blocks @ _kernel(factor)[:, 0]
    sums = blocks[:, -1].copy()
    for column in range(BLOCK - 2, -1, -1):
        sums *= factor
        sums += blocks[:, column]
    return sums


def _solve(blocks: Float64Array, factor: float | Float64Array) -> Float64Array:
    """[blocks, BLOCK] the sum at every entry, nothing coming in."""
    if isinstance(factor, float):
        return blocks @ _kernel(factor)
    for column in range(BLOCK - 2, -1, -1):
        blocks[:, column] += factor * blocks[:, column + 1]
    return blocks


@lru_cache(maxsize=64)
def _kernel(factor: float) -> Float64Array:
    """[BLOCK, BLOCK] what an entry (row) adds to the sum at an earlier one (column)."""
    steps = np.subtract.outer(np.arange(BLOCK), np.arange(BLOCK))
    return np.where(steps >= 0, factor ** np.maximum(steps, 0.0), 0.0)
