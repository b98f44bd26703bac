"""The train service for custom trainers whose `train` is an ordinary function.

Such a function runs in a thread; its calls are carried to the event loop and waited for. Every
call ends: with the service's answer, its deadline, or the end of the trainer's batch.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from nexrl.errors import InvariantError
from nexrl.services.train.protocol import TrainService
from nexrl.types import (
    BackwardOutput,
    FloatArray,
    ForwardOutput,
    LossSpec,
    OptimParams,
    OptimResult,
    RowChunk,
)

T = TypeVar("T")


class BlockingTrainService:
    """Blocking forms of the verbs a trainer uses, for one policy.

    Invariant: calls block only threads other than the loop's; after `close` none is waiting.
    """

    def __init__(self, service: TrainService, policy: str) -> None:
        self._service = service
        self._policy = policy
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._waiting: set[concurrent.futures.Future[Any]] = set()

    def open(self) -> None:
        """Accept calls, carried to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def close(self) -> None:
        """End waiting calls and refuse further ones."""
        self._loop = None
        for future in tuple(self._waiting):
            future.cancel()

    def forward(
        self, chunk: RowChunk, *, outputs: tuple[str, ...] = ("logprobs",), policy: str = ""
    ) -> ForwardOutput:
        """Named per-token outputs; of another policy, for example a reference, when named."""
        return self._wait(self._service.forward(policy or self._policy, chunk, outputs=outputs))

    def forward_backward(
        self, chunk: RowChunk, loss: LossSpec, *, outputs: tuple[str, ...] = ("logprobs",)
    ) -> BackwardOutput:
        """Add the gradient of a named loss."""
        return self._wait(
            self._service.forward_backward(self._policy, chunk, loss, outputs=outputs)
        )

    def backward(self, chunk: RowChunk, gradients: Mapping[str, FloatArray]) -> BackwardOutput:
        """Add the gradient of sum over outputs o of <gradients[o], o>."""
        return self._wait(self._service.backward(self._policy, chunk, gradients))

    def optim_step(self, params: OptimParams) -> OptimResult:
        """Clip, step, and zero the gradient."""
        return self._wait(self._service.optim_step(self._policy, params))

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        loop = self._loop
        if loop is None or threading.get_ident() == self._loop_thread:
            call.close()
            raise InvariantError(
                "the blocking train service works only inside a trainer's ordinary `train` "
                "function; an async `train` awaits self.train_service"
            )
        future = asyncio.run_coroutine_threadsafe(call, loop)
        self._waiting.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise InvariantError(
                "the trainer was closed while its `train` function waited for the train service"
            ) from error
        finally:
            self._waiting.discard(future)
