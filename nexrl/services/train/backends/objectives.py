"""What a micro-batch is differentiated for: a named loss, or gradients that the caller has computed.

Consumes the model's outputs at the micro-batch's targets; produces one scalar. Both kinds are plain
sums over tokens, so any cut into micro-batches gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from nexrl.services.train.chunk_checks import row_numbers
from nexrl.services.train.policy_door import LossCall
from nexrl.types import CANDIDATE_IDS, Array, FloatArray, RowChunk

Objective = Callable[[Array, Mapping[str, Tensor]], Tensor]
"""Of targets [M], positions in the chunk (those of a row stand together, in order), and the model's
outputs at them, [M, ...] by name."""


def loss_objective(call: LossCall, chunk: RowChunk) -> Objective:
    """Sum of weight x term over the trained tokens alone: what an untrained one holds, be it NaN,
    cannot reach the loss."""

    def objective(targets: Array, outputs: Mapping[str, Tensor]) -> Tensor:
        chosen = call.trained[targets]
        device = next(iter(outputs.values())).device
        if not chosen.all():
            index = torch.from_numpy(np.flatnonzero(chosen)).to(device)
            outputs = {name: values.index_select(0, index) for name, values in outputs.items()}
            targets = targets[chosen]
        inputs = {name: _as_tensor(name, v[targets], device) for name, v in call.inputs.items()}
        if call.definition.level == "row":
            inputs["row"] = torch.from_numpy(row_numbers(chunk, targets)).to(device)
        used = {name: outputs[name] for name in call.outputs}
        total: Tensor = (call.definition.term(used, inputs, call.config) * inputs["weight"]).sum()
        return total

    return objective


def gradient_objective(gradients: Mapping[str, FloatArray]) -> Objective:
    """Sum over outputs o of <gradients[o], o>, whose gradient is the one given."""

    def objective(targets: Array, outputs: Mapping[str, Tensor]) -> Tensor:
        parts = []
        for name, gradient in gradients.items():
            values = outputs[name]
            given = _as_tensor(name, gradient[targets], values.device)
            parts.append((values * given).sum())
        return torch.stack(parts).sum()

    return objective


def _as_tensor(name: str, values: Array, device: torch.device) -> Tensor:
    """In float32, but ids as whole numbers."""
    dtype = np.int64 if name == CANDIDATE_IDS else np.float32
    return torch.from_numpy(values.astype(dtype, copy=False)).to(device)
