"""What the fakes of a train service share: the whole contract but the arithmetic.

Names, checks at the door, pending gradients, counters, publications and state folders are here, once;
`ToyTrainService` and `InstantTrain` say what a forward pass gives and what a step does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nexrl.atomic import atomic_folder
from nexrl.errors import ConfigError, InvariantError, ServiceError
from nexrl.services.train.outputs import OFFERED
from nexrl.services.train.policy_door import (
    LossCall,
    PendingGradient,
    PolicyDoor,
    check_source,
    find_policy,
)
from nexrl.services.train.publication import WEIGHTS_FILE, NamedTensor, publish
from nexrl.types import (
    Array,
    BackwardOutput,
    BoolArray,
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

Table = npt.NDArray[np.floating[Any]]
_LARGEST_NORM = float(np.finfo(np.float32).max)
"""What overflows a real service in float32 counts as not finite here too."""


class FakeTrainService(ABC):
    """A `TrainService` over one table of weights for each policy: two dimensions for a language
    model, one for a value policy.

    Invariants: what it refuses, the real service refuses too; `gradients` holds the sum of all
    calls since the last optimizer step.
    """

    def __init__(self, *, vocab_size: int, max_positions: int) -> None:
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.tables: dict[str, Table] = {}
        self.frozen: set[str] = set()
        self.gradients: dict[str, Table] = {}
        self.steps: defaultdict[str, int] = defaultdict(int)
        self.calls: list[tuple[str, str]] = []
        self.optim_params: list[OptimParams] = []
        self._pending: dict[str, PendingGradient] = {}
        self._closed = False

    # --- the arithmetic -----------------------------------------------------------------------

    @abstractmethod
    def _new_table(self, spec: ModelSpec) -> Table:
        """Weights of a model of which no folder is read and nothing is copied."""

    @abstractmethod
    def _forward(
        self, policy: str, chunk: RowChunk, outputs: tuple[str, ...]
    ) -> Mapping[str, Array]:
        """Named outputs, 0 where they are not wanted."""

    @abstractmethod
    def _loss(
        self, policy: str, chunk: RowChunk, call: LossCall, outputs: tuple[str, ...]
    ) -> tuple[BackwardOutput, Table]:
        """What a loss reports, and its gradient by the table."""

    @abstractmethod
    def _gradient(
        self, policy: str, chunk: RowChunk, trained: BoolArray, gradients: Mapping[str, FloatArray]
    ) -> Table:
        """Gradient by the table of the sum over outputs of <gradient, output>."""

    @abstractmethod
    def _stepped(self, table: Table, gradient: Table, norm: float, params: OptimParams) -> Table:
        """The table after an optimizer step."""

    def _vocab_size(self, table: Table) -> int:
        return self.vocab_size

    # --- verbs --------------------------------------------------------------------------------

    async def create(self, spec: ModelSpec) -> TrainInfo:
        """A copy of another policy, what was published to a folder, or a new table; values start
        at 0."""
        self.calls.append(("create", spec.policy))
        if spec.path and spec.copy_of:
            check_source(spec)
        source = self._table(spec.copy_of) if spec.copy_of else _published(spec.path)
        if source is not None and source.ndim == 1 and spec.head != "value":
            raise ConfigError(f"policy {spec.policy!r}: a value policy has no output head")
        fits = source is not None and source.ndim == (1 if spec.head == "value" else 2)
        self._forget(spec.policy)
        self.tables[spec.policy] = (
            source.copy() if source is not None and fits else self._new_table(spec)
        )
        if not spec.trainable:
            self.frozen.add(spec.policy)
        return await self.info(spec.policy)

    async def forward(
        self, policy: str, chunk: RowChunk, *, outputs: tuple[str, ...] = ("logprobs",)
    ) -> ForwardOutput:
        """Named outputs without gradients."""
        self.calls.append(("forward", policy))
        self._door(policy).check_forward(chunk, outputs)
        found = self._forward(policy, chunk, outputs)
        return ForwardOutput(lengths=chunk.lengths, outputs=found)

    async def forward_backward(
        self,
        policy: str,
        chunk: RowChunk,
        loss: LossSpec,
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> BackwardOutput:
        """Add the gradient of a loss."""
        self.calls.append(("forward_backward", policy))
        door = self._door(policy)
        door.require_trainable()
        with self._pending_of(policy).whole_or_broken():
            call = door.check_loss(chunk, loss, outputs)
            result, gradient = self._loss(policy, chunk, call, outputs)
            self._add(policy, gradient)
        return result

    async def backward(
        self, policy: str, chunk: RowChunk, gradients: Mapping[str, FloatArray]
    ) -> BackwardOutput:
        """Add the gradient of sum over outputs of <gradient, output>."""
        self.calls.append(("backward", policy))
        door = self._door(policy)
        door.require_trainable()
        with self._pending_of(policy).whole_or_broken():
            trained = door.check_backward(chunk, gradients)
            self._add(policy, self._gradient(policy, chunk, trained, gradients))
        return BackwardOutput(loss=0.0, outputs={})

    async def optim_step(self, policy: str, params: OptimParams) -> OptimResult:
        """One step; a gradient that is not finite is dropped."""
        self.calls.append(("optim_step", policy))
        self._door(policy).require_trainable()
        self.optim_params.append(params)
        gradient = self.gradients.pop(policy, np.zeros_like(self.tables[policy]))
        self._pending_of(policy).take()
        with np.errstate(over="ignore"):
            norm = float(np.linalg.norm(gradient))
        norm = norm if norm <= _LARGEST_NORM else float("inf")
        applied = bool(np.isfinite(norm))
        if applied:
            self.tables[policy] = self._stepped(self.tables[policy], gradient, norm, params)
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

    async def drop(self, policy: str) -> None:
        """Forget the policy; idempotent."""
        self._refuse_if_closed()
        self.calls.append(("drop", policy))
        self._forget(policy)

    async def info(self, policy: str) -> TrainInfo:
        """Sizes and the step count; ConfigError for an unknown policy."""
        door, table = self._door(policy), self._table(policy)
        return TrainInfo(
            policy=policy,
            num_parameters=table.size if door.trainable else 0,
            vocab_size=door.vocab_size,
            max_positions=door.max_positions,
            dtype=str(table.dtype),
            optimizer_step=self.steps[policy],
            losses=door.losses,
            outputs=OFFERED[door.head],
            seconds=dict.fromkeys(("forward", "backward", "optimizer", "publish"), 0.0),
        )

    async def aclose(self) -> None:
        """No further call is accepted; idempotent."""
        self._closed = True

    # --- what is hosted -----------------------------------------------------------------------

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ServiceError("the train service is closed", retryable=False)

    def _table(self, policy: str) -> Table:
        self._refuse_if_closed()
        return find_policy(self.tables, policy)

    def _door(self, policy: str) -> PolicyDoor:
        table = self._table(policy)
        return PolicyDoor(
            policy=policy,
            head="lm" if table.ndim == 2 else "value",
            trainable=policy not in self.frozen,
            vocab_size=self._vocab_size(table),
            max_positions=self.max_positions,
        )

    def _pending_of(self, policy: str) -> PendingGradient:
        return self._pending.setdefault(policy, PendingGradient(policy))

    def _add(self, policy: str, gradient: Table) -> None:
        self.gradients[policy] = self.gradients.get(policy, np.zeros_like(gradient)) + gradient

    def _drop_gradient(self, policy: str) -> None:
        self.gradients.pop(policy, None)
        self._pending.pop(policy, None)

    def _forget(self, policy: str) -> None:
        self._drop_gradient(policy)
        self.tables.pop(policy, None)
        self.steps.pop(policy, None)
        self.frozen.discard(policy)


def _published(path: str) -> Table | None:
    """The table that `publish_weights` wrote to the folder; None when there is none."""
    file = Path(path) / WEIGHTS_FILE
    if not (path and file.is_file()):
        return None
    from safetensors.numpy import load_file

    found = load_file(file).get("table")
    return None if found is None else found.astype(np.float64)
