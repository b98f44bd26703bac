"""One policy hosted by the PyTorch back end: chunk in, gradient added, numbers out.

Synchronous; `torch_backend.TorchTrainService` calls it from its one worker thread. A chunk is cut
into micro-batches here and nowhere else, and how it is cut never changes the gradient: every loss
is a sum over tokens of term x weight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nexrl.errors import InvariantError, ServiceError
from nexrl.services.train.backends.adamw import AdamW
from nexrl.services.train.backends.hf_model import LoadedModel, enable_checkpointing
from nexrl.services.train.backends.model_outputs import outputs_at
from nexrl.services.train.backends.objectives import (
    Objective,
    ScoredTokens,
    gradient_objective,
    loss_objective,
)
from nexrl.services.train.batching import MicroBatch, micro_batches
from nexrl.services.train.chunk_checks import rows_with, scored_positions
from nexrl.services.train.outputs import OFFERED, empty_output
from nexrl.services.train.policy_door import PendingGradient, PolicyDoor
from nexrl.types import (
    OUTPUT_MASK,
    Array,
    BackwardOutput,
    BoolArray,
    FloatArray,
    ForwardOutput,
    LossSpec,
    OptimParams,
    OptimResult,
    RowChunk,
    TrainInfo,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSettings:
    """How a policy's arithmetic is run; never what it computes, beyond rounding."""

    device: torch.device
    """Where it runs."""
    autocast: bool
    """Matrix products in bfloat16 over float32 masters."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass."""
    micro_batch_tokens: int
    """Most tokens, padding included, in one micro-batch."""
    packing: bool
    """Several rows in one sequence."""


