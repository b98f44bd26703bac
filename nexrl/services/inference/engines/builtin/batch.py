"""The running sequences as arrays, so that the bookkeeping of a step is a few numpy calls.

Row i of every array is the sequence in cache slot i. Rows stay dense: a finished one is replaced
by the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nexrl.services.inference.engines.builtin.request import Choice
from nexrl.services.inference.engines.builtin.sampler import DrawSettings
from nexrl.types import FloatArray, PolicyVersion

_TOKENS_CHUNK = 64
_U64_MASK = (1 << 64) - 1


class ActiveBatch:
    """Running choices and their state.

    Invariants: `choices` and the first `size` rows of every array are aligned; `lengths[i]` is the
    number of tokens slot i holds; `tokens[i, :drawn[i]]` are all tokens drawn, earlier runs included.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.choices: list[Choice] = []
        self.lengths = np.zeros(max_size, np.int64)
        self.limits = np.zeros(max_size, np.int64)
        self.last_tokens = np.zeros(max_size, np.int64)
        self.watched = np.zeros(max_size, np.bool_)
        self._settings = DrawSettings.same(max_size, seed=0)
        # A token's position within its completion is the number of those drawn before it.
        self.drawn = self._settings.positions
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
            call, num_drawn = choice.request.call, len(choice.token_ids)
            sampling = call.sampling
            self.lengths[row] = len(call.prompt) + num_drawn
            self.drawn[row] = num_drawn
            self.limits[row] = choice.limit
            self._settings.seeds[row] = call.seeds[choice.index] & _U64_MASK
            self._settings.temperature[row] = sampling.temperature
            self._settings.top_p[row] = sampling.top_p
            self._settings.top_k[row] = sampling.top_k or 0
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
        return self._settings.rows(slice(first, last))

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

    def save(self, row: int) -> Choice:
        """The choice of a row, given all that it has drawn."""
        choice, num_drawn = self.choices[row], int(self.drawn[row])
        choice.token_ids = self.tokens[row, :num_drawn].copy()
        choice.logprobs = self.logprobs[row, :num_drawn].copy()
        return choice

    def remove(
        self, rows: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """Take rows out; returns which slots to fill from which others, and the new size."""
        gone = np.zeros(self.size, np.bool_)
        gone[rows] = True
        size = self.size - int(gone.sum())
        to = np.flatnonzero(gone[:size])
        source = size + np.flatnonzero(~gone[size:])
        used = int(self.drawn[: self.size].max(initial=0))
        own = (self.lengths, self.limits, self.last_tokens, self.watched)
        for array in (*own, *self._settings):
            array[to] = array[source]
        for wide in (self.tokens, self.logprobs):
            wide[to, :used] = wide[source, :used]
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
