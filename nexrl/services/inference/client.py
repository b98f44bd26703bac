"""Clients of inference: the hot path to our own server, and any OpenAI-compatible URL.

Stands between a rollout worker and an engine. `HttpInferenceService` speaks msgpack to our server
and joins calls for the same prompt; `OpenAIInferenceClient` (in `openai_client.py`) speaks
OpenAI's JSON to everything else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nexrl.errors import InfrastructureError
from nexrl.services.http import HttpClient
from nexrl.services.inference.messages import (
    CONTENT_TYPE,
    GENERATE_PATH,
    pack_generate,
    unpack_completions,
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

_Key = tuple[bytes, Sampling, str]


@dataclass(eq=False, slots=True)
class _Joined:
    """Calls for the same prompt, sampling and policy that go out as one request."""

    prompt: Prompt
    sampling: Sampling
    policy: str
    seeds: list[int] = field(default_factory=list)
    callers: list[tuple[int, int, asyncio.Future[list[Completion]]]] = field(default_factory=list)
    """(first choice, number of choices, where the caller waits)."""


class HttpInferenceService:
    """`InferenceService` against our own server.

    Invariants: `generate` calls of one tick of the event loop that ask for the same prompt with
    the same sampling become one HTTP request with a seed per choice; each caller gets its own
    choices and its own error, and an HTTP request whose callers have all gone is cancelled.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = DEFAULT_POLICY,
        token: str | None = None,
        request_deadline_s: float = 120.0,
        connect_deadline_s: float = 30.0,
        control_deadline_s: float = 600.0,
    ) -> None:
        self.model = model
        self._control_s = control_deadline_s
        self._http = HttpClient(
            url.rstrip("/").removesuffix("/v1"),
            name="inference",
            token=token,
            connect_deadline_s=connect_deadline_s,
            request_deadline_s=request_deadline_s,
        )
        self._joined: dict[_Key, _Joined] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- drawing ----------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = DEFAULT_POLICY
    ) -> list[Completion]:
        """Draw n completions of one prompt, in choice order; see `InferenceClient.generate`."""
        seeds = choice_seeds(sampling, n)
        bare = replace(sampling, seed=None, seeds=())
        key = (prompt.token_ids.tobytes(), bare, policy)
        loop = asyncio.get_running_loop()
        joined = self._joined.get(key)
        if joined is None:
            if not self._joined:
                loop.call_soon(self._send_joined)
            joined = self._joined[key] = _Joined(prompt, bare, policy)
        future: asyncio.Future[list[Completion]] = loop.create_future()
        joined.callers.append((len(joined.seeds), n, future))
        joined.seeds.extend(seeds)
        return await future

    def _send_joined(self) -> None:
        """The tick is over: one task for each distinct request."""
        waiting, self._joined = self._joined, {}
        for joined in waiting.values():
            if all(future.done() for _, _, future in joined.callers):
                continue
            task = asyncio.get_running_loop().create_task(self._send(joined))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            cancel_if_unwanted = _cancel_when_all_gone(task, joined)
            for _, _, future in joined.callers:
                future.add_done_callback(cancel_if_unwanted)

    async def _send(self, joined: _Joined) -> None:
        try:
            body = pack_generate(
                joined.prompt.token_ids, joined.sampling, joined.seeds, joined.policy
            )
            answer = await self._http.request(
                "POST", GENERATE_PATH, body=body, content_type=CONTENT_TYPE
            )
            completions = unpack_completions(answer, joined.prompt.token_ids)
            if len(completions) != len(joined.seeds):
                raise InfrastructureError(
                    f"inference: asked for {len(joined.seeds)} choices, got {len(completions)}"
                )
        except asyncio.CancelledError:
            for _, _, future in joined.callers:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - every caller gets the error where it waits
            for _, _, future in joined.callers:
                if not future.done():
                    future.set_exception(error)
            return
        for first, n, future in joined.callers:
            if not future.done():
                future.set_result(completions[first : first + n])

    # --- steering ---------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        """What the server says of its engine."""
        answer = await self._http.request_json("GET", "/control/info")
        return from_plain(EngineInfo, answer)

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

    async def _control(self, verb: str, body: Mapping[str, Any]) -> Any:
        answer = await self._http.request(
            "POST",
            f"/control/{verb}",
            body=pack(body),
            content_type=CONTENT_TYPE,
            deadline_s=self._control_s,
        )
        return unpack(answer)

    async def metrics(self) -> str:
        """The server's Prometheus text."""
        return (await self._http.request("GET", "/metrics")).decode()

    async def health(self) -> Mapping[str, Any]:
        """The server's health; ServiceError when it is not well."""
        health: Mapping[str, Any] = json.loads(await self._http.request("GET", "/health"))
        return health

    async def aclose(self) -> None:
        """Cancel what is under way and close all connections; idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()


def _cancel_when_all_gone(
    task: asyncio.Task[None], joined: _Joined
) -> Callable[[asyncio.Future[list[Completion]]], None]:
    def check(_: asyncio.Future[list[Completion]]) -> None:
        if all(future.cancelled() for _, _, future in joined.callers):
            task.cancel()

    return check