class TorchPolicy:
    """A model, its accumulated gradient and its optimizer.

    Invariant: the gradient is the sum over all chunks since the last `optim_step`; when one of
    those calls failed the sum is incomplete, and `optim_step` refuses it.
    """

    def __init__(
        self,
        name: str,
        model: LoadedModel,
        settings: ComputeSettings,
        *,
        trainable: bool,
        stop: threading.Event,
    ) -> None:
        self.name = name
        self.model = model
        self.optimizer_step = 0
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "publish": 0.0}
        self._settings = settings
        self._stop = stop
        self._pending = PendingGradient(name)
        self._door = PolicyDoor(
            policy=name,
            head=model.head,
            trainable=trainable,
            vocab_size=model.vocab_size,
            max_positions=model.max_positions,
        )
        parameters = model.named_parameters()
        for parameter in parameters.values():
            parameter.requires_grad_(trainable)
        self._checkpointing = trainable and settings.gradient_checkpointing
        if self._checkpointing:
            enable_checkpointing(model.module)
        self.optimizer = AdamW(parameters if trainable else {})

    # --- verbs --------------------------------------------------------------------------------

    def forward(self, chunk: RowChunk, outputs: tuple[str, ...]) -> ForwardOutput:
        """Named per-token outputs without gradients."""
        positions = self._door.check_forward(chunk, outputs)
        found = {name: empty_output(name, chunk) for name in outputs}
        self._score_rows(chunk, rows_with(chunk, positions), positions, found)
        return ForwardOutput(lengths=chunk.lengths, outputs=found)

    def forward_backward(
        self, chunk: RowChunk, loss: LossSpec, outputs: tuple[str, ...]
    ) -> BackwardOutput:
        """Add the gradient of sum(weight x term); the loss is that sum."""
        self._door.require_trainable()
        with self._pending.whole_or_broken():
            call = self._door.check_loss(chunk, loss, outputs)
            found = {name: empty_output(name, chunk) for name in outputs}
            objective = loss_objective(call, chunk)
            total = self._accumulate(chunk, call.trained, objective, call.outputs, found)
        return BackwardOutput(loss=total, outputs=found)

    def backward(self, chunk: RowChunk, gradients: Mapping[str, FloatArray]) -> BackwardOutput:
        """Add the gradient of sum over outputs o of <gradients[o], o>, by running forward again."""
        self._door.require_trainable()
        with self._pending.whole_or_broken():
            trained = self._door.check_backward(chunk, gradients)
            objective = gradient_objective(gradients)
            self._accumulate(chunk, trained, objective, tuple(gradients), {})
        return BackwardOutput(loss=0.0, outputs={})

    def optim_step(self, params: OptimParams) -> OptimResult:
        """Clip, step and zero the gradient; one that is not finite is reported, not applied."""
        self._door.require_trainable()
        try:
            self._pending.take()
        except InvariantError:
            self.optimizer.zero_grad()
            raise
        with self._timed("optimizer"):
            grad_norm, applied = self.optimizer.step(params)
        self.optimizer_step += applied
        return OptimResult(grad_norm=grad_norm, applied=applied, optimizer_step=self.optimizer_step)

    def reset_optimizer(self) -> None:
        """Forget moments and gradient; the count of steps goes on."""
        self.optimizer.reset()
        self._pending.forget()

    def info(self) -> TrainInfo:
        """Sizes, counters and time spent."""
        parameters = self.model.named_parameters().values()
        return TrainInfo(
            policy=self.name,
            num_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            vocab_size=self.model.vocab_size,
            max_positions=self.model.max_positions,
            dtype="bfloat16" if self._settings.autocast else "float32",
            optimizer_step=self.optimizer_step,
            device=str(self._settings.device),
            losses=self._door.losses,
            outputs=OFFERED[self.model.head],
            seconds=dict(self.seconds),
        )

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._settings.device

    @property
    def has_gradient(self) -> bool:
        """Whether chunks were accumulated since the last optimizer step."""
        return self._pending.exists

    @contextmanager
    def timed_publish(self) -> Iterator[None]:
        """Counts the block's seconds as `publish`."""
        with self._timed("publish"):
            yield

    # --- passes -------------------------------------------------------------------------------

    def _accumulate(
        self,
        chunk: RowChunk,
        trained: BoolArray,
        objective: Objective,
        needed: tuple[str, ...],
        found: dict[str, Array],
    ) -> float:
        """Backward over the rows with something to train, given the outputs that the objective
        needs; the other rows are only scored, if outputs are asked for."""
        wanted = scored_positions(chunk, chunk.inputs.get(OUTPUT_MASK))
        positions = trained | wanted if found else trained
        training_rows = rows_with(chunk, trained)
        totals: list[Tensor] = []
        for batch in self._micro_batches(chunk, training_rows, positions):
            self._pending.added()
            with self._timed("forward"):
                scored = self._score(batch, chunk, {*needed, *found}, grad=True)
                total = objective(scored)
            with self._timed("backward"):
                total.backward()  # type: ignore[no-untyped-call]
            totals.append(total.detach())
            _record(scored, found)
        if found:
            others = np.setdiff1d(rows_with(chunk, wanted), training_rows)
            self._score_rows(chunk, others, wanted, found)
        for values in found.values():
            values[~wanted] = 0
        return float(torch.stack(totals).double().sum()) if totals else 0.0

    def _score_rows(
        self, chunk: RowChunk, rows: Array, positions: BoolArray, found: dict[str, Array]
    ) -> None:
        for batch in self._micro_batches(chunk, rows, positions):
            with self._timed("forward"):
                scored = self._score(batch, chunk, set(found), grad=False)
            _record(scored, found)

    def _micro_batches(
        self, chunk: RowChunk, rows: Array, positions: BoolArray
    ) -> Iterator[MicroBatch]:
        for batch in micro_batches(
            chunk.token_ids,
            chunk.lengths,
            rows.tolist(),
            positions,
            max_tokens=self._settings.micro_batch_tokens,
            packing=self._settings.packing,
        ):
            if self._stop.is_set():
                raise ServiceError("the train service is closing", retryable=False)
            yield batch

    def _score(
        self, batch: MicroBatch, chunk: RowChunk, names: set[str], *, grad: bool
    ) -> ScoredTokens:
        if self._checkpointing:
            # Checkpointing acts only in training mode; dropout is off in both.
            self.model.module.train(grad)
        with torch.set_grad_enabled(grad):
            outputs = outputs_at(self.model, batch, chunk, names, autocast=self._settings.autocast)
        return ScoredTokens(batch.targets, outputs)

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.seconds[kind] += self._now() - start

    def _now(self) -> float:
        if self._settings.device.type == "cuda":
            torch.cuda.synchronize(self._settings.device)
        return time.perf_counter()


def _record(scored: ScoredTokens, found: dict[str, Array]) -> None:
    for name, array in found.items():
        array[scored.targets] = scored.outputs[name].detach().cpu().numpy()
