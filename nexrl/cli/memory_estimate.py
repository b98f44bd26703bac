"""How much memory a run will want, from the model's config.json and the headers of its weights.

An estimate for `nexrl plan`: what scales with the model and the settings, an upper bound for the
cache and the logits, no allocator overhead and no activations inside layers.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from nexrl.config.rule import family_of, uses_critic
from nexrl.config.schema import RunConfig
from nexrl.errors import ConfigError

_BYTES = {"float32": 4, "bfloat16": 2}
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What of a causal language model decides how much memory it takes."""

    num_parameters: int
    """All weights; an estimate when the folder has no weights yet."""
    vocab_size: int
    """V"""
    num_layers: int
    """Decoder layers."""
    kv_width: int
    """Key-value heads x head width."""
    max_positions: int
    """Longest row, in tokens; 0 when the model does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One part of the estimate."""

    what: str
    """Its name."""
    num_bytes: int
    """Its size."""
    device: str
    """Where it lies: `cpu` or the device of the service."""


def model_size(config: Mapping[str, Any], num_parameters: int | None = None) -> ModelSize | None:
    """Sizes from a config.json; None when it lacks the usual names of a decoder."""
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads, vocab = int(config["num_attention_heads"]), int(config["vocab_size"])
    except (KeyError, TypeError, ValueError):
        return None
    width = int(config.get("head_dim") or hidden // heads)
    kv_width = int(config.get("num_key_value_heads") or heads) * width
    inner = int(config.get("intermediate_size") or 4 * hidden)
    attention = 2 * hidden * heads * width + 2 * hidden * kv_width
    per_layer = attention + 3 * hidden * inner + 2 * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelSize(
        num_parameters=num_parameters or layers * per_layer + embeddings + hidden,
        vocab_size=vocab,
        num_layers=layers,
        kv_width=kv_width,
        max_positions=int(config.get("max_position_embeddings") or 0),
    )


def read_model_size(folder: Path) -> ModelSize | None:
    """Size from config.json and the headers of the safetensors files; no weight is read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        count = sum(count_elements(file) for file in sorted(folder.glob("*.safetensors")))
    except (ValueError, OSError, struct.error) as error:
        raise ConfigError(f"model folder {folder} cannot be read: {error}") from error
    return model_size(config, count or None)


def count_elements(file: Path) -> int:
    """Elements of all tensors of a safetensors file, from its header."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    shapes = (tensor["shape"] for name, tensor in header.items() if name != "__metadata__")
    return sum(math.prod(shape) for shape in shapes)


def estimate_memory(
    config: RunConfig,
    model: ModelSize,
    *,
    row_tokens: int,
    trained_tokens: int,
    teacher: ModelSize | None = None,
) -> list[MemoryItem]:
    """The parts that lie on this machine; services behind a `url` lie elsewhere.

    `row_tokens` is the longest row expected, prompt and completion; `trained_tokens` those of a
    batch of such rows.
    """
    items: list[MemoryItem] = []
    train, inference = config.service.train_service, config.service.inference_service
    if train.url is None:
        weights = _FLOAT32 * model.num_parameters
        tokens = max(min(train.micro_batch_tokens, trained_tokens), row_tokens)
        parts = [("weights", weights), ("gradients", weights), ("AdamW moments", 2 * weights)]
        parts += [(f"{name} policy", size * weights) for name, size in further_policies(config)]
        if teacher is not None:
            parts.append(("teacher policy", _FLOAT32 * teacher.num_parameters))
        parts.append(("logits of a micro-batch", 2 * _FLOAT32 * tokens * model.vocab_size))
        items += [
            MemoryItem(what=f"train: {w}", num_bytes=n, device=train.device) for w, n in parts
        ]
    # A reward model draws no tokens, so its run starts no engine.
    draws = family_of(config) != "reward_model"
    if draws and inference.url is None:
        size = _BYTES[inference.dtype]
        context = inference.max_context or model.max_positions or row_tokens
        cache = 2 * model.num_layers * model.kv_width * size * inference.max_batch * context
        parts = [("weights", size * model.num_parameters)]
        parts.append((f"KV cache, {inference.max_batch} x {context} tokens", cache))
        items += [
            MemoryItem(what=f"inference: {w}", num_bytes=n, device=inference.device)
            for w, n in parts
        ]
    return items


def further_policies(config: RunConfig) -> list[tuple[str, int]]:
    """Policies beside the one that is trained, each with its size in copies of the weights.

    A critic also has gradients and two moments. A teacher has a size of its own.
    """
    algorithm, found = config.trainer.algorithm, []
    family = family_of(config)
    if family == "rl" and algorithm.kl.coefficient > 0:
        found.append(("reference", 1))
    if family == "preference" and PREFERENCE_LOSSES[algorithm.preset].needs_reference:
        found.append(("reference", 1))
    if family == "rl" and uses_critic(config):
        found.append(("critic", 4))
    return found


def human_bytes(num_bytes: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
