"""One policy hosted by the PyTorch back end: chunk in, gradient added, numbers out.

Synchronous; `torch_backend.TorchTrainService` calls it from its one worker thread. A chunk is cut
into micro-batches here and nowhere else, and how it is cut never changes the gradient: every loss
is a sum over tokens of term x weight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nexrl.algorithms.losses import LOSSES, LossDefinition, loss_definition
from nexrl.errors import ConfigError, InvariantError, ServiceError
from nexrl.services.train.backends.adamw import AdamW
from nexrl.services.train.backends.hf_model import (
    LoadedModel,
    enable_checkpointing,
    logits_at,
)
from nexrl.services.train.backends.token_scores import token_scores
from nexrl.services.train.batching import MicroBatch, micro_batches
from nexrl.services.train.chunk_checks import (
    check_chunk,
    check_finite,
    check_gradients,
    check_outputs,
    rows_with,
    scored_positions,
)
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

OUTPUTS = ("logprobs", "entropy")


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


@dataclass(frozen=True, slots=True)
class _Scores:
    """What one micro-batch computed: entry m speaks of the chunk's token targets[m]."""

    targets: Array
    """[M] positions in the chunk."""
    logprobs: Tensor
    """[M]"""
    entropy: Tensor | None
    """[M] when asked for."""


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
        self.trainable = trainable
        self.optimizer_step = 0
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "publish": 0.0}
        self._settings = settings
        self._stop = stop
        self._broken = ""
        self._num_accumulated = 0
        module = model.module
        module.requires_grad_(trainable)
        self._checkpointing = trainable and settings.gradient_checkpointing
        if self._checkpointing:
            enable_checkpointing(module)
        self.optimizer = AdamW(dict(module.named_parameters()) if trainable else {})

    # --- verbs --------------------------------------------------------------------------------

    def forward(self, chunk: RowChunk, outputs: tuple[str, ...]) -> ForwardOutput:
        """Named per-token outputs without gradients."""
        check_outputs(outputs, OUTPUTS)
        self._check(chunk)
        found = _new_outputs(chunk, outputs)
        positions = scored_positions(chunk, chunk.inputs.get(OUTPUT_MASK))
        self._score_rows(chunk, rows_with(chunk, positions), positions, found)
        return ForwardOutput(lengths=chunk.lengths, outputs=found)

    def forward_backward(
        self, chunk: RowChunk, loss: LossSpec, outputs: tuple[str, ...]
    ) -> BackwardOutput:
        """Add the gradient of sum(weight x term); the loss is that sum."""
        self._require_trainable()
        with self._whole_or_broken():
            check_outputs(outputs, OUTPUTS)
            definition = loss_definition(loss.name)
            inputs = {k: v for k, v in chunk.inputs.items() if k != OUTPUT_MASK}
            definition.check_inputs(inputs, loss.config)
            self._check(chunk)
            trained = scored_positions(chunk, inputs["weight"] != 0)
            check_finite(inputs, trained, chunk)
            objective = _loss_objective(definition, loss, inputs, trained, self.device)
            found = _new_outputs(chunk, outputs)
            total = self._accumulate(
                chunk, trained, objective, found, with_entropy=definition.needs_entropy(loss.config)
            )
        return BackwardOutput(loss=total, outputs=found)

    def backward(self, chunk: RowChunk, gradients: Mapping[str, FloatArray]) -> BackwardOutput:
        """Add the gradient of sum over outputs o of <gradients[o], o>, by running forward again."""
        self._require_trainable()
        with self._whole_or_broken():
            check_outputs(tuple(gradients), OUTPUTS)
            self._check(chunk)
            trained = check_gradients(gradients, chunk)
            objective = _gradient_objective(gradients, self.device)
            self._accumulate(chunk, trained, objective, {}, with_entropy="entropy" in gradients)
        return BackwardOutput(loss=0.0, outputs={})

    def optim_step(self, params: OptimParams) -> OptimResult:
        """Clip, step and zero the gradient; one that is not finite is reported, not applied."""
        self._require_trainable()
        if self._broken:
            reason, self._broken = self._broken, ""
            self.optimizer.zero_grad()
            self._num_accumulated = 0
            raise InvariantError(
                f"policy {self.name!r}: the gradient is incomplete and was dropped, because a "
                f"call that should have added to it failed: {reason}"
            )
        with self._timed("optimizer"):
            grad_norm, applied = self.optimizer.step(params)
        self._num_accumulated = 0
        self.optimizer_step += applied
        return OptimResult(grad_norm=grad_norm, applied=applied, optimizer_step=self.optimizer_step)

    def reset_optimizer(self) -> None:
        """Forget moments and gradient; the count of steps goes on."""
        self.optimizer.reset()
        self._broken = ""
        self._num_accumulated = 0

    def info(self) -> TrainInfo:
        """Sizes, counters and time spent."""
        module = self.model.module
        return TrainInfo(
            policy=self.name,
            num_parameters=sum(p.numel() for p in module.parameters() if p.requires_grad),
            vocab_size=self.model.vocab_size,
            max_positions=self.model.max_positions,
            dtype="bfloat16" if self._settings.autocast else "float32",
            optimizer_step=self.optimizer_step,
            device=str(self._settings.device),
            losses=tuple(LOSSES),
            outputs=OUTPUTS,
            seconds=dict(self.seconds),
        )

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._settings.device

    @property
    def has_gradient(self) -> bool:
        """Whether chunks were accumulated since the last optimizer step."""
        return self._num_accumulated > 0 or bool(self._broken)

    @contextmanager
    def _whole_or_broken(self) -> Iterator[None]:
        """A call that fails, also one that is refused, spoils the gradient: an `optim_step` that
        is under way already would otherwise train on the other chunks alone."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

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
        objective: Callable[[_Scores], Tensor],
        found: dict[str, FloatArray],
        *,
        with_entropy: bool,
    ) -> float:
        """Backward over the rows with something to train; the others are only scored, if asked."""
        wanted = scored_positions(chunk, chunk.inputs.get(OUTPUT_MASK))
        positions = trained | wanted if found else trained
        training_rows = rows_with(chunk, trained)
        with_entropy = with_entropy or "entropy" in found
        totals: list[Tensor] = []
        for batch in self._micro_batches(chunk, training_rows, positions):
            self._num_accumulated += 1
            with self._timed("forward"):
                scores = self._scores(batch, chunk, with_entropy=with_entropy, grad=True)
                total = objective(scores)
            with self._timed("backward"):
                total.backward()  # type: ignore[no-untyped-call]
            totals.append(total.detach())
            _record(scores, found)
        if found:
            others = np.setdiff1d(rows_with(chunk, wanted), training_rows)
            self._score_rows(chunk, others, wanted, found)
        for values in found.values():
            values[~wanted] = 0.0
        return float(torch.stack(totals).double().sum()) if totals else 0.0

    def _score_rows(
        self, chunk: RowChunk, rows: Array, positions: BoolArray, found: dict[str, FloatArray]
    ) -> None:
        for batch in self._micro_batches(chunk, rows, positions):
            with self._timed("forward"):
                scores = self._scores(batch, chunk, with_entropy="entropy" in found, grad=False)
            _record(scores, found)

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

    def _scores(
        self, batch: MicroBatch, chunk: RowChunk, *, with_entropy: bool, grad: bool
    ) -> _Scores:
        settings = self._settings
        if self._checkpointing:
            # Checkpointing acts only in training mode; dropout is off in both.
            self.model.module.train(grad)
        with (
            torch.set_grad_enabled(grad),
            torch.autocast(settings.device.type, torch.bfloat16, enabled=settings.autocast),
        ):
            logits = logits_at(self.model, batch)
        target_ids = torch.from_numpy(chunk.token_ids[batch.targets].astype(np.int64))
        with torch.set_grad_enabled(grad):
            logprobs, entropy = token_scores(
                logits,
                target_ids.to(settings.device),
                temperature=chunk.temperature,
                with_entropy=with_entropy,
            )
        return _Scores(batch.targets, logprobs, entropy)

    # --- guards -------------------------------------------------------------------------------

    def _check(self, chunk: RowChunk) -> None:
        check_chunk(chunk, vocab_size=self.model.vocab_size, max_positions=self.model.max_positions)

    def _require_trainable(self) -> None:
        if not self.trainable:
            raise ConfigError(
                f"policy {self.name!r} was created with trainable=False: it accepts forward only"
            )

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


def _new_outputs(chunk: RowChunk, names: tuple[str, ...]) -> dict[str, FloatArray]:
    return {name: np.zeros(chunk.num_tokens, np.float32) for name in names}


def _record(scores: _Scores, found: dict[str, FloatArray]) -> None:
    for name, array in found.items():
        values = scores.logprobs if name == "logprobs" else scores.entropy
        assert values is not None
        array[scores.targets] = values.detach().cpu().numpy()


def _loss_objective(
    definition: LossDefinition,
    loss: LossSpec,
    inputs: Mapping[str, Array],
    trained: BoolArray,
    device: torch.device,
) -> Callable[[_Scores], Tensor]:
    """Sum of weight x term over the trained tokens alone: what an untrained one holds, be it NaN,
    cannot reach the loss."""

    def objective(scores: _Scores) -> Tensor:
        logprobs, entropy, targets = scores.logprobs, scores.entropy, scores.targets
        chosen = trained[targets]
        if not chosen.all():
            index = torch.from_numpy(np.flatnonzero(chosen)).to(device)
            logprobs = logprobs.index_select(0, index)
            entropy = None if entropy is None else entropy.index_select(0, index)
            targets = targets[chosen]
        tensors = {k: _as_tensor(v, targets, device) for k, v in inputs.items()}
        term = definition.term(logprobs, tensors, loss.config, entropy)
        total: Tensor = (term * tensors["weight"]).sum()
        return total

    return objective


def _gradient_objective(
    gradients: Mapping[str, FloatArray], device: torch.device
) -> Callable[[_Scores], Tensor]:
    def objective(scores: _Scores) -> Tensor:
        total = scores.logprobs.new_zeros(())
        for name, gradient in gradients.items():
            values = scores.logprobs if name == "logprobs" else scores.entropy
            assert values is not None
            total = total + (values * _as_tensor(gradient, scores.targets, device)).sum()
        return total

    return objective


def _as_tensor(values: Array, targets: Array, device: torch.device) -> Tensor:
    """The entries at `targets`, in float32."""
    return torch.from_numpy(values[targets].astype(np.float32, copy=False)).to(device)
