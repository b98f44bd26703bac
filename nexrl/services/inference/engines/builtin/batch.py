"""The running sequences as arrays, so that the bookkeeping of a step is a few numpy calls.

Row i of every array is the sequence in cache slot i. Rows stay dense: a finished one is replaced
by the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nexrl.services.inference.engines.builtin.request import Choice
from nexrl.services.inference.engines.builtin.sampler import DrawSettings
from nexrl.types import FloatArray, PolicyVersion

_TOKENS_CHUNK = 64
_U64_MASK = (1 << 64) - 1
_FIELDS: tuple[tuple[str, Any], ...] = (
    ("lengths", np.int64),
    ("drawn", np.int64),
    ("limits", np.int64),
    ("last_tokens", np.int64),
    ("seeds", np.uint64),
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("top_k", np.int64),
    ("watched", np.bool_),
)


class ActiveBatch:
    """Running choices and their state.

    Invariants: `choices` and the first `size` rows of every array are aligned; `lengths[i]` is the
    number of tokens slot i holds; `tokens[i, :drawn[i]]` are all tokens drawn, earlier runs included.
    """

    lengths: npt.NDArray[np.int64]
    drawn: npt.NDArray[np.int64]
    limits: npt.NDArray[np.int64]
    last_tokens: npt.NDArray[np.int64]
    seeds: npt.NDArray[np.uint64]
    temperature: FloatArray
    top_p: FloatArray
    top_k: npt.NDArray[np.int64]
    watched: npt.NDArray[np.bool_]

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.choices: list[Choice] = []
        for name, dtype in _FIELDS:
            setattr(self, name, np.zeros(max_size, dtype))
        self.tokens = np.zeros((max_size, _TOKENS_CHUNK), np.int32)
        self.logprobs = np.zeros((max_size, _TOKENS_CHUNK), np.float32)

    @property
    def size(self) -> int:
        """Running sequences."""
        return len(self.choices)

    @property
    def room(self) -> int:
        """Sequences that may be added."""
        return self.max_size - len(self.choices)

    def append(self, choices: Sequence[Choice], version: PolicyVersion) -> None:
        """Add choices whose contexts the cache now holds."""
        for row, choice in enumerate(choices, start=self.size):
            sampling, num_drawn = choice.request.sampling, len(choice.token_ids)
            self.lengths[row] = len(choice.request.prompt) + num_drawn
            self.drawn[row] = num_drawn
            self.limits[row] = choice.limit
            self.seeds[row] = choice.request.seeds[choice.index] & _U64_MASK
            self.temperature[row] = sampling.temperature
            self.top_p[row] = sampling.top_p
            self.top_k[row] = sampling.top_k or 0
            self.watched[row] = bool(
                choice.request.streamed or choice.stop_text or sampling.stop_token_ids
            )
            self._widen(num_drawn)
            self.tokens[row, :num_drawn] = choice.token_ids
            self.logprobs[row, :num_drawn] = choice.logprobs
            choice.mark(num_drawn, version)
        self.choices.extend(choices)

    def draw_settings(self, first: int, last: int) -> DrawSettings:
        """How rows [first, last) draw their next token."""
        rows = slice(first, last)
        return DrawSettings(
            seeds=self.seeds[rows],
            positions=self.drawn[rows],
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
        )

    def record(
        self, first: int, last: int, tokens: npt.NDArray[np.int64], logprobs: FloatArray
    ) -> None:
        """Note one drawn token for each of rows [first, last)."""
        self._widen(int(self.drawn[first:last].max(initial=0)) + 1)
        rows = np.arange(first, last)
        self.tokens[rows, self.drawn[first:last]] = tokens
        self.logprobs[rows, self.drawn[first:last]] = logprobs
        self.last_tokens[first:last] = tokens
        self.drawn[first:last] += 1

    def remove(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """Take rows out; returns which slots to fill from which others, and the new size."""
        gone = np.zeros(self.size, np.bool_)
        gone[rows] = True
        size = self.size - int(gone.sum())
        to = np.flatnonzero(gone[:size])
        source = size + np.flatnonzero(~gone[size:])
        for name, _ in _FIELDS:
            array = getattr(self, name)
            array[to] = array[source]
        used = int(self.drawn[: self.size].max(initial=0))
        self.tokens[to, :used] = self.tokens[source, :used]
        self.logprobs[to, :used] = self.logprobs[source, :used]
        for hole, mover in zip(to, source, strict=True):
            self.choices[hole] = self.choices[mover]
        del self.choices[size:]
        return to, source, size

    def mark_all(self, version: PolicyVersion) -> None:
        """Tokens drawn from now on come from `version`."""
        for row, choice in enumerate(self.choices):
            choice.mark(int(self.drawn[row]), version)

    def _widen(self, width: int) -> None:
        if width <= self.tokens.shape[1]:
            return
        # By what is drawn, not by the limits: those are often far beyond what happens.
        new = -(-max(width, 2 * self.tokens.shape[1]) // _TOKENS_CHUNK) * _TOKENS_CHUNK
        for name in ("tokens", "logprobs"):
            old = getattr(self, name)
            wide = np.zeros((self.max_size, new), old.dtype)
            wide[:, : old.shape[1]] = old
            setattr(self, name, wide)
