"""A train service small enough to reason about: a table of bigram logits, plain SGD, float64.

It keeps the whole TrainService contract (order of calls, plain weighted sums, atomic publications,
a non-finite gradient not applied), with the named losses of `nexrl.algorithms` and their true
gradients, so that tests of trainers and weight sync need no language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.losses import LOSSES, loss_definition
from nexrl.atomic import atomic_folder
from nexrl.errors import ServiceError
from nexrl.services.train.publication import NamedTensor, publish
from nexrl.types import (
    DEFAULT_POLICY,
    OUTPUT_MASK,
    BackwardOutput,
    FloatArray,
    ForwardOutput,
    LossSpec,
    ModelSpec,
    OptimParams,
    OptimResult,
    PolicyVersion,
    RowChunk,
    TrainInfo,
    WeightManifest,
)

Table = npt.NDArray[np.float64]


def bigram_logprobs(table: Any, chunk: RowChunk) -> FloatArray:
    """[N] logprob of each token given the one before it; 0 for the first of each row."""
    logits = np.asarray(table, np.float64)[_previous(chunk)] / chunk.temperature
    logits -= logits.max(axis=1, keepdims=True)
    scores = logits[np.arange(chunk.num_tokens), chunk.token_ids] - np.log(
        np.exp(logits).sum(axis=1)
    )
    scores[chunk.offsets[:-1]] = 0.0
    logprobs: FloatArray = scores.astype(np.float32)
    return logprobs


def _previous(chunk: RowChunk) -> npt.NDArray[np.int64]:
    return np.roll(chunk.token_ids.astype(np.int64), 1)


class ToyTrainService:
    """One [V, V] table of logits for each policy.

    Invariant: `gradients` holds the sum of all calls since the last optimizer step.
    """

    def __init__(self, vocab_size: int = 16, *, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self.tables: dict[str, Table] = {
            DEFAULT_POLICY: generator.normal(size=(vocab_size, vocab_size))
        }
        self.gradients: dict[str, Table] = {}
        self.steps: dict[str, int] = {}
        self.calls: list[tuple[str, str]] = []
        self.chunks: list[RowChunk] = []
        self.optim_params: list[OptimParams] = []

    async def create(self, spec: ModelSpec) -> TrainInfo:
        """A copy of another policy, or fresh random logits."""
        self.calls.append(("create", spec.policy))
        if spec.copy_of:
            self.tables[spec.policy] = self._table(spec.copy_of).copy()
        else:
            shape = (self.vocab_size, self.vocab_size)
            self.tables[spec.policy] = np.random.default_rng(spec.seed).normal(size=shape)
        return await self.info(spec.policy)

    async def forward(
        self, policy: str, chunk: RowChunk, *, outputs: tuple[str, ...] = ("logprobs",)
    ) -> ForwardOutput:
        """logprobs and entropy, without gradients."""
        self.calls.append(("forward", policy))
        values = self._outputs(self._tensor(policy), chunk)
        return ForwardOutput(
            lengths=chunk.lengths, outputs={name: _array(values[name]) for name in outputs}
        )

    async def forward_backward(
        self,
        policy: str,
        chunk: RowChunk,
        loss: LossSpec,
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> BackwardOutput:
        """Add the gradient of sum(term x weight)."""
        import torch

        self.calls.append(("forward_backward", policy))
        self.chunks.append(chunk)
        definition = loss_definition(loss.name)
        given = {k: v for k, v in chunk.inputs.items() if k != OUTPUT_MASK}
        definition.check_inputs(given, loss.config)
        inputs = {k: torch.tensor(np.asarray(v, np.float64)) for k, v in given.items()}
        table = self._tensor(policy).requires_grad_()
        values = self._outputs(table, chunk)
        term = definition.term(values["logprobs"], inputs, loss.config, values["entropy"])
        total = (term * inputs["weight"]).sum()
        total.backward()
        self._add(policy, table.grad.numpy())
        return BackwardOutput(
            loss=float(total.detach()), outputs={name: _array(values[name]) for name in outputs}
        )

    async def backward(
        self, policy: str, chunk: RowChunk, gradients: Mapping[str, FloatArray]
    ) -> BackwardOutput:
        """Add the gradient of sum over outputs of <gradient, output>."""
        import torch

        self.calls.append(("backward", policy))
        table = self._tensor(policy).requires_grad_()
        values = self._outputs(table, chunk)
        total = sum((values[n] * torch.tensor(g)).sum() for n, g in gradients.items())
        total.backward()
        self._add(policy, table.grad.numpy())
        return BackwardOutput(loss=0.0, outputs={"logprobs": _array(values["logprobs"])})

    async def optim_step(self, policy: str, params: OptimParams) -> OptimResult:
        """table -= lr x gradient, clipped; a gradient that is not finite is dropped."""
        self.calls.append(("optim_step", policy))
        self.optim_params.append(params)
        gradient = self.gradients.pop(policy, np.zeros_like(self._table(policy)))
        norm = float(np.linalg.norm(gradient))
        applied = bool(np.isfinite(norm))
        if applied:
            clip = params.grad_clip_norm
            scale = min(1.0, clip / norm) if clip and norm else 1.0
            self.tables[policy] = self._table(policy) - params.lr * scale * gradient
            self.steps[policy] = self.steps.get(policy, 0) + 1
        return OptimResult(
            grad_norm=norm, applied=applied, optimizer_step=self.steps.get(policy, 0)
        )

    async def save_state(self, policy: str, path: str) -> None:
        """The table and the step count."""
        with atomic_folder(path, durable=False) as folder:
            step = self.steps.get(policy, 0)
            np.savez(folder / "state.npz", table=self._table(policy), step=step)

    async def load_state(self, policy: str, path: str, *, with_optimizer: bool = True) -> TrainInfo:
        """What `save_state` wrote."""
        with np.load(Path(path) / "state.npz") as state:
            self.tables[policy] = state["table"]
            self.steps[policy] = int(state["step"]) if with_optimizer else 0
        return await self.info(policy)

    async def publish_weights(
        self, policy: str, version: PolicyVersion, path: str, *, unchanged: bool = False
    ) -> WeightManifest:
        """One float32 tensor named `table`."""
        self.calls.append(("publish_weights", policy))
        tensor = NamedTensor.from_array("table", self._table(policy).astype(np.float32))
        return publish(path, version, [tensor], {}, unchanged=unchanged)

    async def reset_optimizer(self, policy: str) -> None:
        """Forget the gradient and the step count."""
        self.gradients.pop(policy, None)
        self.steps[policy] = 0

    async def info(self, policy: str) -> TrainInfo:
        """Sizes and the step count; ServiceError for an unknown policy."""
        table = self._table(policy)
        return TrainInfo(
            policy=policy,
            num_parameters=table.size,
            vocab_size=self.vocab_size,
            max_positions=1 << 20,
            dtype="float64",
            optimizer_step=self.steps.get(policy, 0),
            losses=tuple(LOSSES),
            outputs=("logprobs", "entropy"),
        )

    async def aclose(self) -> None:
        """Nothing to release."""

    def _table(self, policy: str) -> Table:
        if policy not in self.tables:
            raise ServiceError(f"no policy is named {policy!r}", status=404, retryable=False)
        return self.tables[policy]

    def _tensor(self, policy: str) -> Any:
        import torch

        return torch.tensor(self._table(policy))

    def _add(self, policy: str, gradient: Table) -> None:
        self.gradients[policy] = self.gradients.get(policy, np.zeros_like(gradient)) + gradient

    @staticmethod
    def _outputs(table: Any, chunk: RowChunk) -> dict[str, Any]:
        import torch

        logits = table[torch.tensor(_previous(chunk))] / chunk.temperature
        logprobs = torch.log_softmax(logits, -1)
        ids = torch.tensor(chunk.token_ids.astype(np.int64))
        wanted = chunk.inputs.get(OUTPUT_MASK, np.ones(chunk.num_tokens))
        keep = torch.tensor(wanted != 0).double()
        keep[chunk.offsets[:-1].astype(np.int64)] = 0.0
        return {
            "logprobs": logprobs.gather(1, ids[:, None])[:, 0] * keep,
            "entropy": -(logprobs.exp() * logprobs).sum(-1) * keep,
        }


def _array(values: Any) -> FloatArray:
    array: FloatArray = values.detach().numpy().astype(np.float32)
    return array
