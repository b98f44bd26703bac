"""One policy hosted by the PyTorch back end: chunk in, gradient added, numbers out.

Synchronous; `torch_backend.TorchTrainService` calls it from its one worker thread. A chunk is cut
into micro-batches here and nowhere else, and how it is cut never changes the gradient: every loss
is a sum over tokens of term x weight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from nexrl.config.schema import TrainServiceConfig
from nexrl.errors import InvariantError, ServiceError
from nexrl.services.train.backends.adamw import AdamW
from nexrl.services.train.backends.checkpoint import load_policy, save_policy
from nexrl.services.train.backends.hf_model import (
    LoadedModel,
    enable_checkpointing,
    export_side_files,
    export_tensors,
    logits_at,
    values_at,
)
from nexrl.services.train.backends.objectives import (
    Objective,
    gradient_objective,
    loss_objective,
)
from nexrl.services.train.backends.token_scores import token_scores, top_scores
from nexrl.services.train.batching import MicroBatch, micro_batches
from nexrl.services.train.chunk_checks import rows_with, scored_positions
from nexrl.services.train.outputs import OFFERED, empty_output, top_count
from nexrl.services.train.policy_door import PendingGradient, PolicyDoor
from nexrl.services.train.publication import publish
from nexrl.types import (
    CANDIDATE_IDS,
    OUTPUT_MASK,
    Array,
    BackwardOutput,
    BoolArray,
    FloatArray,
    ForwardOutput,
    LossSpec,
    OptimParams,
    OptimResult,
    PolicyVersion,
    RowChunk,
    TrainInfo,
    WeightManifest,
)


class TorchPolicy:
    """A model, its accumulated gradient and its optimizer.

    Invariant: the gradient is the sum over all chunks since the last `optim_step`; when one of
    those calls failed the sum is incomplete, and `optim_step` refuses it.
    """

    def __init__(
        self,
        name: str,
        model: LoadedModel,
        config: TrainServiceConfig,
        *,
        trainable: bool,
        stop: threading.Event,
    ) -> None:
        self.name = name
        self.model = model
        self.device: torch.device = model.module.device
        self.optimizer_step = 0
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "publish": 0.0}
        self.pending = PendingGradient(name)
        self._config = config
        self._dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._stop = stop
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
        self._checkpointing = trainable and config.gradient_checkpointing
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
        with self.pending.whole_or_broken():
            call = self._door.check_loss(chunk, loss, outputs)
            found = {name: empty_output(name, chunk) for name in outputs}
            objective = loss_objective(call, chunk)
            total = self._accumulate(chunk, call.trained, objective, call.outputs, found)
        return BackwardOutput(loss=total, outputs=found)

    def backward(self, chunk: RowChunk, gradients: Mapping[str, FloatArray]) -> BackwardOutput:
        """Add the gradient of sum over outputs o of <gradients[o], o>, by running forward again."""
        self._door.require_trainable()
        with self.pending.whole_or_broken():
            trained = self._door.check_backward(chunk, gradients)
            objective = gradient_objective(gradients)
            self._accumulate(chunk, trained, objective, tuple(gradients), {})
        return BackwardOutput(loss=0.0, outputs={})

    def optim_step(self, params: OptimParams) -> OptimResult:
        """Clip, step and zero the gradient; one that is not finite is reported, not applied."""
        self._door.require_trainable()
        try:
            self.pending.take()
        except InvariantError:
            self.optimizer.zero_grad()
            raise
        with self._timed("optimizer"):
            grad_norm, applied = self.optimizer.step(params)
        self.optimizer_step += applied
        return OptimResult(grad_norm=grad_norm, applied=applied, optimizer_step=self.optimizer_step)

    def save_state(self, path: str) -> None:
        """Write the whole state; refused while a gradient is pending."""
        save_policy(self, path)

    def load_state(self, path: str, with_optimizer: bool) -> TrainInfo:
        """Read a folder of `save_state`."""
        load_policy(self, path, with_optimizer=with_optimizer)
        return self.info()

    def reset_optimizer(self) -> None:
        """Forget moments and gradient; the count of steps goes on."""
        self.optimizer.reset()
        self.pending.forget()

    def info(self) -> TrainInfo:
        """Sizes, counters and time spent."""
        parameters = self.model.named_parameters().values()
        return TrainInfo(
            policy=self.name,
            num_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            vocab_size=self.model.vocab_size,
            max_positions=self.model.max_positions,
            dtype=self._config.dtype,
            optimizer_step=self.optimizer_step,
            device=str(self.device),
            losses=self._door.losses,
            outputs=OFFERED[self.model.head],
            seconds=dict(self.seconds),
        )

    def publish_weights(self, version: PolicyVersion, path: str, unchanged: bool) -> WeightManifest:
        """Write a publication in the compute dtype: float32, or bfloat16 under autocast."""
        with self._timed("publish"):
            tensors = export_tensors(self.model, self._dtype)
            side_files = export_side_files(self.model, self._dtype)
            return publish(path, version, tensors, side_files, unchanged=unchanged)

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
            self.pending.added()
            with self._timed("forward"):
                outputs = self._score(batch, chunk, {*needed, *found}, grad=True)
                total = objective(batch.targets, outputs)
            with self._timed("backward"):
                total.backward()  # type: ignore[no-untyped-call]
            totals.append(total.detach())
            _record(batch, outputs, found)
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
                outputs = self._score(batch, chunk, set(found), grad=False)
            _record(batch, outputs, found)

    def _micro_batches(
        self, chunk: RowChunk, rows: Array, positions: BoolArray
    ) -> Iterator[MicroBatch]:
        for batch in micro_batches(
            chunk,
            rows.tolist(),
            positions,
            max_tokens=self._config.micro_batch_tokens,
            packing=self._config.packing,
        ):
            if self._stop.is_set():
                raise ServiceError("the train service is closing", retryable=False)
            yield batch

    def _score(
        self, batch: MicroBatch, chunk: RowChunk, names: set[str], *, grad: bool
    ) -> dict[str, Tensor]:
        """[M, ...] at least the named outputs at the batch's targets, in float32 (ids in int64);
        differentiable where there are gradients, except for top-K."""
        if self._checkpointing:
            # Checkpointing acts only in training mode; dropout is off in both.
            self.model.module.train(grad)
        with torch.set_grad_enabled(grad):
            return self._outputs_at(batch, chunk, names)

    def _outputs_at(
        self, batch: MicroBatch, chunk: RowChunk, names: Collection[str]
    ) -> dict[str, Tensor]:
        model = self.model
        is_autocast = self._dtype == torch.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_autocast):
            if model.head == "value":
                return {"values": values_at(model, batch)}
            logits = logits_at(model, batch)
        candidates = None
        if "candidate_logprobs" in names:
            # Within the vocabulary wherever they count; elsewhere they may be padding.
            ids = np.clip(chunk.inputs[CANDIDATE_IDS][batch.targets], 0, model.vocab_size - 1)
            candidates = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        targets = torch.from_numpy(chunk.token_ids[batch.targets].astype(np.int64)).to(self.device)
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

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.seconds[kind] += self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _record(batch: MicroBatch, outputs: Mapping[str, Tensor], found: dict[str, Array]) -> None:
    for name, array in found.items():
        array[batch.targets] = outputs[name].detach().cpu().numpy()
