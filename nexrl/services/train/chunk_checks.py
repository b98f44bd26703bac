"""The door of the train service: what a chunk must be before any arithmetic is done on it.

A bad row is named here, in words; past this point it would be an index error inside a kernel, or
a NaN in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from nexrl.errors import ConfigError, InvariantError
from nexrl.types import Array, BoolArray, RowChunk


def check_outputs(names: tuple[str, ...], accepted: tuple[str, ...]) -> None:
    """ConfigError on an output that the back end does not have."""
    unknown = sorted(set(names) - set(accepted))
    if unknown:
        raise ConfigError(f"no output is named {unknown} (accepted: {sorted(accepted)})")


def check_chunk(chunk: RowChunk, *, vocab_size: int, max_positions: int) -> None:
    """InvariantError that names the row (and the token) that cannot be processed."""
    if not (math.isfinite(chunk.temperature) and chunk.temperature > 0):
        raise InvariantError(
            f"row chunk: temperature must be above 0 to have logprobs, got {chunk.temperature}"
        )
    if chunk.num_rows == 0:
        return
    longest = int(np.argmax(chunk.lengths))
    if chunk.lengths[longest] > max_positions:
        raise InvariantError(
            f"row chunk: row {longest} has {chunk.lengths[longest]} tokens, the model takes at "
            f"most {max_positions}"
        )
    bad = np.flatnonzero((chunk.token_ids < 0) | (chunk.token_ids >= vocab_size))
    if len(bad):
        raise InvariantError(
            f"row chunk: token id {chunk.token_ids[bad[0]]} {_where(chunk, bad[0])} is outside "
            f"the vocabulary [0, {vocab_size})"
        )


def check_finite(inputs: Mapping[str, Array], positions: BoolArray, chunk: RowChunk) -> None:
    """InvariantError on a NaN or infinite input at a position that is trained."""
    for name, values in inputs.items():
        bad = np.flatnonzero(positions & ~np.isfinite(values))
        if len(bad):
            raise InvariantError(
                f"row chunk: input {name!r} is {values[bad[0]]} {_where(chunk, bad[0])}"
            )


def check_gradients(gradients: Mapping[str, Array], chunk: RowChunk) -> BoolArray:
    """[N] where any gradient is nonzero; InvariantError on a wrong shape or a value not finite."""
    nonzero = np.zeros(chunk.num_tokens, np.bool_)
    for name, gradient in gradients.items():
        if gradient.shape != (chunk.num_tokens,):
            raise InvariantError(
                f"row chunk: the gradient of {name!r} has shape {gradient.shape}, the chunk has "
                f"{chunk.num_tokens} tokens"
            )
        nonzero |= gradient != 0
    positions = scored_positions(chunk, nonzero)
    check_finite(gradients, positions, chunk)
    return positions


def _where(chunk: RowChunk, position: np.intp) -> str:
    row = int(np.searchsorted(chunk.offsets, position, side="right")) - 1
    return f"at row {row}, token {int(position - chunk.offsets[row])}"


def scored_positions(chunk: RowChunk, mask: Array | None) -> BoolArray:
    """[N] where `mask` is nonzero (everywhere without one), except at the first token of each row,
    which nothing predicts."""
    positions = np.ones(chunk.num_tokens, np.bool_) if mask is None else mask.astype(np.bool_)
    starts = chunk.offsets[:-1][chunk.lengths > 0]
    positions[starts] = False
    return positions


def rows_with(chunk: RowChunk, positions: BoolArray) -> Array:
    """[R'] ascending indices of the rows in which any position is marked."""
    row_of_token = np.repeat(np.arange(chunk.num_rows), chunk.lengths)
    return np.unique(row_of_token[positions])
