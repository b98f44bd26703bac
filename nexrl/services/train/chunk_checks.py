"""The door of the train service: what a chunk must be before any arithmetic is done on it.

A bad row is named here, in words; past this point it would be an index error inside a kernel, or
a NaN in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from nexrl.errors import InvariantError
from nexrl.services.train.outputs import candidate_ids, empty_output
from nexrl.types import CANDIDATE_IDS, Array, BoolArray, RowChunk


def check_chunk(chunk: RowChunk, *, vocab_size: int, max_positions: int) -> None:
    """InvariantError that names the row (and the token) that cannot be processed.

    A row's last token is never fed, so a row may have one token more than the model takes: the
    sentinel behind a row that is scored as a whole.
    """
    if not (math.isfinite(chunk.temperature) and chunk.temperature > 0):
        raise InvariantError(
            f"row chunk: temperature must be above 0 to have logprobs, got {chunk.temperature}"
        )
    if chunk.num_rows == 0:
        return
    longest = int(np.argmax(chunk.lengths))
    if chunk.lengths[longest] > max_positions + 1:
        raise InvariantError(
            f"row chunk: row {longest} has {chunk.lengths[longest]} tokens, the model takes at "
            f"most {max_positions} before the last"
        )
    bad = np.flatnonzero((chunk.token_ids < 0) | (chunk.token_ids >= vocab_size))
    if len(bad):
        raise InvariantError(
            f"row chunk: token id {chunk.token_ids[bad[0]]} {_where(chunk, bad[0])} is outside "
            f"the vocabulary [0, {vocab_size})"
        )


def check_finite(
    columns: Mapping[str, Array], positions: BoolArray, chunk: RowChunk, *, what: str = "input"
) -> None:
    """InvariantError on a NaN or infinite entry of an [N, ...] column at a position that is
    trained."""
    for name, values in columns.items():
        bad = np.flatnonzero(positions & ~_everywhere(np.isfinite(values)))
        if len(bad):
            raise InvariantError(
                f"row chunk: {what} {name!r} is {values[bad[0]]} {_where(chunk, bad[0])}"
            )


def check_widths(inputs: Mapping[str, Array]) -> None:
    """InvariantError on loss inputs that would be stretched to fit each other: all are [N], or as
    wide as the candidates where there are any; the weight is [N]."""
    candidates = inputs[CANDIDATE_IDS].shape if CANDIDATE_IDS in inputs else None
    for name, values in inputs.items():
        if values.ndim == 1 or (values.shape == candidates and name != "weight"):
            continue
        accepted = "[N]" if candidates is None or name == "weight" else f"[N] or {candidates}"
        raise InvariantError(
            f"row chunk: input {name!r} has shape {values.shape} (accepted: {accepted})"
        )


def check_candidates(chunk: RowChunk, positions: BoolArray, *, vocab_size: int) -> None:
    """InvariantError on `candidate_ids` outside the vocabulary at a position where they count."""
    ids = candidate_ids(chunk)
    bad = np.flatnonzero(positions & ~_everywhere((ids >= 0) & (ids < vocab_size)))
    if len(bad):
        raise InvariantError(
            f"row chunk: {CANDIDATE_IDS} {ids[bad[0]]} {_where(chunk, bad[0])} are not all inside "
            f"the vocabulary [0, {vocab_size})"
        )


def check_gradients(gradients: Mapping[str, Array], chunk: RowChunk) -> BoolArray:
    """[N] where any gradient is nonzero; InvariantError on a wrong shape or a value not finite."""
    nonzero = np.zeros(chunk.num_tokens, np.bool_)
    for name, gradient in gradients.items():
        expected = empty_output(name, chunk).shape
        if gradient.shape != expected:
            raise InvariantError(
                f"row chunk: the gradient of {name!r} has shape {gradient.shape}, the output "
                f"{expected}"
            )
        np.logical_or(nonzero, ~_everywhere(gradient == 0), out=nonzero)
    positions = scored_positions(chunk, nonzero)
    check_finite(gradients, positions, chunk, what="the gradient of")
    return positions


def _everywhere(claim: Array) -> BoolArray:
    """[N] whether it holds for all entries of a position; [N, ...] in."""
    result: BoolArray = np.all(claim, axis=tuple(range(1, claim.ndim)))
    return result


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


def row_numbers(chunk: RowChunk, targets: Array) -> Array:
    """[M] number of the row of each target, counted from 0 in the order in which rows come; the
    targets of a row stand together."""
    row_of_token = np.repeat(np.arange(chunk.num_rows), chunk.lengths)[targets]
    return np.cumsum(np.diff(row_of_token, prepend=row_of_token[:1]) != 0)
