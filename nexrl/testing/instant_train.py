"""A train service that answers at once: for tests and benchmarks of everything around it.

It keeps the contract of `TrainService` (order, checks, counters, publications, state folders; the
suite in `contracts/train.py` runs against it) and does no arithmetic: logprobs are the ones that
came with the chunk, and a step changes one small tensor, so that versions have different checksums.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nexrl.atomic import atomic_folder
from nexrl.errors import ConfigError, InvariantError, ServiceError
from nexrl.services.train.chunk_checks import scored_positions
from nexrl.services.train.outputs import OFFERED, empty_output
from nexrl.services.train.policy_door import PendingGradient, PolicyDoor
from nexrl.services.train.publication import NamedTensor, hash_tensors, publish
from nexrl.types import (
    OUTPUT_MASK,
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
from nexrl.weight_manifest import make_manifest

PLAUSIBLE = -1.0
"""Logprob of a token about which the chunk says nothing; its negative is every entropy."""
_STATE_FILE = "state.json"


class _Policy:
    def __init__(self, spec: ModelSpec, weight: FloatArray) -> None:
        self.spec = spec
        self.weight = weight
        self.gradient = 0.0
        self.pending = PendingGradient(spec.policy)
        self.optimizer_step = 0

    def forget_gradient(self) -> None:
        self.gradient = 0.0
        self.pending.forget()


class InstantTrain:
    """`TrainService` without a model. `write_publications=False` leaves the disk alone.

    Invariant: what it refuses, the real service refuses too.
    """

    def __init__(
        self,
        *,
        write_publications: bool = True,
        vocab_size: int = 1 << 17,
        max_positions: int = 1 << 20,
    ) -> None:
        self._write_publications = write_publications
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._policies: dict[str, _Policy] = {}
        self._closed = False

    async def create(self, spec: ModelSpec) -> TrainInfo:
        """Host a policy; no file is read."""
        if bool(spec.path) == bool(spec.copy_of):
            raise ConfigError(f"policy {spec.policy!r}: give either path or copy_of")
        weight = np.zeros(4, np.float32)
        if spec.copy_of:
            source = self._get(spec.copy_of)
            weight = source.weight.copy()
            if source.spec.head == "value" != spec.head:
                raise ConfigError(f"policy {spec.policy!r}: a value policy has no output head")
        self._policies[spec.policy] = _Policy(spec, weight)
        return await self.info(spec.policy)

    async def forward(
        self, policy: str, chunk: RowChunk, *, outputs: tuple[str, ...] = ("logprobs",)
    ) -> ForwardOutput:
        """Plausible outputs at the wanted positions."""
        self._door(self._get(policy)).check_forward(chunk, outputs)
        return ForwardOutput(lengths=chunk.lengths, outputs=_outputs(chunk, outputs))

    async def forward_backward(
        self,
        policy: str,
        chunk: RowChunk,
        loss: LossSpec,
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> BackwardOutput:
        """The loss is sum(weight x -logprob), whatever its name."""
        hosted = self._get(policy)
        door = self._door(hosted)
        door.require_trainable()
        with hosted.pending.whole_or_broken():
            call = door.check_loss(chunk, loss, outputs)
        weight = np.where(call.trained, call.inputs["weight"], 0.0)
        hosted.gradient += float(np.abs(weight).sum())
        return BackwardOutput(
            loss=-float(np.dot(weight, _logprobs(chunk, call.trained))),
            outputs=_outputs(chunk, outputs),
        )

    async def backward(
        self, policy: str, chunk: RowChunk, gradients: Mapping[str, FloatArray]
    ) -> BackwardOutput:
        """Takes note that there is a gradient."""
        hosted = self._get(policy)
        door = self._door(hosted)
        door.require_trainable()
        with hosted.pending.whole_or_broken():
            trained = door.check_backward(chunk, gradients)
        hosted.gradient += float(sum(np.abs(g[trained]).sum() for g in gradients.values()))
        return BackwardOutput(loss=0.0, outputs={})

    async def optim_step(self, policy: str, params: OptimParams) -> OptimResult:
        """Counts, and moves the weights by lr."""
        hosted = self._get(policy)
        self._door(hosted).require_trainable()
        grad_norm, hosted.gradient = hosted.gradient, 0.0
        hosted.pending.take()
        hosted.weight = hosted.weight + np.float32(params.lr)
        hosted.optimizer_step += 1
        return OptimResult(grad_norm=grad_norm, applied=True, optimizer_step=hosted.optimizer_step)

    async def save_state(self, policy: str, path: str) -> None:
        """Write the little there is."""
        hosted = self._get(policy)
        if hosted.gradient or hosted.pending.exists:
            raise InvariantError(f"save_state of policy {policy!r}: a gradient is pending")
        state = {
            "head": hosted.spec.head,
            "optimizer_step": hosted.optimizer_step,
            "weight": hosted.weight.tolist(),
        }
        with atomic_folder(path, durable=False) as folder:
            (folder / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    async def load_state(self, policy: str, path: str, *, with_optimizer: bool = True) -> TrainInfo:
        """Read it back."""
        hosted = self._get(policy)
        file = Path(path) / _STATE_FILE
        if not file.is_file():
            raise ConfigError(f"load_state: {path!r} is not a folder of save_state")
        state = json.loads(file.read_text(encoding="utf-8"))
        if state["head"] != hosted.spec.head:
            raise ConfigError(f"load_state: {path!r} holds a policy with head={state['head']!r}")
        hosted.weight = np.array(state["weight"], np.float32)
        hosted.optimizer_step = int(state["optimizer_step"])
        hosted.forget_gradient()
        return await self.info(policy)

    async def publish_weights(
        self, policy: str, version: PolicyVersion, path: str, *, unchanged: bool = False
    ) -> WeightManifest:
        """A real publication of one tensor."""
        tensors = [NamedTensor.from_array("weight", self._get(policy).weight)]
        if self._write_publications:
            return publish(path, version, tensors, {}, unchanged=unchanged)
        infos, num_bytes = hash_tensors(tensors), len(tensors[0].data)
        return make_manifest(version, Path(path), infos, num_bytes=num_bytes, unchanged=unchanged)

    async def reset_optimizer(self, policy: str) -> None:
        """Forget the gradient."""
        self._get(policy).forget_gradient()

    async def info(self, policy: str) -> TrainInfo:
        """Counters."""
        hosted = self._get(policy)
        return TrainInfo(
            policy=policy,
            num_parameters=len(hosted.weight) if hosted.spec.trainable else 0,
            vocab_size=self._vocab_size,
            max_positions=self._max_positions,
            dtype="float32",
            optimizer_step=hosted.optimizer_step,
            losses=self._door(hosted).losses,
            outputs=OFFERED[hosted.spec.head],
            seconds=dict.fromkeys(("forward", "backward", "optimizer", "publish"), 0.0),
        )

    async def aclose(self) -> None:
        """No further call is accepted; idempotent."""
        self._closed = True

    def _door(self, hosted: _Policy) -> PolicyDoor:
        return PolicyDoor(
            policy=hosted.spec.policy,
            head=hosted.spec.head,
            trainable=hosted.spec.trainable,
            vocab_size=self._vocab_size,
            max_positions=self._max_positions,
        )

    def _get(self, policy: str) -> _Policy:
        if self._closed:
            raise ServiceError("the train service is closed", retryable=False)
        if policy not in self._policies:
            raise ConfigError(
                f"no policy is named {policy!r} (hosted here: {sorted(self._policies)})"
            )
        return self._policies[policy]


def _logprobs(chunk: RowChunk, positions: BoolArray) -> FloatArray:
    for name in ("behavior_logprobs", "proximal_logprobs"):
        if name in chunk.inputs:
            return np.where(positions, chunk.inputs[name], 0.0).astype(np.float32)
    return np.where(positions, np.float32(PLAUSIBLE), np.float32(0.0))


def _outputs(chunk: RowChunk, names: tuple[str, ...]) -> dict[str, Array]:
    """Values are 0, like those of a new head; the likeliest ids are 0, 1, 2 ..."""
    positions = scored_positions(chunk, chunk.inputs.get(OUTPUT_MASK))
    found = {name: empty_output(name, chunk) for name in names}
    for name, array in found.items():
        if name == "logprobs":
            array[:] = _logprobs(chunk, positions)
        elif name.startswith("top_ids"):
            array[positions] = np.arange(array.shape[1])
        elif name != "values":
            array[positions] = -PLAUSIBLE if name == "entropy" else PLAUSIBLE
    return found
