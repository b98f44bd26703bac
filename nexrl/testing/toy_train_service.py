"""A train service small enough to reason about: a table of bigram logits, plain SGD, float64.

It keeps the whole TrainService contract (the same checks at the door, order of calls, plain weighted
sums, atomic publications, a non-finite gradient not applied), with the named losses of
`nexrl.algorithms` and their true gradients, so that tests of trainers and weight sync need no
language model. A value policy is a table of one value for each previous token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nexrl.atomic import atomic_folder
from nexrl.errors import ConfigError, InvariantError, ServiceError
from nexrl.services.train.chunk_checks import row_numbers, scored_positions
from nexrl.services.train.outputs import OFFERED, empty_output, top_count
from nexrl.services.train.policy_door import LossCall, PendingGradient, PolicyDoor
from nexrl.services.train.publication import WEIGHTS_FILE, NamedTensor, publish
from nexrl.types import (
    CANDIDATE_IDS,
    DEFAULT_POLICY,
    OUTPUT_MASK,
    Array,
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
_LARGEST_NORM = float(np.finfo(np.float32).max)
"""What overflows a real service in float32 counts as not finite here too."""


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
    """One [V, V] table of logits for each language model, one [V] table for each value policy.

    Hosts a policy `actor` from the start. Invariant: `gradients` holds the sum of all calls since
    the last optimizer step.
    """

    def __init__(
        self, vocab_size: int = 16, *, seed: int = 0, max_positions: int = 1 << 20
    ) -> None:
        generator = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.tables: dict[str, Table] = {
            DEFAULT_POLICY: generator.normal(size=(vocab_size, vocab_size))
        }
        self.frozen: set[str] = set()
        self.gradients: dict[str, Table] = {}
        self.steps: defaultdict[str, int] = defaultdict(int)
        self.calls: list[tuple[str, str]] = []
        self.chunks: list[RowChunk] = []
        self.optim_params: list[OptimParams] = []
        self._pending: dict[str, PendingGradient] = {}
        self._closed = False

    async def create(self, spec: ModelSpec) -> TrainInfo:
        """A copy of another policy, what was published to a folder, or fresh random logits; values
        start at 0."""
        self.calls.append(("create", spec.policy))
        if spec.path and spec.copy_of:
            raise ConfigError(f"policy {spec.policy!r}: give either path or copy_of")
        self.tables[spec.policy] = self._first_table(spec)
        self.frozen.discard(spec.policy)
        if not spec.trainable:
            self.frozen.add(spec.policy)
        self.steps[spec.policy] = 0
        self._drop_gradient(spec.policy)
        return await self.info(spec.policy)

    def _first_table(self, spec: ModelSpec) -> Table:
        ndim = 1 if spec.head == "value" else 2
        source = self._table(spec.copy_of) if spec.copy_of else _published(spec.path)
        if source is not None and source.ndim == ndim:
            return source.copy()
        if source is not None and source.ndim == 1:
            raise ConfigError(f"policy {spec.policy!r}: a value policy has no output head")
        shape = (self.vocab_size,) * ndim
        if spec.head == "value":
            return np.zeros(shape)
        return np.random.default_rng(spec.seed).normal(size=shape)

    async def forward(
        self, policy: str, chunk: RowChunk, *, outputs: tuple[str, ...] = ("logprobs",)
    ) -> ForwardOutput:
        """Named outputs without gradients."""
        self.calls.append(("forward", policy))
        self._door(policy).check_forward(chunk, outputs)
        found = self._outputs(self._tensor(policy), chunk, outputs)
        return ForwardOutput(lengths=chunk.lengths, outputs=_reported(found, outputs, chunk))

    async def forward_backward(
        self,
        policy: str,
        chunk: RowChunk,
        loss: LossSpec,
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> BackwardOutput:
        """Add the gradient of sum(term x weight)."""
        self.calls.append(("forward_backward", policy))
        self.chunks.append(chunk)
        door = self._door(policy)
        door.require_trainable()
        with self._pending_of(policy).whole_or_broken():
            call = door.check_loss(chunk, loss, outputs)
            table = self._tensor(policy).requires_grad_()
            found = self._outputs(table, chunk, {*call.outputs, *outputs})
            total = _loss(call, found, chunk) if call.trained.any() else 0.0 * table.sum()
            self._add(policy, table, total)
        reported = _reported(found, outputs, chunk)
        return BackwardOutput(loss=float(total.detach()), outputs=reported)

    async def backward(
        self, policy: str, chunk: RowChunk, gradients: Mapping[str, FloatArray]
    ) -> BackwardOutput:
        """Add the gradient of sum over outputs of <gradient, output>."""
        import torch

        self.calls.append(("backward", policy))
        door = self._door(policy)
        door.require_trainable()
        with self._pending_of(policy).whole_or_broken():
            trained = torch.tensor(np.flatnonzero(door.check_backward(chunk, gradients)))
            table = self._tensor(policy).requires_grad_()
            found = self._outputs(table, chunk, set(gradients))
            total = 0.0 * table.sum()
            for name, gradient in gradients.items():
                given = torch.tensor(np.asarray(gradient, np.float64))
                total = total + (found[name][trained] * given[trained]).sum()
            self._add(policy, table, total)
        return BackwardOutput(loss=0.0, outputs={})

    async def optim_step(self, policy: str, params: OptimParams) -> OptimResult:
        """table -= lr x gradient, clipped; a gradient that is not finite is dropped."""
        self.calls.append(("optim_step", policy))
        self._door(policy).require_trainable()
        self.optim_params.append(params)
        gradient = self.gradients.pop(policy, np.zeros_like(self._table(policy)))
        self._pending_of(policy).take()
        with np.errstate(over="ignore"):
            norm = float(np.linalg.norm(gradient))
        norm = norm if norm <= _LARGEST_NORM else float("inf")
        applied = bool(np.isfinite(norm))
        if applied:
            clip = params.grad_clip_norm
            scale = min(1.0, clip / norm) if clip and norm else 1.0
            self.tables[policy] = self._table(policy) - params.lr * scale * gradient
            self.steps[policy] += 1
        return OptimResult(grad_norm=norm, applied=applied, optimizer_step=self.steps[policy])

    async def save_state(self, policy: str, path: str) -> None:
        """The table and the step count."""
        table = self._table(policy)
        if policy in self.gradients or self._pending_of(policy).exists:
            raise InvariantError(f"save_state of policy {policy!r}: a gradient is pending")
        with atomic_folder(path, durable=False) as folder:
            np.savez(folder / "state.npz", table=table, step=self.steps[policy])

    async def load_state(self, policy: str, path: str, *, with_optimizer: bool = True) -> TrainInfo:
        """What `save_state` wrote."""
        shape = self._table(policy).shape
        if not (Path(path) / "state.npz").is_file():
            raise ConfigError(f"load_state: {path!r} is not a folder of save_state")
        with np.load(Path(path) / "state.npz") as state:
            if state["table"].shape != shape:
                raise ConfigError(f"load_state: {path!r} holds a policy of another head")
            self.tables[policy] = state["table"]
            self.steps[policy] = int(state["step"])
        self._drop_gradient(policy)
        return await self.info(policy)

    async def publish_weights(
        self, policy: str, version: PolicyVersion, path: str, *, unchanged: bool = False
    ) -> WeightManifest:
        """One float32 tensor named `table`."""
        self.calls.append(("publish_weights", policy))
        tensor = NamedTensor.from_array("table", self._table(policy).astype(np.float32))
        return publish(path, version, [tensor], {}, unchanged=unchanged)

    async def reset_optimizer(self, policy: str) -> None:
        """Forget the gradient; the count of steps goes on."""
        self._table(policy)
        self._drop_gradient(policy)

    async def info(self, policy: str) -> TrainInfo:
        """Sizes and the step count; ConfigError for an unknown policy."""
        door = self._door(policy)
        return TrainInfo(
            policy=policy,
            num_parameters=self._table(policy).size if door.trainable else 0,
            vocab_size=door.vocab_size,
            max_positions=self.max_positions,
            dtype="float64",
            optimizer_step=self.steps[policy],
            losses=door.losses,
            outputs=OFFERED[door.head],
        )

    async def aclose(self) -> None:
        """No further call is accepted; idempotent."""
        self._closed = True

    # --- what is hosted -----------------------------------------------------------------------

    def _table(self, policy: str) -> Table:
        if self._closed:
            raise ServiceError("the train service is closed", retryable=False)
        if policy not in self.tables:
            raise ConfigError(f"no policy is named {policy!r} (hosted here: {sorted(self.tables)})")
        return self.tables[policy]

    def _door(self, policy: str) -> PolicyDoor:
        return PolicyDoor(
            policy=policy,
            head="lm" if self._table(policy).ndim == 2 else "value",
            trainable=policy not in self.frozen,
            vocab_size=len(self._table(policy)),
            max_positions=self.max_positions,
        )

    def _tensor(self, policy: str) -> Any:
        import torch

        return torch.tensor(self._table(policy))

    def _pending_of(self, policy: str) -> PendingGradient:
        return self._pending.setdefault(policy, PendingGradient(policy))

    def _drop_gradient(self, policy: str) -> None:
        self.gradients.pop(policy, None)
        self._pending_of(policy).forget()

    def _add(self, policy: str, table: Any, total: Any) -> None:
        total.backward()
        gradient: Table = table.grad.numpy()
        self.gradients[policy] = self.gradients.get(policy, np.zeros_like(gradient)) + gradient

    @staticmethod
    def _outputs(table: Any, chunk: RowChunk, names: Any) -> dict[str, Any]:
        """[N, ...] by name, not yet zeroed where nothing was asked for."""
        import torch

        of_previous = table[torch.tensor(_previous(chunk))]
        if table.ndim == 1:
            return {"values": of_previous}
        logprobs = torch.log_softmax(of_previous / chunk.temperature, -1)
        ids = torch.tensor(chunk.token_ids.astype(np.int64))
        found = {
            "logprobs": logprobs.gather(1, ids[:, None])[:, 0],
            "entropy": -(logprobs.exp() * logprobs).sum(-1),
        }
        if "candidate_logprobs" in names:
            candidates = np.clip(chunk.inputs[CANDIDATE_IDS], 0, table.shape[1] - 1)
            index = torch.tensor(candidates.astype(np.int64))
            found["candidate_logprobs"] = logprobs.gather(1, index)
        for num_top in {k for name in names if (k := top_count(name))}:
            top = torch.topk(logprobs, num_top, dim=-1)
            found |= {f"top_ids:{num_top}": top.indices, f"top_logprobs:{num_top}": top.values}
        return found


def _loss(call: LossCall, found: Mapping[str, Any], chunk: RowChunk) -> Any:
    """Sum of term x weight over the trained tokens."""
    import torch

    at = np.flatnonzero(call.trained)
    inputs = {
        name: torch.tensor(values[at].astype(np.int64 if name == CANDIDATE_IDS else np.float64))
        for name, values in call.inputs.items()
    }
    if call.definition.level == "row":
        inputs["row"] = torch.tensor(row_numbers(chunk, at))
    used = {name: found[name][torch.tensor(at)] for name in call.outputs}
    return (call.definition.term(used, inputs, call.config) * inputs["weight"]).sum()


def _reported(
    found: Mapping[str, Any], names: tuple[str, ...], chunk: RowChunk
) -> dict[str, Array]:
    """The outputs asked for where they are wanted, 0 elsewhere."""
    wanted = scored_positions(chunk, chunk.inputs.get(OUTPUT_MASK))
    reported = {name: empty_output(name, chunk) for name in names}
    for name, array in reported.items():
        array[wanted] = found[name].detach().numpy()[wanted]
    return reported


def _published(path: str) -> Table | None:
    """The table that `publish_weights` wrote to the folder; None when there is none."""
    file = Path(path) / WEIGHTS_FILE
    if not (path and file.is_file()):
        return None
    from safetensors.numpy import load_file

    found = load_file(file).get("table")
    return None if found is None else found.astype(np.float64)
