"""OpenAI's endpoints over the builtin engine: completions, chat and models, whole or streamed.

Stands between `openai_api.py`, which knows the shapes, and the engine, which draws. Part of the
server in `server.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from aiohttp import web

from nexrl.errors import ConfigError, NexRLError
from nexrl.services.http import error_body
from nexrl.services.inference.engines.builtin.request import TokenEvent
from nexrl.services.inference.engines.builtin.stop_text import StreamedText
from nexrl.services.inference.messages import Call
from nexrl.services.inference.metrics import ServerMetrics
from nexrl.services.inference.openai_api import (
    ChatRequest,
    CompletionRequest,
    R,
    extensions,
    parse,
    stop_reason,
    usage,
    wire_finish_reason,
)
from nexrl.services.inference.seeds import choice_seeds
from nexrl.types import Completion, IntArray

if TYPE_CHECKING:
    from nexrl.services.inference.engines.builtin.service import BuiltinInference

Asked = CompletionRequest | ChatRequest


class OpenAIEndpoints:
    """Handlers of `/v1/...`; whatever cannot be done as asked is refused before anything runs."""

    def __init__(
        self, inference: BuiltinInference, metrics: ServerMetrics, *, model: str, policy: str
    ) -> None:
        self._inference = inference
        self._metrics = metrics
        self._model = model
        self._policy = policy
        self._created = int(time.time())

    def add_routes(self, app: web.Application) -> None:
        """Register every endpoint."""
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)

    async def models(self, request: web.Request) -> web.Response:
        """The one model there is."""
        card = {"id": self._model, "object": "model", "created": self._created, "owned_by": "nexrl"}
        return web.json_response({"object": "list", "data": [card]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's text completions; prompts as text or token ids, one or several."""
        asked = await self._read(CompletionRequest, request)
        prompts = [
            self._inference.renderer.encode(p, add_special_tokens=asked.add_special_tokens)
            if isinstance(p, str)
            else np.asarray(p, np.int32)
            for p in asked.prompts
        ]
        return await self._answer(request, asked, prompts)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """OpenAI's chat completions, through the model's own chat template."""
        asked = await self._read(ChatRequest, request)
        return await self._answer(request, asked, [self._inference.renderer.render(asked.messages)])

    async def _read(self, kind: type[R], request: web.Request) -> R:
        try:
            body = json.loads(await request.read())
        except ValueError as error:
            raise ConfigError(f"the request body is not JSON: {error}") from error
        asked = parse(kind, body)
        if asked.model not in (self._model, self._policy):
            raise web.HTTPNotFound(
                reason=f"model {asked.model!r} does not exist (served: {self._model!r})"
            )
        return asked

    async def _answer(
        self, request: web.Request, asked: Asked, prompts: Sequence[IntArray]
    ) -> web.StreamResponse:
        if not prompts:
            raise ConfigError("prompt: an empty list has nothing to complete")
        if asked.stream and len(prompts) > 1:
            raise ConfigError("stream: one prompt at a time can be streamed")
        sampling = asked.sampling()
        seeds = [choice_seeds(sampling, asked.n) for _ in prompts]
        calls = [Call(p, sampling, s, self._policy) for p, s in zip(prompts, seeds, strict=True)]
        for call in calls:
            self._inference.new_request(call)
        body: dict[str, Any] = {
            "id": f"{asked.id_prefix}-{uuid4().hex}",
            "object": asked.object_name,
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": str(self._inference.engine.active_version),
        }
        with self._metrics.request(asked.endpoint, asked.n * len(prompts)):
            if asked.stream:
                return await _send_events(request, self._chunks(asked, calls[0], body))
            drawn = await self._inference.generate_all(calls)
        completions = [completion for choices in drawn for completion in choices]
        body["choices"] = [self._whole(asked, i, c) for i, c in enumerate(completions)]
        body["usage"] = usage(
            sum(len(p) for p in prompts), sum(len(c.token_ids) for c in completions)
        )
        if asked.return_token_ids and isinstance(asked, ChatRequest):
            body["prompt_token_ids"] = prompts[0].tolist()
        return web.json_response(body)

    def _whole(self, asked: Asked, index: int, completion: Completion) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""
        choice = self._end(asked, index, completion, completion.text)
        if completion.logprobs is not None:
            choice |= self._logprobs(asked, completion.token_ids, completion.logprobs.tolist())
        if asked.return_token_ids:
            choice |= extensions(completion)
            if isinstance(asked, CompletionRequest):
                choice["prompt_token_ids"] = completion.prompt_token_ids.tolist()
        return choice

    async def _chunks(
        self, asked: Asked, call: Call, head: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """One chunk for each token, one with the finish reason for each choice, then the usage."""
        texts = [StreamedText(self._inference.renderer.decode, asked.stops) for _ in call.seeds]
        num_drawn = 0
        if isinstance(asked, ChatRequest):
            for index in range(asked.n):
                opening = {"delta": {"role": "assistant", "content": ""}}
                yield {**head, "choices": [_choice(asked, index, "") | opening]}
        async with aclosing(self._inference.stream(call)) as events:
            async for event in events:
                if event.choice is None:
                    continue
                text = texts[event.choice]
                if isinstance(event, TokenEvent):
                    num_drawn += 1
                    choice = _choice(asked, event.choice, text.add(event.token_id))
                    token = np.array([event.token_id], np.int32)
                    choice |= self._logprobs(asked, token, [event.logprob])
                    if asked.return_token_ids:
                        choice["token_ids"] = [event.token_id]
                else:
                    completion = self._inference.completion(event.request.choices[event.choice])
                    rest = text.rest(completion.text)
                    choice = self._end(asked, event.choice, completion, rest)
                yield {**head, "choices": [choice]}
        if asked.stream_options is not None and asked.stream_options.include_usage:
            yield {**head, "choices": [], "usage": usage(len(call.prompt), num_drawn)}

    def _end(self, asked: Asked, index: int, completion: Completion, text: str) -> dict[str, Any]:
        """A choice that says why it ended."""
        full_text = self._inference.renderer.decode(completion.token_ids)
        return _choice(asked, index, text) | {
            "finish_reason": wire_finish_reason(completion.finish_reason),
            "stop_reason": stop_reason(completion, full_text, asked.stops),
        }

    def _logprobs(
        self, asked: Asked, token_ids: IntArray, logprobs: Sequence[float]
    ) -> dict[str, Any]:
        """The field of a choice, when it is asked for."""
        if not asked.wants_logprobs:
            return {}
        decode = self._inference.renderer.decode
        texts = [
            decode(token_ids[i : i + 1], skip_special_tokens=False) for i in range(len(token_ids))
        ]
        return {"logprobs": asked.shape_logprobs(texts, logprobs)}


def _choice(asked: Asked, index: int, text: str) -> dict[str, Any]:
    return {"index": index, **asked.content(text), "finish_reason": None, "logprobs": None}


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
