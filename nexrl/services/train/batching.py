"""Micro-batches: which rows run together, and where each token of theirs lies.

Consumes the row lengths of a chunk; produces index arrays from which the back end gathers. Pure
numpy. The plan depends on lengths alone, so the same chunk is always cut the same way.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nexrl.types import BoolArray, IntArray, RowChunk

WORTH_A_PASS = 512
"""Slots of a micro-batch from which on the fixed cost of another pass is small."""

Index = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows laid out as B sequences of L slots; rows never share attention.

    Invariant: entry m says that the hidden state in flat slot `slots[m]` predicts the chunk's
    token `targets[m]`, the next one of the same row. A row's first token is predicted by nothing,
    hence never a target; its last token predicts nothing, hence is not laid out at all.
    """

    token_ids: Index
    """[B, L] padded with id 0 on the right, where no real token can see it."""
    position_ids: Index | None
    """[B, L] restarting at 0 with each row; None when every sequence is one row."""
    slots: Index
    """[M] flat position b * L + l of the state that predicts."""
    targets: Index
    """[M] position in the chunk of the token that is predicted."""


def plan_padded(lengths: IntArray, rows: Sequence[int], max_tokens: int) -> list[list[list[int]]]:
    """Micro-batches of sequences of one row each; longest first, padding counted.

    A row longer than `max_tokens` runs alone.
    """
    batches: list[list[list[int]]] = []
    for row in _longest_first(lengths, rows):
        width = int(lengths[batches[-1][0][0]]) if batches else 0
        size = len(batches[-1]) * width if batches else 0
        is_full = size + width > max_tokens
        # From here on every row would be a quarter padding: cheaper in a pass of their own.
        is_wasteful = size >= WORTH_A_PASS and int(lengths[row]) < 0.75 * width
        if not batches or is_full or is_wasteful:
            batches.append([])
        batches[-1].append([row])
    return batches


def plan_packed(lengths: IntArray, rows: Sequence[int], max_tokens: int) -> list[list[list[int]]]:
    """Micro-batches of sequences filled with several rows each.

    A sequence holds as many tokens as the longest row: attention costs the square of a sequence,
    so longer ones would waste what packing saves. Best fit, longest rows first.
    """
    order = _longest_first(lengths, rows)
    if not order:
        return []
    width = int(lengths[order[0]])
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free slots, sequence), ascending
    for row in order:
        length = int(lengths[row])
        found = bisect_left(room, (length, 0))
        if found == len(room):
            sequences.append([])
            free, index = width, len(sequences) - 1
        else:
            free, index = room.pop(found)
        sequences[index].append(row)
        insort(room, (free - length, index))
    per_batch = max(1, max_tokens // width)
    return [sequences[i : i + per_batch] for i in range(0, len(sequences), per_batch)]


def _longest_first(lengths: IntArray, rows: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-int(lengths[row]), row))


def micro_batches(
    chunk: RowChunk, rows: Sequence[int], wanted: BoolArray, *, max_tokens: int, packing: bool
) -> Iterator[MicroBatch]:
    """Lay out the given rows of a chunk, each of at least two tokens; `wanted` [N] marks those to
    predict."""
    num_fed = chunk.lengths.astype(np.int32) - 1
    offsets = chunk.offsets
    for sequences in (plan_packed if packing else plan_padded)(num_fed, rows, max_tokens):
        yield _lay_out(chunk.token_ids, num_fed, offsets, sequences, wanted)


def _lay_out(
    token_ids: IntArray,
    num_fed: IntArray,
    offsets: IntArray,
    sequences: list[list[int]],
    wanted: BoolArray,
) -> MicroBatch:
    rows = np.array([row for sequence in sequences for row in sequence], np.int64)
    row_lengths = num_fed[rows].astype(np.int64)
    before = np.cumsum(row_lengths) - row_lengths  # fed tokens of the rows before each
    num_rows = np.array([len(sequence) for sequence in sequences])
    sequence_of_row = np.repeat(np.arange(len(sequences)), num_rows)
    starts = before - np.repeat(before[np.cumsum(num_rows) - num_rows], num_rows)
    shape = (len(sequences), int((starts + row_lengths).max()))

    first_slots = sequence_of_row * shape[1] + starts
    within = np.arange(int(row_lengths.sum())) - np.repeat(before, row_lengths)
    sources = np.repeat(offsets[rows].astype(np.int64), row_lengths) + within
    slots = np.repeat(first_slots, row_lengths) + within

    padded = np.zeros(shape[0] * shape[1], np.int64)
    padded[slots] = token_ids[sources]
    predicted = wanted[sources + 1]
    is_packed = len(rows) > len(sequences)
    return MicroBatch(
        token_ids=padded.reshape(shape),
        position_ids=_positions(first_slots, row_lengths, shape) if is_packed else None,
        slots=slots[predicted],
        targets=sources[predicted] + 1,
    )


def _positions(first_slots: Index, row_lengths: Index, shape: tuple[int, int]) -> Index:
    """[B, L] positions that restart with each row; the padding at a sequence's end is one more
    such run."""
    run_starts = np.zeros(shape[0] * shape[1] + 1, np.int64)
    for bounds in (first_slots + row_lengths, first_slots):
        run_starts[bounds] = bounds
    positions: Index = np.arange(len(run_starts)) - np.maximum.accumulate(run_starts)
    return positions[:-1].reshape(shape)
