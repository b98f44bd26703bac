"""Trajectories to row chunks: the last thing that happens before the train service is called.

    trajectories -> RowTable (flat columns) -> optimizer steps (rows by rollout group)
                 -> Chunk (rows of one temperature, bounded bytes) -> forward_backward

All per-token work is whole-array numpy. Rows are never split and keep the order given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.groups import IndexArray, group_index
from nexrl.errors import InvariantError
from nexrl.types import Array, BoolArray, FloatArray, IntArray, RowChunk, TokenRow, Trajectory

_ROW_BYTES = 4
_ID_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """The trainable rows of a batch, concatenated: R rows, N tokens, in the order given.

    Invariant: only rows with a trained token are in it, and the first token of a row is never
    trained, since no token stands before it that could predict it.
    """

    token_ids: IntArray
    """[N]"""
    lengths: IndexArray
    """[R] tokens per row."""
    starts: IndexArray
    """[R] position of each row's first token."""
    mask: BoolArray
    """[N] trained tokens."""
    num_trained: IndexArray
    """[R] trained tokens per row."""
    trajectories: IndexArray
    """[R] index of the row's trajectory in the list given."""
    behavior_logprobs: FloatArray
    """[N] engine logprobs; 0 where there is none."""
    known: BoolArray
    """[R] whether the row has engine logprobs of the distribution it was drawn from."""
    temperatures: npt.NDArray[np.float64]
    """[R] temperature of the draw."""
    oldest_versions: IndexArray
    """[R] oldest version number among trained tokens; -1 when unknown."""
    rows: tuple[TokenRow, ...]
    """[R] the rows themselves, for further columns."""

    @property
    def num_rows(self) -> int:
        """R"""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """N"""
        return len(self.token_ids)

    def spread(self, per_row: Array) -> Array:
        """[N] the value of each token's row."""
        return np.repeat(per_row, self.lengths)

    def select(self, chosen: BoolArray) -> RowTable:
        """The table of the rows chosen [R]; `trajectories` go on counting in the list given."""
        if chosen.all():
            return self
        tokens, lengths = self.spread(chosen), self.lengths[chosen]
        return RowTable(
            token_ids=self.token_ids[tokens],
            lengths=lengths,
            starts=np.cumsum(lengths) - lengths,
            mask=self.mask[tokens],
            num_trained=self.num_trained[chosen],
            trajectories=self.trajectories[chosen],
            behavior_logprobs=self.behavior_logprobs[tokens],
            known=self.known[chosen],
            temperatures=self.temperatures[chosen],
            oldest_versions=self.oldest_versions[chosen],
            rows=tuple(row for row, keep in zip(self.rows, chosen.tolist(), strict=True) if keep),
        )

    def trained_lengths(self, num_trajectories: int) -> IndexArray:
        """[T] trained tokens of each trajectory given, over all its rows."""
        counts = np.bincount(self.trajectories, self.num_trained, num_trajectories)
        return counts.astype(np.int64)

    def place(self, per_trained_token: Array) -> FloatArray:
        """[N] float32 column of values [M] of trained tokens; 0 elsewhere."""
        column = np.zeros(self.num_tokens, np.float32)
        column[self.mask] = per_trained_token
        return column

    def owners(self, positions: IndexArray) -> IndexArray:
        """[n] row of each token position."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def entries(self, positions: IndexArray, columns: Mapping[str, Array]) -> dict[str, Array]:
        """What a loss sees at some positions: [n, ...] entries of [N, ...] columns in float64, and
        `row` and `trajectory`, the numbers of each token's own, counted from 0 within them."""
        rows = self.owners(positions)
        found = at_positions(positions, columns)
        for name, owners in (("row", rows), ("trajectory", self.trajectories[rows])):
            found[name] = np.unique(owners, return_inverse=True)[1].astype(np.int64)
        return found


def at_positions(positions: IndexArray, columns: Mapping[str, Array]) -> dict[str, Array]:
    """[n, ...] entries of [N, ...] columns in float64; whole numbers stay whole."""
    return {
        name: column[positions].astype(np.float64 if column.dtype.kind == "f" else np.int64)
        for name, column in columns.items()
    }


