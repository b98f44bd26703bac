"""Our client against our server: joined calls, many at once, lost engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from nexrl.errors import (
    ConfigError,
    ContextOverflowError,
    DeadlineError,
    InvariantError,
    ServiceError,
)
from nexrl.services.inference.client import HttpInferenceService
from nexrl.services.inference.engines.builtin.service import BuiltinInference
from nexrl.services.inference.messages import (
    LENGTH_BYTES,
    Call,
    pack_frame,
    pack_generate,
    unpack_frame,
    unpack_generate,
)
from nexrl.testing.instant_inference import InstantInference
from nexrl.types import Completion, PolicyVersion, Prompt, Sampling, VersionSpan

MakeEngine = Callable[..., BuiltinInference]
PROMPT = Prompt(token_ids=np.array([3, 4, 5, 6], np.int32))
SAMPLING = Sampling(max_tokens=5, seed=1)


async def num_requests(service: HttpInferenceService) -> int:
    found = re.search(
        r'requests_total\{endpoint="generate",outcome="ok"\} (\d+)', await service.metrics()
    )
    return int(found.group(1)) if found else 0


async def test_calls_of_one_tick_become_one_request_and_never_mix(
    make_engine: MakeEngine, serve: Any
) -> None:
    """FR-172: answers are never mixed between callers."""
    builtin = make_engine()
    calls = [
        (
            Prompt(token_ids=np.arange(3, 4 + i % 5, dtype=np.int32)),
            Sampling(max_tokens=3 + i, seed=i),
        )
        for i in range(12)
    ]
    async with serve(builtin) as service:
        joined = await asyncio.gather(
            *(service.generate(p, sampling=s, n=1 + i % 3) for i, (p, s) in enumerate(calls))
        )
        assert await num_requests(service) == 1
        for i, ((prompt, sampling), answer) in enumerate(zip(calls, joined, strict=True)):
            alone = await builtin.generate(prompt, sampling=sampling, n=1 + i % 3)
            assert [c.seed for c in answer] == [c.seed for c in alone]
            for a, b in zip(answer, alone, strict=True):
                assert np.array_equal(a.token_ids, b.token_ids)
                assert np.array_equal(a.prompt_token_ids, prompt.token_ids)


async def test_a_short_draw_returns_before_a_long_one_of_the_same_request(
    make_engine: MakeEngine, serve: Any
) -> None:
    builtin = make_engine(max_batch=1)
    order: list[int] = []

    async def draw(service: HttpInferenceService, max_tokens: int) -> None:
        await service.generate(PROMPT, sampling=Sampling(max_tokens=max_tokens, temperature=0.0))
        order.append(max_tokens)
        if len(order) == 1:
            await service.pause("keep")
            assert builtin.engine.num_waiting + builtin.engine.num_running > 0
            await service.resume()

    async with serve(builtin) as service:
        await asyncio.gather(draw(service, 1), draw(service, 60), draw(service, 61))
        assert await num_requests(service) == 1
    assert order == [1, 60, 61]


async def test_an_error_in_one_call_leaves_the_others_of_its_request_alone(
    make_engine: MakeEngine, serve: Any
) -> None:
    builtin = make_engine(max_context=8)
    async with serve(builtin) as service:
        long = Prompt(token_ids=np.full(9, 3, np.int32))
        answers: list[object] = await asyncio.gather(
            service.generate(long, sampling=SAMPLING),
            service.generate(PROMPT, sampling=SAMPLING, policy="critic"),
            service.generate(PROMPT, sampling=SAMPLING),
            return_exceptions=True,
        )
        assert await num_requests(service) == 1
        assert "failed_calls_total 2" in await service.metrics()
    kinds = (ContextOverflowError, ConfigError, list)
    assert [isinstance(a, kind) for a, kind in zip(answers, kinds, strict=True)] == [True] * 3


async def test_an_error_reaches_every_caller_with_its_kind(
    make_engine: MakeEngine, serve: Any
) -> None:
    builtin = make_engine(max_context=8)
    async with serve(builtin) as service:
        long = Prompt(token_ids=np.full(9, 3, np.int32))
        errors = await asyncio.gather(
            *(service.generate(long, sampling=SAMPLING) for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(e, ContextOverflowError) for e in errors)
        stranger = HttpInferenceService(service._http.base_url, token="wrong")
        with pytest.raises(ServiceError, match="401"):
            await stranger.generate(PROMPT, sampling=SAMPLING)
        await stranger.aclose()


@pytest.mark.parametrize("num_kept", [0, 1])
async def test_what_nobody_waits_for_any_more_frees_the_engine(
    make_engine: MakeEngine, serve: Any, num_kept: int
) -> None:
    """All callers gone: the connection is closed. Some of them: an abort message names theirs."""
    builtin = make_engine()
    async with serve(builtin) as service:
        await service.pause("keep")
        calls = [asyncio.create_task(service.generate(PROMPT, sampling=SAMPLING)) for _ in range(3)]
        while builtin.engine.num_waiting < 3:
            await service.info()
        for call in calls[num_kept:]:
            call.cancel()
        while builtin.engine.num_waiting > num_kept:
            await service.info()
        await service.resume()
        for call in calls[:num_kept]:
            assert len(await call) == 1
        assert (builtin.engine.counts.drawn_tokens > 0) == bool(num_kept)


# --- many at once -----------------------------------------------------------------------------


class Gate:
    """A server that answers nobody until `num_expected` calls have come."""

    def __init__(self, num_expected: int) -> None:
        self._inner = InstantInference()
        self._num_expected = num_expected
        self._everybody = asyncio.Event()
        self.num_calls = self.num_requests = 0

    async def generate(self, request: web.Request) -> web.Response:
        _, calls = unpack_generate(await request.read())
        self.num_requests += 1
        self.num_calls += len(calls)
        if self.num_calls >= self._num_expected:
            self._everybody.set()
        await self._everybody.wait()
        return web.Response(
            body=pack_frame([(i, await self._draw(c)) for i, c in enumerate(calls)])
        )

    async def _draw(self, call: Call) -> list[Completion]:
        return await self._inner.generate(
            Prompt(token_ids=call.prompt),
            sampling=replace(call.sampling, seeds=call.seeds),
            n=len(call.seeds),
        )


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served_by(handler: Handler) -> AsyncIterator[HttpInferenceService]:
    app = web.Application()
    app.router.add_post("/generate", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    service = HttpInferenceService(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield service
    finally:
        await service.aclose()
        await runner.cleanup()


async def test_a_wave_of_1024_sessions_has_no_error() -> None:
    """FR-148: no pool of 100 connections, no proxy, no short connect deadline."""
    gate = Gate(1024)

    async def session(service: HttpInferenceService, number: int) -> int:
        prompt = Prompt(token_ids=np.array([number], np.int32))
        turns = [await service.generate(prompt, sampling=SAMPLING) for _ in range(3)]
        return len(turns)

    async with served_by(gate.generate) as service:
        sessions = []
        for i in range(1024):
            sessions.append(asyncio.create_task(session(service, i)))
            for _ in range(3):  # each in a tick of its own, so with a request of its own
                await asyncio.sleep(0)
        assert await asyncio.gather(*sessions) == [3] * 1024
    assert gate.num_requests >= 1024


async def test_thousands_of_calls_of_one_tick_go_out_in_several_requests() -> None:
    gate = Gate(1)
    async with served_by(gate.generate) as service:
        calls = (service.generate(PROMPT, sampling=SAMPLING, n=3) for _ in range(1000))
        assert [len(a) for a in await asyncio.gather(*calls)] == [3] * 1000
    assert gate.num_requests == 3


# --- lost engines -----------------------------------------------------------------------------


@asynccontextmanager
async def server_process(
    model: Path, *, token: str = ""
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    settings = {"model_folder": str(model), "service": {"num_threads": 1}}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "nexrl.services.inference.server",
        json.dumps(settings),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "NEXRL_SERVICE_TOKEN": token},
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        yield process, f"http://127.0.0.1:{ready['port']}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_an_engine_that_dies_in_mid_request_is_a_retryable_error_at_once(
    micro_model: Path,
) -> None:
    async with server_process(micro_model, token="t") as (process, url):
        service = HttpInferenceService(url, token="t")
        await service.pause("keep")
        calls = [
            asyncio.create_task(service.generate(PROMPT, sampling=Sampling(max_tokens=i + 1)))
            for i in range(4)
        ]
        while "nexrl_inference_waiting 4" not in (text := await service.metrics()):
            assert "nexrl_inference_healthy 1" in text
        process.kill()
        errors = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert all(isinstance(e, ServiceError) and e.retryable for e in errors)
        with pytest.raises(ServiceError) as refused:
            await service.generate(PROMPT, sampling=SAMPLING)
        assert refused.value.retryable
        await service.aclose()


async def test_a_server_ends_cleanly_on_sigterm(micro_model: Path) -> None:
    async with server_process(micro_model) as (process, url):
        service = HttpInferenceService(url)
        assert len(await service.generate(PROMPT, sampling=SAMPLING)) == 1
        await service.aclose()
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ('{"model_folder": "x", "portt": 1}', "portt"),
        ('{"model_folder": "x", "host": "0.0.0.0"}', "needs a token"),
        ('{"model_folder": "no/such/folder"}', "no/such/folder"),
    ],
)
async def test_settings_that_cannot_work_are_one_line_and_exit_code_2(
    settings: str, text: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "nexrl.services.inference.server",
        settings,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert text in stderr.decode()
    assert "Traceback" not in stderr.decode()


async def test_an_engine_that_does_not_answer_meets_the_deadline() -> None:
    async with served_by(Gate(2).generate) as service:
        impatient = HttpInferenceService(service._http.base_url, request_deadline_s=0.05)
        with pytest.raises(DeadlineError, match=r"0\.05 s"):
            await impatient.generate(PROMPT, sampling=SAMPLING)
        await impatient.aclose()


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "ended"])
async def test_an_answer_that_breaks_off_fails_those_who_still_wait(cut: bool) -> None:
    async def one_frame(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(pack_frame([(0, [make_drawn([4], [-1.0])])]) + b"\x09")
        if cut and request.transport is not None:
            request.transport.abort()
        return response

    async with served_by(one_frame) as service:
        first, *rest = await asyncio.gather(
            *(service.generate(PROMPT, sampling=SAMPLING) for _ in range(3)), return_exceptions=True
        )
        assert isinstance(first, list)
        assert all(isinstance(e, ServiceError) and e.retryable for e in rest)


async def test_closing_the_client_leaves_nobody_waiting() -> None:
    async with served_by(Gate(9).generate) as service:
        calls = [asyncio.create_task(service.generate(PROMPT, sampling=SAMPLING)) for _ in range(2)]
        await asyncio.sleep(0)
        await service.aclose()
        done, _ = await asyncio.wait(calls, timeout=5)
        assert all(call.cancelled() for call in done)
        assert len(done) == 2


# --- messages ---------------------------------------------------------------------------------


def make_drawn(tokens: list[int], logprobs: list[float] | None) -> Completion:
    versions = tuple(
        VersionSpan(start=i, end=i + 1, version=PolicyVersion(number=i)) for i in range(len(tokens))
    )
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        versions=versions,
        text="é",
        finish_reason="abort",
        prompt_token_ids=PROMPT.token_ids,
        temperature=0.5,
        logprob_kind="raw",
        seed=(1 << 63) - 1,
        raw_finish_reason="abort",
    )


def make_call(*seeds: int) -> Call:
    sampling = Sampling(max_tokens=9, top_k=3, stop=("a", "b"), stop_token_ids=(4,))
    return Call(PROMPT.token_ids, sampling, seeds, "actor")


@pytest.mark.parametrize("logprobs", [[-0.1, -2.5], None])
def test_answers_survive_the_wire_bit_by_bit(logprobs: list[float] | None) -> None:
    sent = [make_drawn([4, 5], logprobs), make_drawn([], None if logprobs is None else [])]
    calls = [make_call(1), make_call(1, 2)]
    frame = pack_frame([(1, sent), (0, DeadlineError("too late"))])[LENGTH_BYTES:]
    (index, error), (other, received) = unpack_frame(frame, calls, "http://there")
    assert (index, other) == (0, 1)
    assert isinstance(error, DeadlineError)
    assert "http://there answered 504: too late" in str(error)
    assert isinstance(received, list)
    for a, b in zip(sent, received, strict=True):
        assert a.token_ids.tobytes() == b.token_ids.tobytes()
        assert (a.logprobs is None) == (b.logprobs is None)
        assert (a.versions, a.text, a.seed) == (b.versions, b.text, b.seed)
        assert (a.temperature, a.logprob_kind) == (b.temperature, b.logprob_kind)
        assert a.finish_reason == b.finish_reason


def test_a_request_survives_the_wire() -> None:
    sent = [make_call(7, 8), replace(make_call(9), policy="critic")]
    request_id, received = unpack_generate(pack_generate("me", sent))
    assert request_id == "me"
    for a, b in zip(sent, received, strict=True):
        assert np.array_equal(a.prompt, b.prompt)
        assert (a.sampling, a.seeds, a.policy) == (b.sampling, b.seeds, b.policy)


def test_an_answer_with_too_few_choices_is_an_invariant_error() -> None:
    frame = pack_frame([(0, [make_drawn([4], None)])])[LENGTH_BYTES:]
    with pytest.raises(InvariantError, match="1 choices for 2 seeds"):
        unpack_frame(frame, [make_call(1, 2)], "")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03"])
def test_a_damaged_message_is_an_invariant_error(body: bytes) -> None:
    with pytest.raises(InvariantError):
        unpack_generate(body)
    with pytest.raises(InvariantError):
        unpack_frame(body, [make_call(1)], "")
