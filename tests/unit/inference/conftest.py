"""A micro model, and the builtin engine over it, in process and served over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nexrl.config.schema import InferenceServiceConfig
from nexrl.services.inference.client import HttpInferenceService
from nexrl.services.inference.engines.builtin.service import BuiltinInference
from nexrl.services.inference.server import make_inference_app
from nexrl.testing.tiny_models import make_micro_model

TOKEN = "secret"
MakeEngine = Callable[..., BuiltinInference]
Serve = Callable[[BuiltinInference], AbstractAsyncContextManager[HttpInferenceService]]


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With these weights greedy draws go on to their limit and sampled ones end now and then."""
    return make_micro_model(tmp_path_factory.mktemp("micro"), seed=3)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    return make_micro_model(folder, seed=0, vocab="chat", chat_template=True, max_positions=128)


@pytest.fixture
async def make_engine(micro_model: Path) -> AsyncIterator[MakeEngine]:
    """Makes engines of the micro model, or of another, that are closed when the test has ended."""
    made: list[BuiltinInference] = []

    def make(
        model: Path = micro_model, *, deterministic: bool = False, **settings: Any
    ) -> BuiltinInference:
        config = InferenceServiceConfig(**settings)
        made.append(BuiltinInference(model, config, deterministic=deterministic))
        return made[-1]

    yield make
    for engine in made:
        await engine.aclose()


@asynccontextmanager
async def _serve(builtin: BuiltinInference) -> AsyncIterator[HttpInferenceService]:
    app = make_inference_app(builtin, model="actor", token=TOKEN)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = HttpInferenceService(f"http://127.0.0.1:{runner.addresses[0][1]}", token=TOKEN)
    try:
        yield client
    finally:
        await client.aclose()
        await runner.cleanup()


@pytest.fixture
def serve() -> Serve:
    """Serve an engine over HTTP; gives our client of it."""
    return _serve
