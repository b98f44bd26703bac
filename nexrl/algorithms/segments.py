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
ONE_THREAD = 1 << 18
"""Multiplications of a matrix product that BLAS still does in the calling thread. Its worker threads
spin, and cost more than they bring while a model trains beside."""
CHUNK = 1 << 16
"""Entries worked on at a time: their arrays stay in a core's cache."""


def sum_of_products(values: Any, others: Any) -> float:
    """Sum of values [n] x others [n], in the calling thread alone: see ONE_THREAD."""
    return float(np.einsum("i,i", values, others))


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


def discounted_sums(values: Any, lengths: IndexArray, factor: float | Float64Array) -> Any:
    """[M] y_t = x_t + factor y_{t+1} within each segment, y = 0 behind its end; the values' dtype.

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
        sums = discounted_sums(_first_of_block(blocks, of_block), num_blocks, factor**BLOCK)
        incoming = np.zeros(len(blocks), blocks.dtype)
        incoming[:-1] = sums[1:]
        incoming[segment_ends(num_blocks)] = 0.0
        incoming *= of_block
        blocks[:, -1] += incoming
    solved = _solve(blocks, of_block).reshape(-1)
    return solved if filled is None else solved[filled]


def _blocks(values: Any, lengths: IndexArray, num_blocks: IndexArray) -> tuple[Any, Any]:
    """A copy as [blocks, BLOCK], each segment filled up with zeros, and where its entries are."""
    missing = num_blocks * BLOCK - lengths
    if not missing.any():
        return values.reshape(-1, BLOCK).copy(), None
    filled = np.ones(int(num_blocks.sum()) * BLOCK, np.bool_)
    before = np.cumsum(missing) - missing
    offsets = np.cumsum(num_blocks) * BLOCK - missing
    filled[np.repeat(offsets - before, missing) + np.arange(int(missing.sum()))] = False
    padded = np.zeros(len(filled), values.dtype)
    padded[filled] = values
    return padded.reshape(-1, BLOCK), filled


def _first_of_block(blocks: Any, factor: float | Float64Array) -> Any:
    """[blocks] the sum at each block's first entry, nothing coming in."""
    if isinstance(factor, float):
        # A product with two columns costs as much as one with BLOCK of them.
        return _times(blocks, _kernel(factor, blocks.dtype))[:, 0].copy()
    sums = blocks[:, -1].copy()
    for column in range(BLOCK - 2, -1, -1):
        sums *= factor
        sums += blocks[:, column]
    return sums


def _solve(blocks: Any, factor: float | Float64Array) -> Any:
    """[blocks, BLOCK] the sum at every entry, nothing coming in."""
    if isinstance(factor, float):
        return _times(blocks, _kernel(factor, blocks.dtype))
    for column in range(BLOCK - 2, -1, -1):
        blocks[:, column] += factor * blocks[:, column + 1]
    return blocks


def _times(blocks: Any, kernel: Any) -> Any:
    """blocks @ kernel, in parts that need no threads."""
    product, rows = np.empty_like(blocks), ONE_THREAD // BLOCK**2
    for begin in range(0, len(blocks), rows):
        np.matmul(blocks[begin : begin + rows], kernel, out=product[begin : begin + rows])
    return product


@lru_cache(maxsize=64)
def _kernel(factor: float, dtype: Any) -> Any:
    """[BLOCK, BLOCK] what an entry (row) adds to the sum at an earlier one (column)."""
    steps = np.subtract.outer(np.arange(BLOCK), np.arange(BLOCK))
    return np.where(steps >= 0, factor ** np.maximum(steps, 0.0), 0.0).astype(dtype)
