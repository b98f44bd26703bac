"""The PyTorch back end: `TrainService` in this process, on CPU or one GPU.

Consumes chunks and optimizer settings from the trainer (directly, or through `server.py`), produces
logprobs, losses and publications. Its one worker thread is woken by calls, does all torch work, and
so makes calls take effect in the order in which they were started; the event loop never blocks.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from nexrl.config.schema import TrainServiceConfig
from nexrl.errors import ConfigError, ServiceError
from nexrl.services.train.backends.checkpoint import load_policy, save_policy
from nexrl.services.train.backends.hf_model import (
    check_packing,
    export_side_files,
    export_tensors,
    load_model,
)
from nexrl.services.train.backends.torch_policy import ComputeSettings, TorchPolicy
from nexrl.services.train.publication import publish
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


class TorchTrainService:
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

    # --- verbs --------------------------------------------------------------------------------

    async def create(self, spec: ModelSpec) -> TrainInfo:
        """Load a model, or copy a hosted one, under a policy name."""
        return await self._submit(self._create, spec)

    async def forward(
        self, policy: str, chunk: RowChunk, *, outputs: tuple[str, ...] = ("logprobs",)
    ) -> ForwardOutput:
        """Named per-token outputs without gradients."""
        return await self._submit(lambda: self._get(policy).forward(chunk, outputs))

    async def forward_backward(
        self,
        policy: str,
        chunk: RowChunk,
        loss: LossSpec,
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> BackwardOutput:
        """Add the gradient of a named loss."""
        return await self._submit(lambda: self._get(policy).forward_backward(chunk, loss, outputs))

    async def backward(
        self, policy: str, chunk: RowChunk, gradients: Mapping[str, FloatArray]
    ) -> BackwardOutput:
        """Add the gradient of sum over outputs o of <gradients[o], o>; reports no outputs."""
        return await self._submit(lambda: self._get(policy).backward(chunk, gradients))

    async def optim_step(self, policy: str, params: OptimParams) -> OptimResult:
        """Clip, step, and zero the gradient."""
        return await self._submit(lambda: self._get(policy).optim_step(params))

    async def save_state(self, policy: str, path: str) -> None:
        """Write weights, optimizer, RNG and counters; refused while a gradient is pending."""
        await self._submit(lambda: save_policy(self._get(policy), path))

    async def load_state(self, policy: str, path: str, *, with_optimizer: bool = True) -> TrainInfo:
        """Read a folder of `save_state` into a hosted policy."""

        def load() -> TrainInfo:
            hosted = self._get(policy)
            load_policy(hosted, path, with_optimizer=with_optimizer)
            return hosted.info()

        return await self._submit(load)

    async def publish_weights(
        self, policy: str, version: PolicyVersion, path: str, *, unchanged: bool = False
    ) -> WeightManifest:
        """Write a publication in the compute dtype: float32, or bfloat16 under autocast."""
        return await self._submit(self._publish, policy, version, path, unchanged)

    async def reset_optimizer(self, policy: str) -> None:
        """Forget optimizer moments and accumulated gradients."""
        await self._submit(lambda: self._get(policy).reset_optimizer())

    async def info(self, policy: str) -> TrainInfo:
        """Sizes, counters and time spent."""
        return await self._submit(lambda: self._get(policy).info())

    async def aclose(self) -> None:
        """End the worker thread and free the models; idempotent."""
        self._stop.set()
        await asyncio.to_thread(self._executor.shutdown, wait=True)
        self._policies.clear()

    # --- in the worker thread -----------------------------------------------------------------

    def _create(self, spec: ModelSpec) -> TrainInfo:
        if bool(spec.path) == bool(spec.copy_of):
            raise ConfigError(
                f"policy {spec.policy!r}: give either path or copy_of, got path={spec.path!r} and "
                f"copy_of={spec.copy_of!r}"
            )
        if spec.copy_of:
            model = self._get(spec.copy_of).model.copied(spec.head)
        else:
            setting = "train_service.model_path"
            model = load_model(spec.path, setting=setting, device=self._device, head=spec.head)
        if self._config.packing:
            check_packing(model)
        config = self._config
        policy = TorchPolicy(
            spec.policy,
            model,
            ComputeSettings(
                device=self._device,
                autocast=config.dtype == "bfloat16",
                gradient_checkpointing=config.gradient_checkpointing,
                micro_batch_tokens=config.micro_batch_tokens,
                packing=config.packing,
            ),
            trainable=spec.trainable,
            stop=self._stop,
        )
        self._policies[spec.policy] = policy
        return policy.info()

    def _publish(
        self, policy: str, version: PolicyVersion, path: str, unchanged: bool
    ) -> WeightManifest:
        hosted = self._get(policy)
        dtype = torch.bfloat16 if self._config.dtype == "bfloat16" else torch.float32
        with hosted.timed_publish():
            return publish(
                path,
                version,
                export_tensors(hosted.model, dtype),
                export_side_files(hosted.model, dtype),
                unchanged=unchanged,
            )

    def _get(self, policy: str) -> TorchPolicy:
        if policy not in self._policies:
            raise ConfigError(
                f"no policy is named {policy!r} (hosted here: {sorted(self._policies)})"
            )
        return self._policies[policy]

    async def _submit(self, function: Callable[..., T], *arguments: object) -> T:
        """Queue work for the thread; the queue's order is the order in which calls started."""
        if self._stop.is_set():
            raise ServiceError("the train service is closed", retryable=False)
        loop = asyncio.get_running_loop()
        job = functools.partial(self._run, function, *arguments)
        return await loop.run_in_executor(self._executor, job)

    def _run(self, function: Callable[..., T], *arguments: object) -> T:
        if self._stop.is_set():
            raise ServiceError("the train service is closing", retryable=False)
        return function(*arguments)


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