def flatten(trajectories: Sequence[Trajectory], *, temperature: float | None = None) -> RowTable:
    """All rows with a trained token, as flat columns; `temperature` is given to all of them, as
    for a loss of the model's own distribution, whatever drew them."""
    pairs = [
        (index, row)
        for index, trajectory in enumerate(trajectories)
        for row in trajectory.rows
        if row.num_tokens > 1
    ]
    rows = [row for _, row in pairs]
    lengths = np.fromiter((row.num_tokens for row in rows), np.int64, len(rows))
    starts = np.cumsum(lengths) - lengths
    mask: BoolArray = _concatenate([row.loss_mask for row in rows], np.bool_)
    mask[starts] = False
    num_trained = np.add.reduceat(mask, starts, dtype=np.int64) if rows else lengths
    table = RowTable(
        token_ids=_concatenate([row.token_ids for row in rows], np.int32),
        lengths=lengths,
        starts=starts,
        mask=mask,
        num_trained=num_trained,
        trajectories=np.fromiter((index for index, _ in pairs), np.int64, len(pairs)),
        behavior_logprobs=_concatenate([_behavior_logprobs(row) for row in rows], np.float32),
        known=np.fromiter(map(_has_usable_logprobs, rows), np.bool_, len(rows)),
        temperatures=np.fromiter(
            (row.temperature if temperature is None else temperature for row in rows),
            np.float64,
            len(rows),
        ),
        oldest_versions=np.fromiter(map(_oldest_version, rows), np.int64, len(rows)),
        rows=tuple(rows),
    )
    return table.select(num_trained > 0)


def _oldest_version(row: TokenRow) -> int:
    if len(row.versions) == 1:  # by far the most frequent, and free of array work
        return row.versions[0].version.number
    oldest = row.oldest_trained_version()
    return -1 if oldest is None else oldest.number


def _concatenate(arrays: list[Any], dtype: Any) -> Any:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.zeros(0, dtype)


def _has_usable_logprobs(row: TokenRow) -> bool:
    """Raw logprobs of a tempered draw belong to another distribution than the one trained."""
    return row.behavior_logprobs is not None and (
        row.logprob_kind == "tempered" or row.temperature == 1.0
    )


def _behavior_logprobs(row: TokenRow) -> FloatArray:
    if row.behavior_logprobs is None or not _has_usable_logprobs(row):
        return np.zeros(row.num_tokens, np.float32)
    return row.behavior_logprobs


def split_by_group(trajectories: Sequence[Trajectory], num_parts: int) -> list[IndexArray]:
    """Indices of trajectories for each optimizer step: whole rollout groups, in the order given.

    Parts differ by at most one group; there are fewer parts than asked when groups are fewer.
    A rollout group is one draw of one item, whatever roles its trajectories have.
    """
    groups = group_index(
        (t.item_id, t.draw) if t.item_id else (t.group_id, 0) for t in trajectories
    )
    num_groups = int(groups.max(initial=-1)) + 1
    num_parts = min(num_parts, num_groups)
    part_of = np.arange(num_groups) * num_parts // max(num_groups, 1)
    return [np.flatnonzero(part_of[groups] == part) for part in range(num_parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One call to the train service, and which part of the table it came from."""

    rows: RowChunk
    """What is sent."""
    positions: IndexArray
    """[n] position in the table of each token sent, so that outputs find their way back."""


def make_chunks(
    table: RowTable,
    rows: IndexArray,
    inputs: Mapping[str, Array],
    *,
    max_chunk_bytes: int,
) -> list[Chunk]:
    """Chunks over the given rows; `inputs` are [N, ...] columns over the whole table.

    Rows of one chunk have one temperature and, in the order given, as many bytes as fit; a row
    larger than the bound travels alone, since rows are never split.
    """
    per_token = _ID_BYTES + sum(
        column.dtype.itemsize * math.prod(column.shape[1:]) for column in inputs.values()
    )
    chunks: list[Chunk] = []
    temperatures = table.temperatures[rows]
    for temperature in dict.fromkeys(temperatures.tolist()):
        same = rows[temperatures == temperature]
        sizes = table.lengths[same] * per_token + _ROW_BYTES
        for begin, end in _bounded_runs(sizes, max_chunk_bytes):
            chunks.append(_make_chunk(table, same[begin:end], inputs, temperature))
    return chunks


def _bounded_runs(sizes: IndexArray, bound: int) -> list[tuple[int, int]]:
    """Consecutive index ranges whose sizes sum to at most `bound`, each at least one long."""
    ends = np.cumsum(sizes)
    runs: list[tuple[int, int]] = []
    begin = 0
    while begin < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + bound, side="right")))
        runs.append((begin, end))
        begin = end
    return runs


def _make_chunk(
    table: RowTable, rows: IndexArray, inputs: Mapping[str, Array], temperature: float
) -> Chunk:
    if temperature <= 0:
        raise InvariantError(
            f"a row drawn at temperature {temperature:g} cannot be trained: greedy draws have no "
            "distribution (accepted: temperature > 0)"
        )
    lengths = table.lengths[rows]
    first = np.cumsum(lengths) - lengths
    positions = np.repeat(table.starts[rows] - first, lengths) + np.arange(int(lengths.sum()))
    return Chunk(
        rows=RowChunk(
            lengths=lengths.astype(np.int32),
            token_ids=table.token_ids[positions],
            inputs={name: column[positions] for name, column in inputs.items()},
            temperature=temperature,
        ),
        positions=positions,
    )


def describe(trajectory: Trajectory) -> str:
    """How errors name a trajectory."""
    return f"trajectory {trajectory.trajectory_id!r} (item {trajectory.item_id!r})"
