"""The verbs of `TrainService` as one call by name, for whoever treats them all alike: the HTTP client
sends it, the PyTorch back end runs it in its thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeVar

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

T = TypeVar("T")


class TrainVerbs(ABC):
    """A `TrainService` but for `_call` and `aclose`. What each verb does stands in `protocol.py`."""

    @abstractmethod
    async def _call(self, result: type[T], policy: str, verb: str, **arguments: Any) -> T:
        """Do the verb with its arguments by name; the call's place in the order is taken before
        anything is awaited."""

    async def create(self, spec: ModelSpec) -> TrainInfo:
        """See `TrainService.create`."""
        return await self._call(TrainInfo, spec.policy, "create", spec=spec)

    async def forward(
        self, policy: str, chunk: RowChunk, *, outputs: tuple[str, ...] = ("logprobs",)
    ) -> ForwardOutput:
        """See `TrainService.forward`."""
        return await self._call(ForwardOutput, policy, "forward", chunk=chunk, outputs=outputs)

    async def forward_backward(
        self,
        policy: str,
        chunk: RowChunk,
        loss: LossSpec,
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> BackwardOutput:
        """See `TrainService.forward_backward`."""
        return await self._call(
            BackwardOutput, policy, "forward_backward", chunk=chunk, loss=loss, outputs=outputs
        )

    async def backward(
        self, policy: str, chunk: RowChunk, gradients: Mapping[str, FloatArray]
    ) -> BackwardOutput:
        """See `TrainService.backward`."""
        return await self._call(
            BackwardOutput, policy, "backward", chunk=chunk, gradients=gradients
        )

    async def optim_step(self, policy: str, params: OptimParams) -> OptimResult:
        """See `TrainService.optim_step`."""
        return await self._call(OptimResult, policy, "optim_step", params=params)

    async def save_state(self, policy: str, path: str) -> None:
        """See `TrainService.save_state`."""
        await self._call(NoneType, policy, "save_state", path=path)

    async def load_state(self, policy: str, path: str, *, with_optimizer: bool = True) -> TrainInfo:
        """See `TrainService.load_state`."""
        return await self._call(
            TrainInfo, policy, "load_state", path=path, with_optimizer=with_optimizer
        )

    async def publish_weights(
        self, policy: str, version: PolicyVersion, path: str, *, unchanged: bool = False
    ) -> WeightManifest:
        """See `TrainService.publish_weights`."""
        return await self._call(
            WeightManifest,
            policy,
            "publish_weights",
            version=version,
            path=path,
            unchanged=unchanged,
        )

    async def reset_optimizer(self, policy: str) -> None:
        """See `TrainService.reset_optimizer`."""
        await self._call(NoneType, policy, "reset_optimizer")

    async def drop(self, policy: str) -> None:
        """See `TrainService.drop`."""
        await self._call(NoneType, policy, "drop")

    async def info(self, policy: str) -> TrainInfo:
        """See `TrainService.info`."""
        return await self._call(TrainInfo, policy, "info")
