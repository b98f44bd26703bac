"""Two ways to hold running sequences and draw their next tokens.

`BatchedDecoder` runs all of them through the model at once. `BlockDecoder` is deterministic: neither
matrix products nor attention keep a row's bits when batch size or padding changes, so it decodes in
batches of one fixed shape. With blocks of one row each sequence is alone, which is the reference.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

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
    contexts: list[IntArray] = []
    owners: list[int] = []
    index: dict[bytes, int] = {}
    longest = 0
    while waiting and len(choices) < room:
        context = waiting[0].context
        owner = index.setdefault(context.tobytes(), len(contexts))
        if owner == len(contexts):
            longest = max(longest, len(context))
            if contexts and (len(contexts) + 1) * longest > _PREFILL_TOKENS:
                break
            contexts.append(context)
        owners.append(owner)
        choices.append(waiting.popleft())
    return Prefill(choices=choices, contexts=contexts, owners=np.array(owners, np.int64))


class BatchedDecoder:
    """All sequences in one slot cache, whose slots are aligned with the rows of an ActiveBatch; one
    forward pass per step."""

    name = "batched"
    """For the capability record."""
    is_deterministic = False
    """Whether a sequence's bits do not depend on its neighbours."""

    def __init__(self, runner: ModelRunner, max_batch: int) -> None:
        self._runner = runner
        self.cache = SlotCache(max_batch)

    def add(self, prefill: Prefill, settings: DrawSettings) -> Draws:
        """Feed the contexts, give each choice a slot and draw its next token.

        One pass over the distinct contexts; their keys and values are copied to each choice.
        """
        logits_PV, key_values = self._runner.prefill(prefill.contexts)
        longest = max(len(c) for c in prefill.contexts)
        self.cache.append(key_values, prefill.owners, longest)
        return draw(logits_PV[torch.from_numpy(prefill.owners).to(logits_PV.device)], settings)

    def step(self, batch: ActiveBatch) -> Draws:
        """Feed the last token of every sequence and draw the next."""
        size = batch.size
        logits = self._runner.decode(self.cache, batch.last_tokens[:size], batch.lengths[:size])
        return draw(logits, batch.draw_settings(0, size))


class BlockDecoder(BatchedDecoder):
    """Sequences in blocks of one fixed size, whose rows provably do not touch each other.

    Every matrix product and elementwise operation has the same shape whoever is there, empty rows
    are fed along, and attention runs row by row over exact lengths. What is left to chance is that
    a kernel treats all rows of a shape alike: `rows_are_independent` tests that on this machine,
    and where it does not hold a block is one row.
    """

    is_deterministic = True

    def __init__(self, runner: ModelRunner, max_batch: int) -> None:
        independent = rows_are_independent(runner, max_batch)
        self.name = "blocks" if independent else "alone"
        self._size = min(BLOCK_SIZE, max_batch) if independent else 1
        super().__init__(runner, -(-max_batch // self._size) * self._size)

    def add(self, prefill: Prefill, settings: DrawSettings) -> Draws:
        """Each context is prefilled alone; choices of one prompt copy its keys and values."""
        prefilled = [self._runner.prefill([context]) for context in prefill.contexts]
        for owner in prefill.owners:
            key_values, length = prefilled[owner][1], len(prefill.contexts[owner])
            self.cache.append(key_values, np.zeros(1, np.int64), length)
        return self._draw(torch.cat([prefilled[owner][0] for owner in prefill.owners]), settings)

    def step(self, batch: ActiveBatch) -> Draws:
        """One pass for each block."""
        logits = [
            self._runner.decode(
                self.cache,
                _filled(batch.last_tokens[first : batch.size], self._size),
                _filled(batch.lengths[first : batch.size], self._size),
                first=first,
                by_row=True,
            )
            for first in range(0, batch.size, self._size)
        ]
        return self._draw(torch.cat(logits)[: batch.size], batch.draw_settings(0, batch.size))

    def _draw(self, logits_BV: torch.Tensor, settings: DrawSettings) -> Draws:
        num_rows = len(logits_BV)
        tokens, logprobs = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.float32)
        uncut = settings.without_cuts()
        for first in range(0, num_rows, self._size):
            # The last block is filled up with its last row.
            rows = np.minimum(np.arange(first, first + self._size), num_rows - 1)
            tokens[rows], logprobs[rows] = draw(logits_BV[torch.from_numpy(rows)], uncut.rows(rows))
        # Their number in a block depends on the neighbours, so they cannot share a shape.
        for row in np.flatnonzero(settings.is_cut):
            one = slice(row, row + 1)
            tokens[one], logprobs[one] = draw(logits_BV[one], settings.rows(one))
        return tokens, logprobs


def _filled(values: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """The first `width` values, with zeros for empty rows."""
    block = np.zeros(width, np.int64)
    block[: len(values)] = values[:width]
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
    seen: list[set[bytes]] = [set() for _ in range(_TEST_STEPS)]
    for places in (np.zeros(size, np.int64), rng.permutation(np.arange(size) % 2)):
        cache = SlotCache(size)
        for place in places:
            cache.append(prefilled[place], np.zeros(1, np.int64), int(lengths[place]))
        for step, bits in enumerate(seen):
            tokens = np.full(size, step % runner.vocab_size, np.int64)
            logits = runner.decode(cache, tokens, lengths[places] + step, by_row=True)
            _, logprobs = draw(logits, DrawSettings.same(size, seed=step))
            for i in np.flatnonzero(places == 0):
                bits.add(logits[i].float().numpy().tobytes() + logprobs[i].tobytes())
    return all(len(bits) == 1 for bits in seen)
