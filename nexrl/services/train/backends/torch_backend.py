"""The PyTorch back end: `TrainService` in this process, on CPU or one GPU.

Consumes chunks and optimizer settings from the trainer (directly, or through `server.py`), produces
logprobs, losses and publications. Its one worker thread is woken by calls, does all torch work, and
so makes calls take effect in the order in which they were started; the event loop never blocks.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from nexrl.config.schema import TrainServiceConfig
from nexrl.errors import ConfigError, ServiceError
from nexrl.services.train.backends.hf_model import check_packing, load_model
from nexrl.services.train.backends.torch_policy import TorchPolicy
from nexrl.services.train.policy_door import check_source, find_policy
from nexrl.services.train.verbs import TrainVerbs
from nexrl.types import ModelSpec, TrainInfo

T = TypeVar("T")


class TorchTrainService(TrainVerbs):
    """`TrainService` over `TorchPolicy`s, one for each policy name.

    Invariant: policies are touched by the worker thread only. A call that is cancelled before its
    turn has no effect; one that runs ends, and keeps its effect. After `aclose` a running call
    ends at its next micro-batch and no thread is left.
    """

    def __init__(
        self, config: TrainServiceConfig | None = None, *, deterministic: bool = False
    ) -> None:
        self._config = config or TrainServiceConfig()
        self._device = _device(self._config.device)
        self._deterministic = deterministic
        self._policies: dict[str, TorchPolicy] = {}
        self._stop = threading.Event()
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="train-service", initializer=self._prepare_thread
        )

    def _prepare_thread(self) -> None:
        # Always: in one process with the builtin engine, a thread inherits what the engine has set.
        asked = int(os.environ.get("OMP_NUM_THREADS") or 0)
        torch.set_num_threads(self._config.num_threads or asked or os.cpu_count() or 1)
        if self._deterministic:
            # cuBLAS reads it when the first CUDA handle is made.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    async def create(self, spec: ModelSpec) -> TrainInfo:
        """Load a model, or copy a hosted one, under a policy name."""
        return await self._submit(lambda: self._create(spec))

    async def drop(self, policy: str) -> None:
        """Forget a policy and free its memory; idempotent."""
        await self._submit(lambda: self._drop(policy))

    async def _call(self, result: type[T], policy: str, verb: str, **arguments: Any) -> T:
        """The method of that name of the hosted policy."""
        return await self._submit(lambda: getattr(self._get(policy), verb)(**arguments))

    async def aclose(self) -> None:
        """End the worker thread and free the models; idempotent."""
        self._stop.set()
        await asyncio.to_thread(self._executor.shutdown, wait=True)
        self._policies.clear()

    # --- in the worker thread -----------------------------------------------------------------

    def _create(self, spec: ModelSpec) -> TrainInfo:
        check_source(spec)
        if spec.copy_of:
            model = self._get(spec.copy_of).model.copied(spec.head)
        else:
            setting = "train_service.model_path"
            model = load_model(spec.path, setting=setting, device=self._device, head=spec.head)
        if self._config.packing:
            check_packing(model)
        policy = TorchPolicy(
            spec.policy, model, self._config, trainable=spec.trainable, stop=self._stop
        )
        self._policies[spec.policy] = policy
        return policy.info()

    def _drop(self, policy: str) -> None:
        if self._policies.pop(policy, None) is not None:
            gc.collect()  # modules of transformers may hold each other
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # for the other processes on the device

    def _get(self, policy: str) -> TorchPolicy:
        return find_policy(self._policies, policy)

    async def _submit(self, function: Callable[[], T]) -> T:
        """Queue work for the thread; the queue's order is the order in which calls started."""

        def job() -> T:
            self._refuse_if_closed()
            return function()

        self._refuse_if_closed()
        return await asyncio.get_running_loop().run_in_executor(self._executor, job)

    def _refuse_if_closed(self) -> None:
        if self._stop.is_set():
            raise ServiceError("the train service is closed", retryable=False)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"train_service.device: {name!r} is not a device: {error}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"train_service.device: {name!r} is not here ({torch.cuda.device_count()} CUDA devices "
            "found; accepted: auto, cpu, cuda:N)"
        )
    return device
