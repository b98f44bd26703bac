"""AdamW whose settings arrive with each step, and whose state can leave and come back bit by bit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nexrl.errors import InvariantError
from nexrl.types import OptimParams

_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Clipping, the finiteness check and the step over one policy's trainable parameters.

    Invariant: parameters and moments change only in `step`, and only by a finite gradient.
    `num_steps` counts applied steps since the moments were last empty.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.num_steps = 0
        self._optimizer: torch.optim.AdamW | None = None

    def _make(self) -> torch.optim.AdamW:
        matrices = [p for p in self._parameters.values() if p.ndim >= 2]
        vectors = [p for p in self._parameters.values() if p.ndim < 2]
        groups = [{"params": matrices, "decays": True}, {"params": vectors, "decays": False}]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, fused=True)

    def step(self, params: OptimParams) -> tuple[float, bool]:
        """Returns the gradient norm before clipping and whether the step was applied; zeroes the
        gradient either way. Parameters without a gradient count as having a zero one, so leaving
        out rows of weight 0 changes nothing."""
        weights = list(self._parameters.values())
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
        grad_norm = float(norm)
        applied = math.isfinite(grad_norm)
        if applied:
            if 0 < params.grad_clip_norm < grad_norm:
                torch.nn.utils.clip_grads_with_norm_(weights, params.grad_clip_norm, norm)
            optimizer = self._optimizer = self._optimizer or self._make()
            for group in optimizer.param_groups:
                group.update(
                    lr=params.lr,
                    betas=tuple(params.betas),
                    eps=params.eps,
                    weight_decay=params.weight_decay if group["decays"] else 0.0,
                )
            optimizer.step()
            self.num_steps += 1
        self.zero_grad()
        return grad_norm, applied

    def zero_grad(self) -> None:
        """Forget the accumulated gradient."""
        for weight in self._parameters.values():
            weight.grad = None

    def reset(self) -> None:
        """Forget the moments and the gradient."""
        self.zero_grad()
        self.num_steps = 0
        self._optimizer = None

    def state(self) -> dict[str, Tensor]:
        """Moments by `<moment>/<parameter name>`; empty before the first step."""
        if self._optimizer is None:
            return {}
        return {
            f"{moment}/{name}": self._optimizer.state[weight][moment]
            for name, weight in self._parameters.items()
            for moment in _MOMENTS
        }

    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Continue from what `state` returned; InvariantError when it is of another model."""
        self.reset()
        expected = {f"{m}/{name}" for m in _MOMENTS for name in self._parameters}
        if num_steps == 0 and not state:
            return
        if set(state) != expected:
            odd = sorted(set(state) ^ expected)[:4]
            raise InvariantError(f"optimizer state is of another model; not in both: {odd} ...")
        optimizer = self._make()
        for name, weight in self._parameters.items():
            moments = {m: state[f"{m}/{name}"] for m in _MOMENTS}
            for moment, values in moments.items():
                if values.shape != weight.shape:
                    raise InvariantError(
                        f"optimizer state {moment}/{name} has shape {tuple(values.shape)}, the "
                        f"parameter {tuple(weight.shape)}"
                    )
            optimizer.state[weight] = {
                "step": torch.tensor(float(num_steps), device=weight.device),
                **{m: v.to(weight.device).clone() for m, v in moments.items()},
            }
        self._optimizer = optimizer
        self.num_steps = num_steps
