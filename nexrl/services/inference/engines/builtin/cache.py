"""The KV cache: one slot per running sequence, active slots always the first ones.

A decode step attends to `[:num_active, :max_length]` of it as one view; a finished sequence's slot
is filled by the last active one, so room is free at once and the view stays dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

_LENGTH_CHUNK = 64

KeyValues = Sequence[torch.Tensor]
"""Keys of the first layer, its values, keys of the second ...: [rows, heads, length, head_dim]."""


class SlotCache(Cache):  # type: ignore[misc]  # untyped library
    """Slots of all layers; what the model calls `update` on during a decode step.

    Invariants: slots [0, num_active) belong to running sequences in batch order; no active slot
    holds tokens beyond `_used_length`; what lies beyond a sequence's length is finite, since a
    masked NaN would still poison the softmax.
    """

    def __init__(self, max_slots: int) -> None:
        super().__init__(layers=[])
        self._held: list[torch.Tensor] = []
        """[slots, length, heads, head_dim], in the order of KeyValues."""
        self._max_slots = max_slots
        self._num_active = 0
        self._first = 0
        self._view_length = 0
        self._used_length = 0
        self._flat_index = torch.zeros(0, dtype=torch.long)

    def append(self, prefilled: KeyValues, rows: npt.NDArray[np.int64], max_length: int) -> None:
        """Copy row `rows[i]` of a prefill into the i-th new slot; rows may repeat (shared prompt)."""
        first, last = self._num_active, self._num_active + len(rows)
        if not self._held:
            shape = (min(last, self._max_slots), _LENGTH_CHUNK)
            self._held = [new.new_zeros((*shape, new.shape[1], new.shape[3])) for new in prefilled]
        self._reserve(last, max_length)
        index = torch.from_numpy(rows).to(prefilled[0].device)
        for held, new in zip(self._held, prefilled, strict=True):
            held[first:last, : new.shape[2]] = new.transpose(1, 2)[index]
        self._num_active = last
        self._used_length = max(self._used_length, max_length)

    def keep(
        self, moves_to: npt.NDArray[np.int64], moves_from: npt.NDArray[np.int64], num_active: int
    ) -> None:
        """Fill the holes `moves_to` from `moves_from`; the first `num_active` slots remain."""
        if len(moves_to):
            device, used = self._held[0].device, self._used_length
            target = torch.from_numpy(moves_to).to(device)
            source = torch.from_numpy(moves_from).to(device)
            for held in self._held:
                held[target, :used] = held[source, :used]
        self._num_active = num_active
        if not num_active:
            self._used_length = 0

    def clear(self) -> None:
        """Forget all sequences and free their memory."""
        self._held = []
        self._num_active = self._used_length = 0

    def prepare_step(self, lengths: npt.NDArray[np.int64], first: int = 0) -> int:
        """Make room for one more token in each slot from `first` on; returns the view's length.

        `lengths` are the tokens already held, which are also the positions of the new ones. Slots
        beyond the active ones may be named: what is written there is never read.
        """
        self._first = first
        self._view_length = int(lengths.max()) + 1
        self._used_length = max(self._used_length, self._view_length)
        self._reserve(first + len(lengths), self._view_length)
        flat = (first + np.arange(len(lengths))) * self.get_seq_length() + lengths
        self._flat_index = torch.from_numpy(flat).to(self._held[0].device)
        return self._view_length

    def _reserve(self, num_slots: int, length: int) -> None:
        slots, capacity = self._held[0].shape[:2]
        if num_slots <= slots and length <= capacity:
            return
        # Doubling slots and adding a quarter of the length keeps the number of copies logarithmic.
        if num_slots > slots:
            slots = min(max(num_slots, 2 * slots), self._max_slots)
        if length > capacity:
            wanted = max(length, capacity + capacity // 4)
            capacity = -(-wanted // _LENGTH_CHUNK) * _LENGTH_CHUNK
        for i, held in enumerate(self._held):
            self._held[i] = held.new_zeros((slots, capacity, *held.shape[2:]))
            self._held[i][: held.shape[0], : held.shape[1]] = held

    # --- what the model calls ---------------------------------------------------------------

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per sequence at its own position; returns views over all tokens so far."""
        slots = slice(self._first, self._first + key_states.shape[0])
        views = []
        for i, states in enumerate((key_states, value_states)):
            held = self._held[2 * layer_idx + i]
            held.view(-1, *held.shape[2:]).index_copy_(0, self._flat_index, states[:, :, 0])
            views.append(held[slots, : self._view_length].transpose(1, 2))
        return views[0], views[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Capacity; sequences differ, and the engine gives positions itself."""
        return int(self._held[0].shape[1])

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset a mask would have; the engine brings its own mask."""
        return self.get_seq_length(), 0
