"""Our client against our server: joined calls, many at once, lost engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from nexrl.config.schema import InferenceServiceConfig
from nexrl.errors import ContextOverflowError, DeadlineError, InvariantError, ServiceError
from nexrl.services.inference.client import HttpInferenceService
from nexrl.services.inference.engines.builtin.service import BuiltinInference
from nexrl.services.inference.messages import (
    pack_completions,
    pack_generate,
    unpack_completions,
    unpack_generate,
)
from nexrl.testing.contracts.inference import same_draw
from nexrl.testing.instant_inference import InstantInference
from nexrl.types import Completion, PolicyVersion, Prompt, Sampling, VersionSpan

PROMPT = Prompt(token_ids=np.array([3, 4, 5, 6], np.int32))
SAMPLING = Sampling(max_tokens=5, seed=1)


async def num_requests(service: HttpInferenceService) -> int:
    found = re.search(
        r'requests_total\{endpoint="generate",outcome="ok"\} (\d+)', await service.metrics()
    )
    return int(found.group(1)) if found else 0


async def test_calls_of_one_tick_for_one_prompt_become_one_request(
    micro_model: Path, serve: Any
) -> None:
    builtin = BuiltinInference(micro_model)
    async with serve(builtin) as service:
        seeds = range(8)
        joined = await asyncio.gather(
            *(service.generate(PROMPT, sampling=Sampling(max_tokens=5, seed=s)) for s in seeds)
        )
        assert await num_requests(service) == 1
        for seed, (completion,) in zip(seeds, joined, strict=True):
            (alone,) = await builtin.generate(PROMPT, sampling=Sampling(max_tokens=5, seed=seed))
            assert completion.seed == seed
            assert np.array_equal(completion.token_ids, alone.token_ids)
    await builtin.aclose()


async def test_calls_that_differ_in_anything_but_the_seed_stay_apart(
    micro_model: Path, serve: Any
) -> None:
    """FR-172: answers are never mixed between callers."""
    builtin = BuiltinInference(micro_model)
    async with serve(builtin) as service:
        other = Prompt(token_ids=np.array([3, 4, 5], np.int32))
        answers = await asyncio.gather(
            service.generate(PROMPT, sampling=SAMPLING, n=2),
            service.generate(other, sampling=SAMPLING),
            service.generate(PROMPT, sampling=Sampling(max_tokens=1, seed=1)),
            service.generate(PROMPT, sampling=SAMPLING, n=3),
        )
        assert await num_requests(service) == 3
    assert [len(a) for a in answers] == [2, 1, 1, 3]
    assert same_draw(answers[0][1], answers[3][1])
    assert len(answers[2][0].token_ids) == 1
    assert np.array_equal(answers[1][0].prompt_token_ids, other.token_ids)
    await builtin.aclose()


async def test_an_error_reaches_every_caller_with_its_kind(micro_model: Path, serve: Any) -> None:
    builtin = BuiltinInference(micro_model, InferenceServiceConfig(max_context=8))
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
    await builtin.aclose()


async def test_a_request_nobody_waits_for_any_more_frees_the_engine(
    micro_model: Path, serve: Any
) -> None:
    builtin = BuiltinInference(micro_model)
    async with serve(builtin) as service:
        await service.pause("keep")
        calls = [asyncio.create_task(service.generate(PROMPT, sampling=SAMPLING)) for _ in range(2)]
        while builtin.num_waiting < 2:
            await service.health()
        for call in calls:
            call.cancel()
        while builtin.num_waiting:
            await service.health()
        await service.resume()
        assert builtin.counts.drawn_tokens == 0
    await builtin.aclose()


# --- many at once -----------------------------------------------------------------------------


@asynccontextmanager
async def gate_server(num_expected: int) -> AsyncIterator[HttpInferenceService]:
    """A server that answers nobody until everybody has asked."""
    inner, arrived, everybody = InstantInference(), 0, asyncio.Event()

    async def generate(request: web.Request) -> web.Response:
        nonlocal arrived
        ids, sampling, n, policy = unpack_generate(await request.read())
        arrived += 1
        if arrived % num_expected == 0:
            everybody.set()
        await everybody.wait()
        completions = await inner.generate(
            Prompt(token_ids=ids), sampling=sampling, n=n, policy=policy
        )
        return web.Response(body=pack_completions(completions))

    app = web.Application()
    app.router.add_post("/generate", generate)
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

    async def session(service: HttpInferenceService, number: int) -> int:
        prompt = Prompt(token_ids=np.array([number], np.int32))
        turns = [await service.generate(prompt, sampling=SAMPLING) for _ in range(3)]
        return len(turns)

    async with gate_server(1024) as service:
        done = await asyncio.gather(*(session(service, i) for i in range(1024)))
    assert done == [3] * 1024


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
    async with gate_server(2) as service:
        impatient = HttpInferenceService(service._http.base_url, request_deadline_s=0.05)
        with pytest.raises(DeadlineError, match=r"0\.05 s"):
            await impatient.generate(PROMPT, sampling=SAMPLING)
        await impatient.aclose()


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
        seed=(1 << 63) - 1,
        raw_finish_reason="abort",
    )


@pytest.mark.parametrize("logprobs", [[-0.1, -2.5], None])
def test_completions_survive_the_wire_bit_by_bit(logprobs: list[float] | None) -> None:
    sent = [make_drawn([4, 5], logprobs), make_drawn([], None if logprobs is None else [])]
    received = unpack_completions(pack_completions(sent), PROMPT.token_ids)
    for a, b in zip(sent, received, strict=True):
        assert a.token_ids.tobytes() == b.token_ids.tobytes()
        assert (a.logprobs is None) == (b.logprobs is None)
        assert (a.versions, a.text, a.seed) == (b.versions, b.text, b.seed)
        assert a.finish_reason == b.finish_reason


def test_a_request_survives_the_wire() -> None:
    sampling = Sampling(max_tokens=9, top_k=3, stop=("a", "b"), stop_token_ids=(4,))
    ids, read, n, policy = unpack_generate(
        pack_generate(PROMPT.token_ids, sampling, [7, 8], "actor")
    )
    assert np.array_equal(ids, PROMPT.token_ids)
    assert read == Sampling(
        max_tokens=9, top_k=3, stop=("a", "b"), stop_token_ids=(4,), seeds=(7, 8)
    )
    assert (n, policy) == (2, "actor")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03"])
def test_a_damaged_message_is_an_invariant_error(body: bytes) -> None:
    with pytest.raises(InvariantError):
        unpack_generate(body)
    with pytest.raises(InvariantError):
        unpack_completions(body, PROMPT.token_ids)
