"""What the rest of NexRL knows of training: verbs over ragged row chunks.

Named losses are plain sums over tokens of term x weight: the trainer owns every denominator.
How a chunk is split into micro-batches, packed or spread over ranks belongs to the service alone
and never changes the gradient. Calls on one policy take effect in the order they were started,
so a caller may start the next before the last has returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nexrl.types import (
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


class TrainService(Protocol):
    """A hosted model that can be trained; one service may host several policies."""

    async def create(self, spec: ModelSpec) -> TrainInfo:
        """Load or copy a model under a policy name; replaces one of the same name. A head that
        neither the folder nor the copied policy has starts at 0."""
        ...

    async def forward(
        self, policy: str, chunk: RowChunk, *, outputs: tuple[str, ...] = ("logprobs",)
    ) -> ForwardOutput:
        """Named per-token outputs without gradients (`nexrl/services/train/outputs.py`)."""
        ...

    async def forward_backward(
        self,
        policy: str,
        chunk: RowChunk,
        loss: LossSpec,
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> BackwardOutput:
        """Add the gradient of a named loss; returns its sum and the per-token outputs asked for. A
        loss of level `row` sees whole rows: one is never split."""
        ...

    async def backward(
        self, policy: str, chunk: RowChunk, gradients: Mapping[str, FloatArray]
    ) -> BackwardOutput:
        """Add the gradient of sum over outputs o of <gradients[o], o>; any client-side loss over any
        outputs but top-K."""
        ...

    async def optim_step(self, policy: str, params: OptimParams) -> OptimResult:
        """Clip, step, and zero the gradient; a gradient that is not finite is not applied."""
        ...

    async def save_state(self, policy: str, path: str) -> None:
        """Write weights, optimizer and RNG to a folder that appears only when complete; its `hf`
        sub-folder loads with transformers."""
        ...

    async def load_state(self, policy: str, path: str, *, with_optimizer: bool = True) -> TrainInfo:
        """Read a folder of `save_state`; without the optimizer its state starts anew."""
        ...

    async def publish_weights(
        self, policy: str, version: PolicyVersion, path: str, *, unchanged: bool = False
    ) -> WeightManifest:
        """Write safetensors and manifest.json to a folder that appears only when complete."""
        ...

    async def reset_optimizer(self, policy: str) -> None:
        """Forget optimizer moments and accumulated gradients, for a new stage."""
        ...

    async def drop(self, policy: str) -> None:
        """Undo `create`: free the policy's memory. Calls that started before it end as they would
        have; those that start later are refused like any on a name that is not hosted. Copies of
        it stay. Idempotent: afterwards nothing is hosted under the name."""
        ...

    async def info(self, policy: str) -> TrainInfo:
        """Sizes, counters and time spent."""
        ...

    async def aclose(self) -> None:
        """Release connections or the model itself; idempotent."""
        ...
