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
from transformers.cache_utils import Cache, CacheLayerMixin

_LENGTH_CHUNK = 64

KeyValues = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [rows, heads, length, head_dim] of each layer."""


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # untyped library
    """One layer's keys and values as [slots, length, heads, head_dim].

    Invariant: what lies beyond a sequence's length is finite, since a masked NaN would still
    poison the softmax.
    """

    is_sliding = False

    def __init__(self, key: torch.Tensor, value: torch.Tensor, num_slots: int, length: int) -> None:
        super().__init__()
        self.keys = key.new_zeros((num_slots, length, key.shape[1], key.shape[3]))
        self.values = value.new_zeros((num_slots, length, value.shape[1], value.shape[3]))
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the constructor allocates."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Never called: `SlotCache.update` writes all layers."""
        raise NotImplementedError("SlotLayer is written through SlotCache.update")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset a mask would have; the engine brings its own mask."""
        return self.keys.shape[1], 0

    def get_seq_length(self) -> int:
        """Capacity; sequences differ, and the engine gives positions itself."""
        return int(self.keys.shape[1])

    def get_max_length(self) -> int:
        """No maximum: the cache grows."""
        return -1

    def resize(self, num_slots: int, length: int) -> None:
        """Grow to the given capacity, keeping contents."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((num_slots, length, *old.shape[2:]))
            new[: old.shape[0], : old.shape[1]] = old
            setattr(self, name, new)


class SlotCache(Cache):  # type: ignore[misc]  # untyped library
    """Slots of all layers; what the model calls `update` on during a decode step.

    Invariants: slots [0, num_active) belong to running sequences in batch order; no active slot
    holds tokens beyond `_used_length`.
    """

    def __init__(self, max_slots: int) -> None:
        super().__init__(layers=[])
        self.layers: list[SlotLayer] = []
        self._max_slots = max_slots
        self._num_active = 0
        self._first = 0
        self._view_length = 0
        self._used_length = 0
        self._flat_index = torch.zeros(0, dtype=torch.long)

    @property
    def num_active(self) -> int:
        """Sequences held."""
        return self._num_active

    def append(self, prefilled: KeyValues, rows: npt.NDArray[np.int64], max_length: int) -> None:
        """Copy row `rows[i]` of a prefill into the i-th new slot; rows may repeat (shared prompt)."""
        first, last = self._num_active, self._num_active + len(rows)
        if not self.layers:
            self.layers = [
                SlotLayer(k, v, min(last, self._max_slots), _LENGTH_CHUNK) for k, v in prefilled
            ]
        self._reserve(last, max_length)
        index = torch.from_numpy(rows)
        for layer, (keys, values) in zip(self.layers, prefilled, strict=True):
            length = keys.shape[2]
            index = index.to(keys.device)
            layer.keys[first:last, :length] = keys.transpose(1, 2)[index]
            layer.values[first:last, :length] = values.transpose(1, 2)[index]
        self._num_active = last
        self._used_length = max(self._used_length, max_length)

    def keep(
        self, moves_to: npt.NDArray[np.int64], moves_from: npt.NDArray[np.int64], num_active: int
    ) -> None:
        """Fill the holes `moves_to` from `moves_from`; the first `num_active` slots remain."""
        if len(moves_to):
            for layer in self.layers:
                source = torch.from_numpy(moves_from).to(layer.keys.device)
                target = torch.from_numpy(moves_to).to(layer.keys.device)
                used = self._used_length
                layer.keys[target, :used] = layer.keys[source, :used]
                layer.values[target, :used] = layer.values[source, :used]
        self._num_active = num_active
        if not num_active:
            self._used_length = 0

    def prepare_step(self, lengths: npt.NDArray[np.int64], first: int = 0) -> int:
        """Make room for one more token in each slot from `first` on; returns the view's length.

        `lengths` are the tokens already held, which are also the positions of the new ones. Slots
        beyond the active ones may be named: what is written there is never read.
        """
        self._first = first
        self._view_length = int(lengths.max()) + 1
        self._used_length = max(self._used_length, self._view_length)
        self._reserve(first + len(lengths), self._view_length)
        capacity = self.layers[0].keys.shape[1]
        flat = (first + np.arange(len(lengths), dtype=np.int64)) * capacity + lengths
        self._flat_index = torch.from_numpy(flat).to(self.layers[0].keys.device)
        return self._view_length

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per sequence at its own position; returns views over all tokens so far."""
        layer, held = self.layers[layer_idx], []
        slots = slice(self._first, self._first + key_states.shape[0])
        for store, states in ((layer.keys, key_states), (layer.values, value_states)):
            store.view(-1, *store.shape[2:]).index_copy_(0, self._flat_index, states[:, :, 0])
            held.append(store[slots, : self._view_length].transpose(1, 2))
        return held[0], held[1]

    def _reserve(self, num_slots: int, length: int) -> None:
        slots, capacity = self.layers[0].keys.shape[:2]
        if num_slots <= slots and length <= capacity:
            return
        # Doubling slots and adding a quarter of the length keeps the number of copies logarithmic.
        if num_slots > slots:
            slots = min(max(num_slots, 2 * slots), self._max_slots)
        if length > capacity:
            wanted = max(length, capacity + capacity // 4)
            capacity = -(-wanted // _LENGTH_CHUNK) * _LENGTH_CHUNK
        for layer in self.layers:
            layer.resize(slots, capacity)
