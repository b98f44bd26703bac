"""The model and its forward passes: prefill, decode and score. No scheduling, no sampling.

Any Hugging Face causal LM whose layers all use full attention works. Called from the engine's
thread alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nexrl.errors import ConfigError
from nexrl.services.inference.engines.builtin.cache import KeyValues, SlotCache
from nexrl.services.inference.engines.builtin.row_attention import register_row_attention
from nexrl.types import FloatArray, IntArray, RowChunk

_SCORE_TOKENS = 4096
_SCORE_LOGITS = 1 << 26
_SMALL_MODEL = 4_000_000


class ModelRunner:
    """A causal LM in evaluation mode on one device.

    Invariants: nothing outside `weights.py` changes a parameter; no parameter wants a gradient, and
    the engine's whole thread is in inference mode, caches included.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        device: str,
        max_context: int | None,
        row_attention: bool = False,
    ) -> None:
        """`row_attention` is what `decode_rows` needs; the other passes take their usual way."""
        self.device = _choose_device(device)
        attention = register_row_attention() if row_attention else "sdpa"
        self.model = _load_model(folder, getattr(torch, dtype), self.device, attention)
        self.dtype = dtype
        config = self.model.config.get_text_config()
        limit = int(getattr(config, "max_position_embeddings", 0) or 0)
        self.max_context = _choose_context(max_context, limit)
        _refuse_windowed_layers(config, self.max_context)
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters

    @property
    def sensible_threads(self) -> int | None:
        """Threads when none are asked for: None is all cores. In a very small model an operation
        is over before a second thread has woken up."""
        num_parameters = sum(p.numel() for p in self.model.parameters())
        return 1 if self.device.type == "cpu" and num_parameters < _SMALL_MODEL else None

    def prefill(self, contexts: Sequence[IntArray]) -> tuple[torch.Tensor, KeyValues]:
        """Logits [P, V] after the last token of each context, and keys and values by layer.

        Contexts are padded on the right, where causal attention never looks back from.
        """
        from transformers import DynamicCache

        lengths = np.array([len(c) for c in contexts])
        ids_PL = np.zeros((len(contexts), int(lengths.max())), np.int64)
        for row, context in enumerate(contexts):
            ids_PL[row, : len(context)] = context
        last_positions = np.unique(lengths - 1)
        cache = DynamicCache()
        logits_PUV = self._forward(torch.from_numpy(ids_PL), cache, keep=last_positions)
        picked = torch.from_numpy(np.searchsorted(last_positions, lengths - 1)).to(self.device)
        rows = torch.arange(len(contexts), device=self.device)
        return logits_PUV[rows, picked], [(layer.keys, layer.values) for layer in cache.layers]

    def decode(
        self, cache: SlotCache, tokens: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Logits [B, V] after one more token for each active sequence.

        `lengths` are the tokens each slot holds, so also the position of the new token.
        """
        view = cache.prepare_step(lengths)
        lengths_B = torch.from_numpy(lengths).to(self.device)
        hidden_BT = torch.arange(view, device=self.device) > lengths_B[:, None]
        mask_B11T = torch.zeros(hidden_BT.shape, dtype=self.model.dtype, device=self.device)
        mask_B11T = mask_B11T.masked_fill_(hidden_BT, -torch.inf)[:, None, None, :]
        logits_B1V = self._forward(
            torch.from_numpy(tokens)[:, None],
            cache,
            attention_mask=mask_B11T,
            position_ids=lengths_B[:, None],
        )
        return logits_B1V[:, -1]

    def decode_rows(
        self,
        cache: SlotCache,
        first: int,
        tokens: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Logits [B, V] after one more token in slots [first, first + B), attention row by row."""
        cache.prepare_step(lengths, first)
        logits_B1V = self._forward(
            torch.from_numpy(tokens)[:, None],
            cache,
            position_ids=torch.from_numpy(lengths)[:, None].to(self.device),
            row_lengths=(lengths + 1).tolist(),
        )
        return logits_B1V[:, -1]

    def score(self, chunk: RowChunk, *, alone: bool) -> FloatArray:
        """[N] log probability of each token given those before it; entry 0 of each row is 0.

        With `alone` every row is a batch of its own, so its bits depend on no neighbour.
        """
        if not chunk.temperature > 0.0:
            raise ConfigError(f"score needs a temperature above 0, got {chunk.temperature}")
        scores = np.zeros(chunk.num_tokens, np.float32)
        offsets, order = chunk.offsets, np.argsort(chunk.lengths, kind="stable")
        for rows in _score_batches(chunk.lengths, order, 1 if alone else None, self.vocab_size):
            width = int(chunk.lengths[rows].max())
            ids_RL = np.zeros((len(rows), width), np.int64)
            for i, row in enumerate(rows):
                ids_RL[i, : chunk.lengths[row]] = chunk.token_ids[offsets[row] : offsets[row + 1]]
            ids = torch.from_numpy(ids_RL).to(self.device)
            logits_RLV = self._forward(ids, None)[:, :-1].float() / chunk.temperature
            logprobs_RL = torch.log_softmax(logits_RLV, -1).gather(2, ids[:, 1:, None])[..., 0]
            values = logprobs_RL.cpu().numpy()
            for i, row in enumerate(rows):
                scores[offsets[row] + 1 : offsets[row + 1]] = values[i, : chunk.lengths[row] - 1]
        return scores

    def _forward(
        self,
        ids: torch.Tensor,
        cache: Any,
        *,
        keep: npt.NDArray[np.int64] | None = None,
        **inputs: Any,
    ) -> torch.Tensor:
        """Logits [rows, kept positions, V]."""
        inputs[self._cache_keyword] = cache
        if keep is not None and self._keeps_logits:
            inputs["logits_to_keep"] = torch.from_numpy(keep).to(self.device)
        output = self.model(input_ids=ids.to(self.device), use_cache=cache is not None, **inputs)
        logits: torch.Tensor = output.logits
        if keep is not None and not self._keeps_logits:
            return logits[:, torch.from_numpy(keep).to(self.device)]
        return logits


def _score_batches(
    lengths: IntArray, order: npt.NDArray[np.int64], max_rows: int | None, vocab: int
) -> list[npt.NDArray[np.int64]]:
    """Rows with at least two tokens, shortest first, in batches bounded by padded tokens and logits."""
    budget = min(_SCORE_TOKENS, max(1, _SCORE_LOGITS // vocab))
    batches: list[list[int]] = []
    for row in order:
        if lengths[row] < 2:
            continue
        current = batches[-1] if batches else []
        full = max_rows is not None and len(current) >= max_rows
        if not current or full or (len(current) + 1) * int(lengths[row]) > budget:
            batches.append([])
        batches[-1].append(int(row))
    return [np.array(rows) for rows in batches]


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"device: {device!r} is not a device (cpu, cuda, cuda:0 ... or auto)"
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: {device!r} asked for, but torch sees no CUDA device")
    return chosen


def _load_model(folder: Path, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model folder {folder}: no config.json (expected a Hugging Face model folder)"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model folder {folder}: cannot be loaded: {error}") from error
    return model.to(device).eval().requires_grad_(False)


def _choose_context(asked: int | None, limit: int) -> int:
    if asked is None and limit <= 0:
        raise ConfigError(
            "max_context: the model states no limit (max_position_embeddings); set it"
        )
    if asked is not None and 0 < limit < asked:
        raise ConfigError(f"max_context: {asked} is more than the model's own limit of {limit}")
    return asked if asked is not None else limit


def _refuse_windowed_layers(config: Any, max_context: int) -> None:
    """The slot cache is exact for full attention only, and for windows that are never left."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"]
    other = sorted({k for k in kinds if k != "full_attention"})
    if other == ["sliding_attention"] and window is not None and max_context <= int(window):
        return
    if other:
        raise ConfigError(
            f"the builtin engine supports full attention; this model has {other} layers (window "
            f"{window}, max_context {max_context}; a max_context within the window is accepted)"
        )
