"""Clients of inference: the hot path to our own server, and any OpenAI-compatible URL.

Stands between a rollout worker and an engine. `HttpInferenceService` speaks msgpack to our server
and sends the calls of one tick together; `OpenAIInferenceClient` (in `openai_client.py`) speaks
OpenAI's JSON to everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np

from nexrl.errors import NexRLError, ServiceError
from nexrl.services.http import HttpClient
from nexrl.services.inference.messages import (
    ABORT_PATH,
    CONTENT_TYPE,
    GENERATE_PATH,
    LENGTH_BYTES,
    Call,
    pack_generate,
    unpack_frame,
)
from nexrl.services.inference.openai_client import OpenAIInferenceClient
from nexrl.services.inference.seeds import choice_seeds
from nexrl.types import (
    DEFAULT_POLICY,
    Completion,
    EngineInfo,
    FloatArray,
    LoadAck,
    PauseMode,
    PolicyVersion,
    Prompt,
    RowChunk,
    Sampling,
    WeightManifest,
)
from nexrl.wire import from_plain, pack, unpack

__all__ = ["HttpInferenceService", "OpenAIInferenceClient"]

_MOST_CHOICES = 1024
_MOST_TOKENS = 1 << 20


@dataclass(eq=False, slots=True)
class _Waiting:
    """A caller: what it asks for and where it waits."""

    call: Call
    future: asyncio.Future[list[Completion]]
    exchange: _Exchange | None = None
    """The request it went out with."""


@dataclass(eq=False, slots=True)
class _Exchange:
    """One HTTP request and its streamed answer."""

    callers: list[_Waiting]
    request_id: str = field(default_factory=lambda: uuid4().hex)
    task: asyncio.Task[None] | None = None
    accepted: bool = False
    """The server knows the request, so single calls of it can be aborted."""
    abandoned: list[int] = field(default_factory=list)
    """Calls whose callers have gone and that the server was not told of yet."""


class HttpInferenceService:
    """`InferenceService` against our own server.

    Invariants: `generate` calls of one tick of the event loop go out together, in as few HTTP
    requests as their bounded size allows; each caller gets its own choices when they have ended, or
    its own error. An abandoned call is aborted by a message, a request whose callers have all gone
    by closing its connection.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        request_deadline_s: float = 120.0,
        connect_deadline_s: float = 30.0,
        control_deadline_s: float = 600.0,
    ) -> None:
        self._control_s = control_deadline_s
        self._http = HttpClient(
            url.rstrip("/").removesuffix("/v1"),
            name="inference",
            token=token,
            connect_deadline_s=connect_deadline_s,
            request_deadline_s=request_deadline_s,
        )
        self._new: list[_Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # --- drawing ----------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = DEFAULT_POLICY
    ) -> list[Completion]:
        """Draw n completions of one prompt, in choice order; see `InferenceClient.generate`."""
        loop = asyncio.get_running_loop()
        call = Call(prompt.token_ids, sampling, choice_seeds(sampling, n), policy)
        caller = _Waiting(call, loop.create_future())
        if not self._new:
            loop.call_soon(self._send_new)
        self._new.append(caller)
        try:
            return await caller.future
        except asyncio.CancelledError:
            self._abandon(caller)
            raise

    def _send_new(self) -> None:
        """The tick is over: everything that was asked for goes out."""
        waiting = [caller for caller in self._new if not caller.future.done()]
        self._new = []
        for callers in _bounded(waiting):
            exchange = _Exchange(callers)
            for caller in callers:
                caller.exchange = exchange
            exchange.task = self._start(self._receive(exchange))
            exchange.task.add_done_callback(partial(_settle_rest, exchange))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _receive(self, exchange: _Exchange) -> None:
        """Send the request and settle callers frame by frame, until the answer ends."""
        calls = [caller.call for caller in exchange.callers]
        body = pack_generate(exchange.request_id, calls)
        async with self._http.open(
            "POST", GENERATE_PATH, body=body, content_type=CONTENT_TYPE
        ) as response:
            exchange.accepted = True
            self._send_aborts(exchange)
            read = response.content.readexactly
            while True:
                try:
                    frame = await read(int.from_bytes(await read(LENGTH_BYTES), "little"))
                except asyncio.IncompleteReadError:
                    return
                for index, answer in unpack_frame(frame, calls, self._http.base_url):
                    _settle(exchange.callers[index].future, answer)

    def _abandon(self, caller: _Waiting) -> None:
        """Free what the server holds for a caller that has gone."""
        exchange = caller.exchange
        if exchange is None or exchange.task is None or exchange.task.done():
            return
        if all(other.future.done() for other in exchange.callers):
            exchange.task.cancel()
            return
        if exchange.accepted and not exchange.abandoned:
            asyncio.get_running_loop().call_soon(self._send_aborts, exchange)
        exchange.abandoned.append(exchange.callers.index(caller))

    def _send_aborts(self, exchange: _Exchange) -> None:
        indices, exchange.abandoned = exchange.abandoned, []
        if indices:
            self._start(self._abort({"id": exchange.request_id, "calls": indices}))

    async def _abort(self, message: Mapping[str, Any]) -> None:
        # A server that cannot be told has lost the request too, and its callers learn of that.
        with suppress(NexRLError):
            await self._post(ABORT_PATH, message)

    # --- steering ---------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        """What the server says of its engine."""
        return from_plain(EngineInfo, await self._http.request_json("GET", "/control/info"))

    async def pause(self, mode: PauseMode) -> None:
        """See `EngineControl.pause`."""
        await self._control("pause", {"mode": mode})

    async def resume(self) -> None:
        """Draw tokens again."""
        await self._control("resume", {})

    async def load_weights(self, manifest: WeightManifest) -> LoadAck:
        """Load a publication from a folder that the server can read."""
        return from_plain(LoadAck, await self._control("load_weights", {"manifest": manifest}))

    async def activate(self, version: PolicyVersion) -> None:
        """See `EngineControl.activate`."""
        await self._control("activate", {"version": version})

    async def score(self, chunk: RowChunk, *, policy: str = DEFAULT_POLICY) -> FloatArray:
        """See `EngineControl.score`."""
        answer = await self._control("score", {"chunk": chunk, "policy": policy})
        return np.asarray(answer["logprobs"], np.float32)

    async def _control(self, verb: str, message: Mapping[str, Any]) -> Any:
        return await self._post(f"/control/{verb}", message, self._control_s)

    async def _post(
        self, path: str, message: Mapping[str, Any], deadline_s: float | None = None
    ) -> Any:
        body = pack(message)
        return unpack(
            await self._http.request(
                "POST", path, body=body, content_type=CONTENT_TYPE, deadline_s=deadline_s
            )
        )

    async def metrics(self) -> str:
        """The server's Prometheus text."""
        return (await self._http.request("GET", "/metrics")).decode()

    async def aclose(self) -> None:
        """Cancel what is under way and close all connections; idempotent."""
        for caller in self._new:
            caller.future.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()


def _bounded(callers: Iterable[_Waiting]) -> Iterator[list[_Waiting]]:
    """In order, in parts of bounded size, so that no request and no frame grows without limit."""
    part: list[_Waiting] = []
    choices = tokens = 0
    for caller in callers:
        choices += len(caller.call.seeds)
        tokens += len(caller.call.prompt)
        if part and (choices > _MOST_CHOICES or tokens > _MOST_TOKENS):
            yield part
            part, choices, tokens = [], len(caller.call.seeds), len(caller.call.prompt)
        part.append(caller)
    if part:
        yield part


def _settle(
    future: asyncio.Future[list[Completion]], answer: list[Completion] | BaseException
) -> None:
    if future.done():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _settle_rest(exchange: _Exchange, task: asyncio.Task[None]) -> None:
    """A request that has ended, even one cancelled before it began, leaves nobody waiting."""
    for caller in exchange.callers:
        if task.cancelled():
            caller.future.cancel()
        else:
            early = ServiceError("inference: the answer ended early", retryable=True)
            _settle(caller.future, task.exception() or early)
