"""The builtin engine behind HTTP: OpenAI's endpoints, our hot path, control, health and metrics.

Started by a launcher as `python -m nexrl.services.inference.server '<JSON>'`; prints a ready line
with its port and ends on SIGTERM. The engine, and torch with it, is imported when it is started.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nexrl.config.schema import InferenceServiceConfig
from nexrl.errors import ConfigError
from nexrl.services.http import bind, end_process, make_app, serve
from nexrl.services.inference.messages import (
    ABORT_PATH,
    CONTENT_TYPE,
    GENERATE_PATH,
    pack_frame,
    unpack_generate,
)
from nexrl.services.inference.metrics import ServerMetrics
from nexrl.services.inference.openai_endpoints import OpenAIEndpoints
from nexrl.services.inference.protocol import EngineControl
from nexrl.types import DEFAULT_POLICY, FloatArray, PolicyVersion, RowChunk, WeightManifest
from nexrl.wire import from_plain, pack, to_plain, unpack

if TYPE_CHECKING:
    from nexrl.services.inference.engines.builtin.service import BuiltinInference, Drawing

TOKEN_VARIABLE = "NEXRL_SERVICE_TOKEN"  # noqa: S105 - the name of a variable, not a token
# A thread that waits for the interpreter lock may hold the engine up for this long at each of the
# hundreds of operations of a step; the default of 5 ms halves the throughput of small models.
_SWITCH_INTERVAL_S = 0.0002


class ServerSettings(BaseModel):
    """The JSON that the server is started with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_folder: Path = Field(description="Hugging Face model folder with a tokenizer.")
    deterministic: bool = Field(False, description="A request's bits do not depend on others.")
    host: str = Field(
        "127.0.0.1", description="Address to listen on; beyond loopback a token is needed."
    )
    port: int = Field(0, ge=0, le=65535, description="Port; 0 lets the system choose.")
    service: InferenceServiceConfig = Field(
        InferenceServiceConfig(), description="Engine settings, as in the recipe."
    )


class InferenceServer:
    """HTTP handlers over one `BuiltinInference`, beside OpenAI's."""

    def __init__(self, inference: BuiltinInference, metrics: ServerMetrics) -> None:
        self._inference = inference
        self._metrics = metrics
        self._drawings: dict[str, Drawing] = {}

    def add_routes(self, app: web.Application) -> None:
        """Register every endpoint."""
        app.router.add_post(GENERATE_PATH, self.generate)
        app.router.add_post(ABORT_PATH, self.abort)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """The hot path of our own client: many calls, a frame whenever some of them have ended."""
        request_id, calls = unpack_generate(await request.read())
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        num_choices = sum(len(call.seeds) for call in calls)
        with self._metrics.request("generate", num_choices), self._inference.draw(calls) as drawing:
            self._drawings[request_id] = drawing
            try:
                await response.prepare(request)
                while answers := await drawing.answers():
                    self._metrics.failed_calls += sum(isinstance(a, Exception) for _, a in answers)
                    await response.write(pack_frame(answers))
            finally:
                del self._drawings[request_id]
        await response.write_eof()
        return response

    async def abort(self, request: web.Request) -> web.Response:
        """{"id": of a generate request, "calls": [index]}: nobody waits for these any more."""
        message = await _message(request)
        drawing = self._drawings.get(str(message.get("id")))
        if drawing is not None:  # it may just have ended
            drawing.abort(message.get("calls", ()))
        return _packed({})

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine works, 503 with the reason when it has stopped for good."""
        failure, version = self._inference.engine.failure, self._inference.engine.active_version
        status, code = ("ok", 200) if failure is None else ("failed", 503)
        body = {"status": status, "reason": failure, "version": str(version)}
        return web.json_response(body, status=code)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(text=self._metrics.text(), content_type="text/plain")


def add_control_routes(app: web.Application, engine: EngineControl, *, policy: str) -> None:
    """`EngineControl` as HTTP: each verb with what its message holds."""

    async def info(request: web.Request) -> web.Response:
        return web.json_response(to_plain(await engine.info()))

    async def score(message: Mapping[str, Any]) -> Mapping[str, FloatArray]:
        chunk = from_plain(RowChunk, message.get("chunk"))
        return {"logprobs": await engine.score(chunk, policy=message.get("policy", policy))}

    verbs: Mapping[str, Callable[[Mapping[str, Any]], Awaitable[Any]]] = {
        "pause": lambda message: engine.pause(message.get("mode", "keep")),
        "resume": lambda message: engine.resume(),
        "load_weights": lambda message: engine.load_weights(
            from_plain(WeightManifest, message.get("manifest"))
        ),
        "activate": lambda message: engine.activate(
            from_plain(PolicyVersion, message.get("version"))
        ),
        "score": score,
    }

    async def control(request: web.Request) -> web.Response:
        verb = verbs.get(request.match_info["verb"])
        if verb is None:
            raise web.HTTPNotFound(reason=f"no such control verb (accepted: {', '.join(verbs)})")
        return _packed(await verb(await _message(request)) or {})

    app.router.add_get("/control/info", info)
    app.router.add_post("/control/{verb}", control)


async def _message(request: web.Request) -> Mapping[str, Any]:
    """A control message: msgpack from our client, JSON from a person with curl."""
    body = await request.read()
    message = unpack(body) if request.content_type == CONTENT_TYPE else json.loads(body or b"{}")
    if not isinstance(message, dict):
        raise ConfigError(f"a control message is a mapping, got {type(message).__name__}")
    return message


def _packed(value: Any) -> web.Response:
    return web.Response(body=pack(value), content_type=CONTENT_TYPE)


def make_inference_app(
    inference: BuiltinInference,
    *,
    model: str,
    policy: str = DEFAULT_POLICY,
    token: str | None = None,
) -> web.Application:
    """The whole application over an engine that is already loaded."""
    app = make_app(token=token)
    metrics = ServerMetrics(inference.engine)
    InferenceServer(inference, metrics).add_routes(app)
    OpenAIEndpoints(inference, metrics, model=model, policy=policy).add_routes(app)
    add_control_routes(app, inference, policy=policy)
    return app


async def run_server(settings: ServerSettings, token: str | None) -> None:
    """Serve until SIGTERM, SIGINT or the launcher's end."""
    # Read when torch is imported, which is below. Threads that spin while they wait for each other
    # starve the trainer and the controller on the same cores, and are starved by them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # Before loading: a port in use is then reported at once.
    sock = bind(settings.host, settings.port, token=token, setting="service.inference_service port")
    from nexrl.services.inference.engines.builtin.service import BuiltinInference

    inference = await asyncio.to_thread(
        BuiltinInference,
        settings.model_folder,
        settings.service,
        deterministic=settings.deterministic,
    )
    try:
        app = make_inference_app(inference, model=settings.service.model, token=token)
        await serve(app, sock, name="inference")
    finally:
        await inference.aclose()


def main(arguments: list[str]) -> int:
    """Serve until told to stop; a configuration error is one line and exit code 2."""
    try:
        if len(arguments) != 1:
            raise ConfigError("usage: python -m nexrl.services.inference.server '<JSON settings>'")
        settings = ServerSettings.model_validate_json(arguments[0])
        asyncio.run(run_server(settings, os.environ.get(TOKEN_VARIABLE)))
    except ValidationError as error:
        print(f"inference server: settings: {error}", file=sys.stderr)  # noqa: T201 - the process's own stderr
        return 2
    except ConfigError as error:
        print(f"inference server: {error}", file=sys.stderr)  # noqa: T201 - the process's own stderr
        return 2
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
