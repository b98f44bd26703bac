"""The train contract, against the fakes, the back end in process, and over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from nexrl.services.train.backends.torch_backend import TorchTrainService
from nexrl.services.train.client import HttpTrainService
from nexrl.services.train.protocol import TrainService
from nexrl.services.train.server import make_train_app
from nexrl.testing.contracts.train import ARITHMETIC_CHECKS, MOMENT_CHECKS, STRUCTURE_CHECKS
from nexrl.testing.contracts.train_subject import Check, TrainSubject
from nexrl.testing.fake_train import FakeTrainService
from nexrl.testing.instant_train import InstantTrain
from nexrl.testing.tiny_models import make_micro_model
from nexrl.testing.toy_train_service import ToyTrainService
from nexrl.types import ModelSpec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_micro_model(tmp_path_factory.mktemp("model"), seed=0)


@asynccontextmanager
async def over_http(service: TrainService) -> AsyncIterator[TrainService]:
    runner = web.AppRunner(make_train_app(service, token="secret"), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = HttpTrainService(f"http://127.0.0.1:{runner.addresses[0][1]}", token="secret")
    try:
        yield client
    finally:
        await client.aclose()
        await runner.cleanup()


@asynccontextmanager
async def make_service(kind: str) -> AsyncIterator[TrainService]:
    inner: FakeTrainService | TorchTrainService
    match kind.removesuffix("-http"):
        case "instant":
            inner = InstantTrain(max_positions=64)
        case "toy":
            inner = ToyTrainService(max_positions=64)
        case _:
            inner = TorchTrainService()
    try:
        if "http" in kind:
            async with over_http(inner) as client:
                yield client
        else:
            yield inner
    finally:
        await inner.aclose()


def _name(check: Check) -> str:
    return getattr(check, "__name__", "check").removeprefix("check_")


@pytest.mark.parametrize("kind", ["instant", "instant-http", "toy", "torch", "torch-http"])
@pytest.mark.parametrize("check", STRUCTURE_CHECKS, ids=_name)
async def test_structure(check: Check, kind: str, model: Path, tmp_path: Path) -> None:
    async with make_service(kind) as service:
        await check(TrainSubject(service=service, spec=ModelSpec(path=str(model)), folder=tmp_path))


@pytest.mark.parametrize("kind", ["toy", "toy-http", "torch", "torch-http"])
@pytest.mark.parametrize("check", ARITHMETIC_CHECKS, ids=_name)
async def test_arithmetic(check: Check, kind: str, model: Path, tmp_path: Path) -> None:
    async with make_service(kind) as service:
        await check(TrainSubject(service=service, spec=ModelSpec(path=str(model)), folder=tmp_path))


@pytest.mark.parametrize("check", MOMENT_CHECKS, ids=_name)
async def test_moments(check: Check, model: Path, tmp_path: Path) -> None:
    async with make_service("torch") as service:
        await check(TrainSubject(service=service, spec=ModelSpec(path=str(model)), folder=tmp_path))
