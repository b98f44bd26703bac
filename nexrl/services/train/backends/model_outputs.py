"""From a micro-batch to named outputs: one forward pass, and whatever was asked for from its end."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from nexrl.services.train.backends.hf_model import LoadedModel, logits_at, values_at
from nexrl.services.train.backends.token_scores import token_scores, top_scores
from nexrl.services.train.batching import MicroBatch
from nexrl.services.train.outputs import top_count
from nexrl.types import CANDIDATE_IDS, RowChunk


def outputs_at(
    model: LoadedModel,
    batch: MicroBatch,
    chunk: RowChunk,
    names: Collection[str],
    *,
    autocast: bool,
) -> dict[str, Tensor]:
    """[M, ...] at least the named outputs at the batch's targets, in float32 (ids in int64).

    Differentiable where gradients are enabled, except for top-K.
    """
    device = model.module.device
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        if model.head == "value":
            return {"values": values_at(model, batch)}
        logits = logits_at(model, batch)
    candidates = None
    if "candidate_logprobs" in names:
        # Within the vocabulary wherever they count; elsewhere they may be padding.
        ids = np.clip(chunk.inputs[CANDIDATE_IDS][batch.targets], 0, model.vocab_size - 1)
        candidates = torch.from_numpy(ids.astype(np.int64)).to(device)
    targets = torch.from_numpy(chunk.token_ids[batch.targets].astype(np.int64)).to(device)
    outputs = token_scores(
        logits,
        targets,
        temperature=chunk.temperature,
        with_entropy="entropy" in names,
        candidates=candidates,
    )
    for num_top in sorted({k for name in names if (k := top_count(name))}):
        ids_top, logprobs_top = top_scores(logits, num_top, temperature=chunk.temperature)
        outputs |= {f"top_ids:{num_top}": ids_top, f"top_logprobs:{num_top}": logprobs_top}
    return outputs
