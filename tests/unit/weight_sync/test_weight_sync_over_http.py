"""The same faults through a real HTTP server and the real client: nothing gets lost on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from nexrl.config.schema import WeightConfig
from nexrl.errors import WeightSyncError
from nexrl.services.http import make_app
from nexrl.services.inference.client import HttpInferenceService
from nexrl.services.inference.server import add_control_routes
from nexrl.testing.faulty_engine import Fault, FaultyEngine
from nexrl.testing.makers import make_tracker
from nexrl.testing.toy_train_service import ToyTrainService
from nexrl.types import PolicyVersion
from nexrl.weight_sync.controller import WeightSyncController

V0, V1 = PolicyVersion(), PolicyVersion(number=1)


def serve_engine(engine: FaultyEngine) -> web.Application:
    """An engine behind the control verbs of the inference server."""
    app = make_app()
    add_control_routes(app, engine, policy="actor")
    return app


@asynccontextmanager
async def started(
    folder: Path, engine: FaultyEngine
) -> AsyncIterator[tuple[WeightSyncController, ToyTrainService]]:
    """A controller that reaches the engine over HTTP and serves version 0; then weights move."""
    server, train = TestServer(serve_engine(engine)), ToyTrainService()
    await server.start_server()
    client = HttpInferenceService(str(server.make_url("/")))
    config = WeightConfig(load_deadline_s=0.5, verify_deadline_s=0.5)
    controller = WeightSyncController(
        train=train, engines=[client], config=config, folder=folder, tracker=make_tracker()
    )
    try:
        await controller.start(V0)
        train.tables["actor"] = 1.5 * train.tables["actor"]
        yield controller, train
    finally:
        await client.aclose()
        await server.close()


async def test_a_healthy_engine_serves_the_new_version(tmp_path: Path) -> None:
    engine = FaultyEngine()
    async with started(tmp_path, engine) as (controller, _):
        await controller.sync(V1)
    assert engine.active == V1
    assert not engine.paused


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.ERROR, "load on engine 0.*answered 500.*CUDA out of memory during load"),
        (Fault.HANG, "load on engine 0.*no answer within 0.5 s"),
        (Fault.LOAD_NOTHING, "verify on engine 0.*nearer the old weights"),
        (Fault.WRONG_TENSORS, "verify on engine 0.*nearer the old|differ from the trainer"),
        (Fault.WRONG_VERSION, r"load on engine 0.*acknowledged version actor@0\.8"),
    ],
)
async def test_a_faulty_engine_is_caught(tmp_path: Path, fault: Fault, message: str) -> None:
    """FR-101, FR-109, FR-116, with an engine that repeats any checksum it is sent."""
    engine = FaultyEngine(echo="parrot")
    async with started(tmp_path, engine) as (controller, _):
        engine.fault = fault
        with pytest.raises(WeightSyncError, match=message):
            await controller.sync(V1)
    assert engine.active == V0


async def test_a_wrong_checksum_names_both(tmp_path: Path) -> None:
    engine = FaultyEngine(echo="truth")
    async with started(tmp_path, engine) as (controller, _):
        engine.fault = Fault.WRONG_TENSORS
        with pytest.raises(WeightSyncError, match=r"hash to of .*the manifest says"):
            await controller.sync(V1)
