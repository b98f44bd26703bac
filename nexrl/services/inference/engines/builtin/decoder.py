"""Three ways to hold running sequences and draw their next tokens.

`BatchedDecoder` runs all of them through the model at once. The others are deterministic: neither
matrix products nor attention keep a row's bits when batch size or padding changes, so
`AloneDecoder`, the reference, prefills, decodes and draws each sequence as a batch of one, and
`BlockDecoder` gets several times its speed from batches of one fixed shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from nexrl.services.inference.engines.builtin.batch import ActiveBatch
from nexrl.services.inference.engines.builtin.cache import SlotCache
from nexrl.services.inference.engines.builtin.request import Choice
from nexrl.services.inference.engines.builtin.runner import ModelRunner
from nexrl.services.inference.engines.builtin.sampler import DrawSettings, draw
from nexrl.types import FloatArray, IntArray

BLOCK_SIZE = 32
_PREFILL_TOKENS = 8192
_TEST_STEPS = 3

Draws = tuple[npt.NDArray[np.int64], FloatArray]
"""Token ids [B] and logprobs [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Choices that start together, and the distinct contexts they continue."""

    choices: list[Choice]
    """In the order of their new rows."""
    contexts: list[IntArray]
    """Distinct, similar in length, bounded in padded size."""
    owners: npt.NDArray[np.int64]
    """[choices] index of each choice's context."""


def next_prefill(waiting: deque[Choice], room: int) -> Prefill:
    """Take from the front of `waiting` what one prefill starts; equal contexts are fed once.

    At least one choice and at most `room`; the order of arrival is kept.
    """
    choices: list[Choice] = []
    contexts: dict[bytes, IntArray] = {}
    owners: list[bytes] = []
    longest = 0
    while waiting and len(choices) < room:
        context = waiting[0].context
        key = context.tobytes()
        if key not in contexts:
            longest = max(longest, len(context))
            if contexts and (len(contexts) + 1) * longest > _PREFILL_TOKENS:
                break
            contexts[key] = context
        owners.append(key)
        choices.append(waiting.popleft())
    index = {key: i for i, key in enumerate(contexts)}
    return Prefill(
        choices=choices,
        contexts=list(contexts.values()),
        owners=np.array([index[key] for key in owners], np.int64),
    )


class Decoder(Protocol):
    """Caches of the running sequences, aligned with the rows of an ActiveBatch."""

    name: str
    """For the capability record."""
    batched: bool
    """Whether a sequence's bits may depend on its neighbours."""

    def add(self, prefill: Prefill, settings: DrawSettings) -> Draws:
        """Feed the contexts, give each choice a row and draw its next token."""
        ...

    def step(self, batch: ActiveBatch) -> Draws:
        """Feed the last token of every sequence and draw the next."""
        ...

    def keep(self, to: npt.NDArray[np.int64], source: npt.NDArray[np.int64], size: int) -> None:
        """Rows moved: fill slots `to` from `source`, then only the first `size` remain."""
        ...

    def clear(self) -> None:
        """Forget all sequences and free their memory."""
        ...


class BatchedDecoder:
    """All sequences in one slot cache; one forward pass per step."""

    name = "batched"
    batched = True

    def __init__(self, runner: ModelRunner, max_batch: int) -> None:
        self._runner = runner
        self._max_batch = max_batch
        self._cache = SlotCache(max_batch)

    def add(self, prefill: Prefill, settings: DrawSettings) -> Draws:
        """One pass over the distinct contexts; their keys and values are copied to each choice."""
        logits_PV, key_values = self._runner.prefill(prefill.contexts)
        longest = max(len(c) for c in prefill.contexts)
        self._cache.append(key_values, prefill.owners, longest)
        return draw(logits_PV[torch.from_numpy(prefill.owners).to(logits_PV.device)], settings)

    def step(self, batch: ActiveBatch) -> Draws:
        """One pass over the whole batch."""
        size = batch.size
        logits = self._runner.decode(self._cache, batch.last_tokens[:size], batch.lengths[:size])
        return draw(logits, batch.draw_settings(0, size))

    def keep(self, to: npt.NDArray[np.int64], source: npt.NDArray[np.int64], size: int) -> None:
        """Move slots in every layer."""
        self._cache.keep(to, source, size)

    def clear(self) -> None:
        """A new, empty cache."""
        self._cache = SlotCache(self._max_batch)


class AloneDecoder:
    """One cache of one slot for each sequence: every pass is a batch of one."""

    name = "alone"
    batched = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._caches: list[SlotCache] = []

    def add(self, prefill: Prefill, settings: DrawSettings) -> Draws:
        """Each context is prefilled alone; choices of one prompt copy its keys and values."""
        prefilled = [self._runner.prefill([context]) for context in prefill.contexts]
        logits: list[torch.Tensor] = []
        for owner in prefill.owners:
            row_logits, key_values = prefilled[owner]
            cache = SlotCache(1)
            cache.append(key_values, np.zeros(1, np.int64), len(prefill.contexts[owner]))
            self._caches.append(cache)
            logits.append(row_logits)
        return _draw_alone(logits, settings)

    def step(self, batch: ActiveBatch) -> Draws:
        """One pass for each sequence."""
        logits = [
            self._runner.decode(cache, batch.last_tokens[i : i + 1], batch.lengths[i : i + 1])
            for i, cache in enumerate(self._caches)
        ]
        return _draw_alone(logits, batch.draw_settings(0, batch.size))

    def keep(self, to: npt.NDArray[np.int64], source: npt.NDArray[np.int64], size: int) -> None:
        """Move whole caches."""
        for hole, mover in zip(to, source, strict=True):
            self._caches[hole] = self._caches[mover]
        del self._caches[size:]

    def clear(self) -> None:
        """Drop all caches."""
        self._caches = []


def _draw_alone(logits: Sequence[torch.Tensor], settings: DrawSettings) -> Draws:
    draws = [draw(row, settings.rows(i, i + 1)) for i, row in enumerate(logits)]
    return np.concatenate([t for t, _ in draws]), np.concatenate([p for _, p in draws])


class BlockDecoder:
    """Sequences in blocks of one fixed size, whose rows provably do not touch each other.

    Every matrix product and elementwise operation has the same shape whoever is there, empty rows
    are fed along, and attention runs row by row over exact lengths. What is left to chance is that
    a kernel treats all rows of a shape alike: `rows_are_independent` tests that on this machine.
    """

    name = "blocks"
    batched = False

    def __init__(self, runner: ModelRunner, max_batch: int) -> None:
        self._runner = runner
        self._size = min(BLOCK_SIZE, max_batch)
        self._max_slots = -(-max_batch // self._size) * self._size
        self._cache = SlotCache(self._max_slots)

    def add(self, prefill: Prefill, settings: DrawSettings) -> Draws:
        """Each context is prefilled alone; choices of one prompt copy its keys and values."""
        prefilled = [self._runner.prefill([context]) for context in prefill.contexts]
        for owner in prefill.owners:
            key_values, length = prefilled[owner][1], len(prefill.contexts[owner])
            self._cache.append(key_values, np.zeros(1, np.int64), length)
        return self._draw(torch.cat([prefilled[owner][0] for owner in prefill.owners]), settings)

    def step(self, batch: ActiveBatch) -> Draws:
        """One pass for each block."""
        logits = [
            self._runner.decode_rows(
                self._cache,
                first,
                _filled(batch.last_tokens[first : batch.size], self._size),
                _filled(batch.lengths[first : batch.size], self._size),
            )
            for first in range(0, batch.size, self._size)
        ]
        return self._draw(torch.cat(logits)[: batch.size], batch.draw_settings(0, batch.size))

    def _draw(self, logits_BV: torch.Tensor, settings: DrawSettings) -> Draws:
        num_rows = len(logits_BV)
        tokens, logprobs = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.float32)
        for first in range(0, num_rows, self._size):
            last = min(first + self._size, num_rows)
            block = logits_BV[first:last]
            if (num_empty := self._size - len(block)) > 0:
                block = torch.cat([block, block[:1].expand(num_empty, -1)])
            drawn = draw(block, settings.rows(first, last, width=self._size).without_cuts())
            tokens[first:last], logprobs[first:last] = (d[: last - first] for d in drawn)
        # Their number in a block depends on the neighbours, so they cannot share a shape.
        for row in map(int, np.flatnonzero(settings.is_cut)):
            drawn = draw(logits_BV[row : row + 1], settings.rows(row, row + 1))
            tokens[row], logprobs[row] = drawn[0][0], drawn[1][0]
        return tokens, logprobs

    def keep(self, to: npt.NDArray[np.int64], source: npt.NDArray[np.int64], size: int) -> None:
        """Move slots in every layer."""
        self._cache.keep(to, source, size)

    def clear(self) -> None:
        """A new, empty cache."""
        self._cache = SlotCache(self._max_slots)


def make_deterministic_decoder(runner: ModelRunner, max_batch: int) -> Decoder:
    """Blocks where this machine's kernels pass the test, else every sequence alone."""
    if rows_are_independent(runner, max_batch):
        return BlockDecoder(runner, max_batch)
    return AloneDecoder(runner)


def _filled(values: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """The first `width` values, with zeros for empty rows."""
    block = np.zeros(width, np.int64)
    block[: min(width, len(values))] = values[:width]
    return block


def rows_are_independent(runner: ModelRunner, max_batch: int) -> bool:
    """Whether a row of a block has the same bits wherever it stands and whoever stands beside it.

    One context fills a block, then stands in it at random between copies of another; all its rows
    must agree, bit for bit, in logits and in logprobs.
    """
    size = min(BLOCK_SIZE, max_batch)
    rng = np.random.default_rng(0)
    lengths = np.minimum((5, 9), runner.max_context - _TEST_STEPS - 1)
    prefilled = [
        runner.prefill([rng.integers(0, runner.vocab_size, n).astype(np.int32)])[1] for n in lengths
    ]
    seen: list[set[bytes]] = []
    for places in (np.zeros(size, np.int64), rng.permutation(np.arange(size) % 2)):
        cache = SlotCache(size)
        for place in places:
            cache.append(prefilled[place], np.zeros(1, np.int64), int(lengths[place]))
        bits: list[set[bytes]] = []
        for step in range(_TEST_STEPS):
            tokens = np.full(size, step % runner.vocab_size, np.int64)
            logits = runner.decode_rows(cache, 0, tokens, lengths[places] + step)
            _, logprobs = draw(logits, DrawSettings.same(size, seed=step))
            rows = np.flatnonzero(places == 0)
            bits.append({logits[i].float().numpy().tobytes() + logprobs[i].tobytes() for i in rows})
        seen.append(set().union(*bits) if all(len(b) == 1 for b in bits) else set())
    return bool(seen[0]) and seen[0] == seen[1]
