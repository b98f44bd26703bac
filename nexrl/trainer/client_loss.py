"""Losses written on this side of the wire: a scalar function of what `forward` returned.

Only gradients of outputs travel back, so such a loss works on every train service, may couple rows
of different calls (preference pairs, batch statistics), and needs nothing of ours on the server.
It costs a second forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from nexrl.errors import UserCodeError
from nexrl.types import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

Objective = Callable[[Mapping[str, "Tensor"]], "Tensor"]
"""Outputs by name, [n, ...] float64 tensors with gradients -> a scalar, minimised."""


def differentiate(
    objective: Objective, outputs: Mapping[str, FloatArray]
) -> tuple[float, dict[str, FloatArray]]:
    """The objective's value and its gradient by each output, in float64, returned as float32.

    An output that the objective does not use has gradient 0. Raises UserCodeError when the result
    is no scalar.
    """
    import torch

    tensors = {
        name: torch.tensor(np.asarray(values, np.float64), requires_grad=True)
        for name, values in outputs.items()
    }
    with torch.enable_grad():
        value = objective(tensors)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise UserCodeError(f"a client-side loss must return a scalar tensor, got {found}")
    if value.requires_grad:
        value.sum().backward()  # type: ignore[no-untyped-call]
    gradients: dict[str, FloatArray] = {
        name: np.zeros(tensor.shape, np.float32)
        if tensor.grad is None
        else tensor.grad.numpy().astype(np.float32)
        for name, tensor in tensors.items()
    }
    return float(value.detach().sum()), gradients
