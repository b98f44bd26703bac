"""The builtin engine behind HTTP: OpenAI's endpoints, our hot path, control, health and metrics.

Started by a launcher as `python -m nexrl.services.inference.server '<JSON>'`; prints a ready line
with its port and ends on SIGTERM. The engine, and torch with it, is imported when it is started.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nexrl.config.schema import InferenceServiceConfig
from nexrl.errors import ConfigError, NexRLError
from nexrl.services.http import bind, end_process, error_body, make_app, serve
from nexrl.services.inference.messages import (
    ABORT_PATH,
    CONTENT_TYPE,
    GENERATE_PATH,
    Call,
    pack_frame,
    unpack_generate,
)
from nexrl.services.inference.metrics import ServerMetrics
from nexrl.services.inference.openai_api import (
    ChatRequest,
    CompletionRequest,
    chat_logprobs,
    completion_logprobs,
    extensions,
    parse,
    stop_reason,
    usage,
    wire_finish_reason,
)
from nexrl.services.inference.seeds import choice_seeds
from nexrl.services.inference.streaming import stream_chunks
from nexrl.types import (
    Completion,
    IntArray,
    PolicyVersion,
    RowChunk,
    WeightManifest,
)
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
    """HTTP handlers over one `BuiltinInference`."""

    def __init__(self, inference: BuiltinInference, *, model: str, policy: str) -> None:
        self._inference = inference
        self._model = model
        self._policy = policy
        self._created = int(time.time())
        self._metrics = ServerMetrics(inference)
        self._drawings: dict[str, Drawing] = {}

    def add_routes(self, app: web.Application) -> None:
        """Register every endpoint."""
        app.router.add_post(GENERATE_PATH, self.generate)
        app.router.add_post(ABORT_PATH, self.abort)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/control/info", self.info)
        for verb in ("pause", "resume", "load_weights", "activate", "score"):
            app.router.add_post(f"/control/{verb}", getattr(self, verb))

    # --- drawing ----------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """The hot path of our own client: many calls, a frame whenever some of them have ended."""
        request_id, calls = unpack_generate(await request.read())
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        with self._metrics.request("generate", sum(len(call.seeds) for call in calls)):
            drawing = self._drawings[request_id] = self._inference.draw(calls)
            try:
                async with aclosing(drawing.answers()) as ended:
                    await response.prepare(request)
                    async for answers in ended:
                        self._metrics.failed_calls += sum(
                            isinstance(answer, Exception) for _, answer in answers
                        )
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

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's text completions; prompts as text or token ids, one or several."""
        asked = parse(CompletionRequest, await _json(request))
        self._check_model(asked.model)
        prompts = [
            self._inference.renderer.encode(p, add_special_tokens=asked.add_special_tokens)
            if isinstance(p, str)
            else np.asarray(p, np.int32)
            for p in asked.prompts
        ]
        return await self._answer(request, asked, prompts, asked.max_tokens, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's chat completions, through the model's own chat template."""
        asked = parse(ChatRequest, await _json(request))
        self._check_model(asked.model)
        prompt = self._inference.renderer.render(asked.messages)
        return await self._answer(request, asked, [prompt], asked.limit, chat=True)

    async def _answer(
        self,
        request: web.Request,
        asked: CompletionRequest | ChatRequest,
        prompts: list[IntArray],
        max_tokens: int | None,
        *,
        chat: bool,
    ) -> web.StreamResponse:
        if not prompts:
            raise ConfigError("prompt: an empty list has nothing to complete")
        sampling = asked.sampling(max_tokens)
        for prompt in prompts:
            self._inference.check(prompt, sampling, asked.n)
        endpoint = "chat" if chat else "completions"
        with self._metrics.request(endpoint, asked.n * len(prompts)):
            if asked.stream:
                if len(prompts) > 1:
                    raise ConfigError("stream: one prompt at a time can be streamed")
                chunks = stream_chunks(
                    self._inference, asked, prompts[0], sampling, head=self._head(chat, stream=True)
                )
                return await _send_events(request, chunks)
            calls = [
                Call(prompt, sampling, choice_seeds(sampling, asked.n), self._policy)
                for prompt in prompts
            ]
            drawn = await self._inference.generate_all(calls)
        completions = [completion for choices in drawn for completion in choices]
        body: dict[str, Any] = self._head(chat, stream=False)
        body["choices"] = [self._choice(asked, c, i, chat) for i, c in enumerate(completions)]
        body["usage"] = usage(
            sum(len(p) for p in prompts), sum(len(c.token_ids) for c in completions)
        )
        if asked.return_token_ids and chat:
            body["prompt_token_ids"] = prompts[0].tolist()
        return web.json_response(body)

    def _choice(
        self, asked: CompletionRequest | ChatRequest, completion: Completion, index: int, chat: bool
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": wire_finish_reason(completion.finish_reason),
            "stop_reason": stop_reason(
                completion, self._inference.renderer.decode(completion.token_ids), asked.stops
            ),
            "logprobs": None,
        }
        if chat:
            choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
        else:
            choice["text"] = completion.text
        if asked.wants_logprobs and completion.logprobs is not None:
            decode = self._inference.renderer.decode
            texts = [
                decode(completion.token_ids[i : i + 1], skip_special_tokens=False)
                for i in range(len(completion.token_ids))
            ]
            shape = chat_logprobs if chat else completion_logprobs
            choice["logprobs"] = shape(texts, completion.logprobs.tolist())
        if asked.return_token_ids:
            choice.update(extensions(completion))
            if not chat:
                choice["prompt_token_ids"] = completion.prompt_token_ids.tolist()
        return choice

    def _head(self, chat: bool, *, stream: bool) -> dict[str, Any]:
        kind = "chat.completion" if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}",
            "object": f"{kind}.chunk" if chat and stream else kind,
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": str(self._inference.active_version),
        }

    def _check_model(self, model: str) -> None:
        if model not in (self._model, self._policy):
            raise web.HTTPNotFound(
                reason=f"model {model!r} does not exist (served: {self._model!r})"
            )

    # --- about the server -------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.Response:
        """The one model there is."""
        card = {"id": self._model, "object": "model", "created": self._created, "owned_by": "nexrl"}
        return web.json_response({"object": "list", "data": [card]})

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine works, 503 with the reason when it has stopped for good."""
        failure = self._inference.failure
        status = "ok" if failure is None else "failed"
        return web.json_response(
            {"status": status, "reason": failure, "version": str(self._inference.active_version)},
            status=200 if failure is None else 503,
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(text=self._metrics.text(), content_type="text/plain")

    async def info(self, request: web.Request) -> web.Response:
        """What the engine is and can do."""
        return web.json_response(to_plain(await self._inference.info()))

    # --- control ----------------------------------------------------------------------------

    async def pause(self, request: web.Request) -> web.Response:
        """{"mode": keep | recompute | abort}"""
        await self._inference.pause((await _message(request)).get("mode", "keep"))
        return _packed({})

    async def resume(self, request: web.Request) -> web.Response:
        """{}"""
        await self._inference.resume()
        return _packed({})

    async def load_weights(self, request: web.Request) -> web.Response:
        """{"manifest": WeightManifest} -> LoadAck"""
        manifest = from_plain(WeightManifest, (await _message(request)).get("manifest"))
        return _packed(await self._inference.load_weights(manifest))

    async def activate(self, request: web.Request) -> web.Response:
        """{"version": PolicyVersion}"""
        version = from_plain(PolicyVersion, (await _message(request)).get("version"))
        await self._inference.activate(version)
        return _packed({})

    async def score(self, request: web.Request) -> web.Response:
        """{"chunk": RowChunk, "policy": name} -> {"logprobs": [N]}"""
        message = await _message(request)
        chunk = from_plain(RowChunk, message.get("chunk"))
        scores = await self._inference.score(chunk, policy=message.get("policy", self._policy))
        return _packed({"logprobs": scores})


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise ConfigError(f"the request body is not JSON: {error}") from error


async def _message(request: web.Request) -> Mapping[str, Any]:
    """A control message: msgpack from our client, JSON from a person with curl."""
    body = await request.read()
    message = unpack(body) if request.content_type == CONTENT_TYPE else json.loads(body or b"{}")
    if not isinstance(message, dict):
        raise ConfigError(f"a control message is a mapping, got {type(message).__name__}")
    return message


def _packed(value: Any) -> web.Response:
    return web.Response(body=pack(value), content_type=CONTENT_TYPE)


async def _send_events(
    request: web.Request, chunks: AsyncGenerator[dict[str, Any], None]
) -> web.StreamResponse:
    """Server-sent events; an error after the first becomes the last event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    except NexRLError as error:
        await response.write(b"data: " + json.dumps(error_body(error)).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def make_inference_app(
    inference: BuiltinInference, *, model: str, policy: str = "actor", token: str | None = None
) -> web.Application:
    """The whole application over an engine that is already loaded."""
    app = make_app(token=token)
    InferenceServer(inference, model=model, policy=policy).add_routes(app)
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
