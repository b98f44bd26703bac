"""Brings up the services a run needs, as its configuration says, and ends them.

`process`: a supervised child on loopback behind HTTP; `in_process`: the same class in our own
process; a `url`: somebody else's server. The caller sees only the service Protocols.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nexrl.algorithms.presets import find_preset
from nexrl.config.loader import StageConfig
from nexrl.config.schema import RunConfig
from nexrl.launch.process import ChildProcess
from nexrl.services.inference.absent import AbsentInference
from nexrl.services.inference.client import HttpInferenceService
from nexrl.services.inference.protocol import InferenceService
from nexrl.services.train.client import HttpTrainService
from nexrl.services.train.local import make_local_train_service
from nexrl.services.train.protocol import TrainService

Head = Literal["lm", "value"]
_SHARED_SWITCH_INTERVAL_S = 0.0002
"""With services in process, the engine's thread asks for the interpreter hundreds of times a step;
at the default of 5 ms each busy moment of the event loop holds it up that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services of a run, and the children behind them."""

    train: TrainService
    """Where gradients are computed."""
    inference: InferenceService
    """Where tokens are drawn; refuses to in a run that trains a value head."""
    children: tuple[ChildProcess, ...]
    """Supervised processes; empty when everything is in process or remote."""

    @property
    def engines(self) -> tuple[InferenceService, ...]:
        """Those that published weights are loaded into."""
        return () if isinstance(self.inference, AbsentInference) else (self.inference,)


def policy_head(stages: Sequence[StageConfig]) -> Head:
    """What the trained policy ends in: a value head when it becomes a reward model.

    Stages agree on it: the configuration's rules see to that.
    """
    preset = find_preset(stages[0].config.trainer.algorithm.preset)
    return "value" if preset.family == "reward_model" else "lm"


@asynccontextmanager
async def local_services(
    config: RunConfig, *, model_folder: Path, logs: Path, head: Head = "lm"
) -> AsyncIterator[Services]:
    """Services up and answering; on exit all of them have ended, in parallel.

    With head="value" no engine is started: there are no tokens to draw from such a policy.
    """
    service = config.service
    if "in_process" in (service.train_service.placement, service.inference_service.placement):
        sys.setswitchinterval(_SHARED_SWITCH_INTERVAL_S)
    train_child, inference_child = children = [
        ChildProcess(
            name,
            log=logs / f"{name}.log",
            shutdown_deadline_s=config.launch.shutdown_deadline_s,
        )
        for name in ("train", "inference")
    ]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close_all, children)
        async with asyncio.TaskGroup() as starting:
            train_start = starting.create_task(_start_train(config, train_child))
            inference_start = starting.create_task(
                _start_inference(config, model_folder, head, inference_child)
            )
        train, inference = train_start.result(), inference_start.result()
        stack.push_async_callback(train.aclose)
        stack.push_async_callback(inference.aclose)
        running = tuple(child for child in children if child.pid is not None)
        yield Services(train=train, inference=inference, children=running)


async def _close_all(children: Sequence[ChildProcess]) -> None:
    """Each whatever becomes of the others."""
    endings = [asyncio.ensure_future(child.aclose()) for child in children]
    await asyncio.gather(*endings, return_exceptions=True)
    for ending in endings:
        ending.result()


async def _start_train(config: RunConfig, child: ChildProcess) -> TrainService:
    service = config.service.train_service
    if service.url is None and service.placement == "in_process":
        return await asyncio.to_thread(
            make_local_train_service, service, deterministic=config.deterministic
        )
    url, token = service.url, service.api_key
    if url is None:
        arguments = ["--config", service.model_dump_json(exclude={"api_key"})]
        arguments += ["--deterministic"] if config.deterministic else []
        await child.start(_server("train", *arguments), start_deadline_s=service.start_deadline_s)
        url, token = child.url, child.token
    return HttpTrainService(url, token=token, request_deadline_s=service.request_deadline_s)


async def _start_inference(
    config: RunConfig, model_folder: Path, head: Head, child: ChildProcess
) -> InferenceService:
    service = config.service.inference_service
    if head == "value":
        return AbsentInference("it trains a reward model")
    if service.url is None and service.placement == "in_process":
        from nexrl.services.inference.engines.builtin.service import BuiltinInference

        return await asyncio.to_thread(
            BuiltinInference, model_folder, service, deterministic=config.deterministic
        )
    url, token = service.url, service.api_key
    if url is None:
        settings = {
            "model_folder": str(model_folder),
            "deterministic": config.deterministic,
            "service": service.model_dump(mode="json", exclude={"api_key"}),
        }
        command = _server("inference", json.dumps(settings))
        await child.start(command, start_deadline_s=service.start_deadline_s)
        url, token = child.url, child.token
    return HttpInferenceService(
        url,
        token=token,
        request_deadline_s=service.request_deadline_s,
        connect_deadline_s=service.connect_deadline_s,
    )


def _server(service: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"nexrl.services.{service}.server", *arguments]
