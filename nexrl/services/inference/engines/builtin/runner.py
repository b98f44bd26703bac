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
        """`row_attention` is what decoding `by_row` needs; other passes take their usual way."""
        self.device = _choose_device(device)
        attention = register_row_attention() if row_attention else "sdpa"
        self.model = _load_model(folder, getattr(torch, dtype), self.device, attention)
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
        """Logits [P, V] after the last token of each context, and its keys and values.

        Contexts are padded on the right, where causal attention never looks back from.
        """
        from transformers import DynamicCache

        last_positions, picked = np.unique([len(c) - 1 for c in contexts], return_inverse=True)
        cache = DynamicCache()
        logits_PUV = self._forward(_padded(contexts), cache, keep=last_positions)
        rows = torch.arange(len(contexts), device=self.device)
        key_values = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        return logits_PUV[rows, torch.from_numpy(picked).to(self.device)], key_values

    def decode(
        self,
        cache: SlotCache,
        tokens: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        *,
        first: int = 0,
        by_row: bool = False,
    ) -> torch.Tensor:
        """Logits [B, V] after one more token in slots [first, first + B).

        `lengths` are the tokens each slot holds, so also the position of the new token. `by_row`
        gives every row an attention of its own, over its exact length.
        """
        view = cache.prepare_step(lengths, first)
        lengths_B = torch.from_numpy(lengths).to(self.device)
        inputs: dict[str, Any] = {"position_ids": lengths_B[:, None]}
        if by_row:
            inputs["row_lengths"] = (lengths + 1).tolist()
        else:
            hidden_BT = torch.arange(view, device=self.device) > lengths_B[:, None]
            mask_BT = torch.zeros(hidden_BT.shape, dtype=self.model.dtype, device=self.device)
            mask_BT = mask_BT.masked_fill_(hidden_BT, -torch.inf)
            inputs["attention_mask"] = mask_BT[:, None, None, :]
        return self._forward(torch.from_numpy(tokens)[:, None], cache, **inputs)[:, -1]

    def score(self, chunk: RowChunk, *, alone: bool) -> FloatArray:
        """[N] log probability of each token given those before it; entry 0 of each row is 0.

        With `alone` every row is a batch of its own, so its bits depend on no neighbour.
        """
        if not chunk.temperature > 0.0:
            raise ConfigError(f"score needs a temperature above 0, got {chunk.temperature}")
        scores = np.zeros(chunk.num_tokens, np.float32)
        rows = np.split(chunk.token_ids, chunk.offsets[1:-1])
        scores_of = np.split(scores, chunk.offsets[1:-1])  # views: writing there fills `scores`
        budget = 0 if alone else min(_SCORE_TOKENS, max(1, _SCORE_LOGITS // self.vocab_size))
        for batch in _score_batches(chunk.lengths, budget):
            ids = _padded([rows[i] for i in batch]).to(self.device)
            logits_RLV = self._forward(ids, None)[:, :-1].float() / chunk.temperature
            logprobs_RL = torch.log_softmax(logits_RLV, -1).gather(2, ids[:, 1:, None])[..., 0]
            for i, logprobs in zip(batch, logprobs_RL.cpu().numpy(), strict=True):
                scores_of[i][1:] = logprobs[: chunk.lengths[i] - 1]
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


def _padded(rows: Sequence[IntArray]) -> torch.Tensor:
    """[rows, longest] token ids, padded on the right with 0."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return torch.from_numpy(ids)


def _score_batches(lengths: IntArray, budget: int) -> list[list[int]]:
    """Rows with at least two tokens, shortest first, in batches of one row or of at most `budget`
    padded tokens."""
    batches: list[list[int]] = [[]]
    for row in np.argsort(lengths, kind="stable").tolist():
        if lengths[row] < 2:
            continue
        if batches[-1] and (len(batches[-1]) + 1) * int(lengths[row]) > budget:
            batches.append([])
        batches[-1].append(row)
    return [batch for batch in batches if batch]


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
