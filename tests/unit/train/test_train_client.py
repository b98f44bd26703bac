"""The HTTP client and server of the train service: overlap, lost connections, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from nexrl.errors import ConfigError, DeadlineError, InvariantError, ServiceError
from nexrl.services.http import HttpClient
from nexrl.services.train import client as client_module
from nexrl.services.train.client import HttpTrainService
from nexrl.services.train.server import make_train_app
from nexrl.testing.contracts.train_subject import CROSS_ENTROPY, STEP, contract_chunk
from nexrl.testing.instant_train import InstantTrain
from nexrl.types import BackwardOutput, LossSpec, ModelSpec, OptimParams, OptimResult, RowChunk

SPEC = ModelSpec(path="model")


class SlowTrain(InstantTrain):
    """Holds forward_backward until released; counts how many were started."""

    def __init__(self) -> None:
        super().__init__()
        self.started = asyncio.Condition()
        self.num_started = 0
        self.release = asyncio.Event()

    async def forward_backward(
        self,
        policy: str,
        chunk: RowChunk,
        loss: LossSpec,
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> BackwardOutput:
        self.num_started += 1
        async with self.started:
            self.started.notify_all()
        await self.release.wait()
        return await super().forward_backward(policy, chunk, loss, outputs=outputs)

    async def wait_for(self, number: int) -> None:
        async with asyncio.timeout(5), self.started:
            await self.started.wait_for(lambda: self.num_started >= number)


class FragileDoor:
    """Cuts the connection of chosen requests, before or after they are served."""

    def __init__(self) -> None:
        self.cut_before = 0
        self.cut_after = 0

    def middleware(self) -> Middleware:
        @web.middleware
        async def cut(request: web.Request, handler: Handler) -> web.StreamResponse:
            assert request.transport is not None
            if self.cut_before:
                self.cut_before -= 1
                request.transport.abort()
                raise ConnectionResetError
            response = await handler(request)
            if self.cut_after:
                self.cut_after -= 1
                request.transport.abort()
            return response

        return cut


@asynccontextmanager
async def serving(service: InstantTrain, *, door: FragileDoor | None = None) -> AsyncIterator[str]:
    app = make_train_app(service)
    if door is not None:
        app.middlewares.insert(0, door.middleware())
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def connected(
    service: InstantTrain, *, door: FragileDoor | None = None, request_deadline_s: float = 5.0
) -> AsyncIterator[HttpTrainService]:
    async with serving(service, door=door) as url:
        client = HttpTrainService(url, request_deadline_s=request_deadline_s)
        try:
            await client.create(SPEC)
            yield client
        finally:
            await client.aclose()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_RETRY_DELAY_S", 0.001)


async def test_next_chunk_is_sent_before_the_last_returns() -> None:
    service = SlowTrain()
    async with connected(service) as client:
        chunk = contract_chunk()
        calls = [
            asyncio.ensure_future(client.forward_backward("actor", chunk, CROSS_ENTROPY))
            for _ in range(3)
        ]
        await service.wait_for(3)
        assert not any(call.done() for call in calls)
        service.release.set()
        assert len(await asyncio.gather(*calls)) == 3


@pytest.mark.parametrize("where", ["cut_before", "cut_after"])
async def test_step_is_applied_once_whatever_the_connection_does(where: str) -> None:
    door = FragileDoor()
    async with connected(InstantTrain(), door=door) as client:
        for expected in (1, 2):
            setattr(door, where, 2)
            await client.forward_backward("actor", contract_chunk(), CROSS_ENTROPY)
            result: OptimResult = await client.optim_step("actor", STEP)
            assert result.optimizer_step == expected
        assert (await client.info("actor")).optimizer_step == 2


async def test_refusals_are_not_repeated() -> None:
    async with connected(InstantTrain()) as client:
        with pytest.raises(ConfigError, match="nonsense"):
            await client.forward_backward("actor", contract_chunk(), LossSpec(name="nonsense"))
        with pytest.raises(ConfigError, match="nobody"):
            await client.optim_step("nobody", STEP)


async def test_cancelled_call_does_not_hold_up_the_next() -> None:
    """Cancelled before it was sent, while an earlier one runs: its number is used up."""
    service = SlowTrain()
    async with connected(service) as client:
        chunk = contract_chunk()
        first = asyncio.ensure_future(client.forward_backward("actor", chunk, CROSS_ENTROPY))
        await service.wait_for(1)
        doomed = asyncio.ensure_future(client.optim_step("actor", STEP))
        await asyncio.sleep(0)
        doomed.cancel()
        assert (await client.info("actor")).optimizer_step == 0
        assert not first.done()
        service.release.set()
        await first
        assert (await client.optim_step("actor", STEP)).optimizer_step == 1


@pytest.mark.parametrize("unsendable", [object(), 1 << 80])
async def test_call_that_cannot_be_sent_does_not_hold_up_the_next(unsendable: Any) -> None:
    """It has no place in the order, also while an earlier one runs."""
    service = SlowTrain()
    async with connected(service) as client:
        first = asyncio.ensure_future(
            client.forward_backward("actor", contract_chunk(), CROSS_ENTROPY)
        )
        await service.wait_for(1)
        with pytest.raises((InvariantError, OverflowError)):
            await client.save_state("actor", unsendable)
        assert (await client.info("actor")).optimizer_step == 0
        service.release.set()
        await first


async def test_deadline_of_a_call_is_kept_and_the_next_call_works() -> None:
    service = SlowTrain()
    async with connected(service, request_deadline_s=0.2) as client:
        with pytest.raises(DeadlineError, match="train service"):
            await client.forward_backward("actor", contract_chunk(), CROSS_ENTROPY)
        service.release.set()
        assert (await client.info("actor")).optimizer_step == 0


async def test_service_that_is_gone_is_reported_within_the_deadline() -> None:
    client = HttpTrainService("http://127.0.0.1:9", request_deadline_s=0.05)
    with pytest.raises(ServiceError, match=r"127\.0\.0\.1:9") as caught:
        await client.info("actor")
    assert caught.value.retryable
    await client.aclose()


async def test_restarted_server_says_at_once_that_it_hosts_nothing() -> None:
    async with serving(InstantTrain()) as url:
        client = HttpTrainService(url)
        await client.create(SPEC)
        await client.optim_step("actor", OptimParams(lr=0.1))
        async with serving(InstantTrain()) as other:
            client._http.base_url = other
            with pytest.raises(ConfigError, match="no policy is named 'actor'"):
                await client.optim_step("actor", OptimParams(lr=0.1))
        await client.aclose()


async def test_two_clients_have_orders_of_their_own() -> None:
    async with serving(InstantTrain()) as url:
        first, second = HttpTrainService(url), HttpTrainService(url)
        await first.create(SPEC)
        await first.info("actor")
        assert (await second.info("actor")).policy == "actor"
        await asyncio.gather(first.aclose(), second.aclose())


async def test_health_and_metrics_answer_while_a_call_runs() -> None:
    service = SlowTrain()
    async with serving(service) as url:
        client = HttpTrainService(url)
        await client.create(SPEC)
        call = asyncio.ensure_future(
            client.forward_backward("actor", contract_chunk(), CROSS_ENTROPY)
        )
        await service.wait_for(1)
        async with aiohttp.ClientSession() as session:
            health = await (await session.get(url + "/health")).json()
            metrics = await (await session.get(url + "/metrics")).text()
        assert health["status"] == "ok"
        assert 'nexrl_train_calls_total{verb="create"} 1' in metrics
        assert "nexrl_train_calls_in_progress 1" in metrics
        service.release.set()
        await call
        await client.aclose()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/policies/actor/explode", b"\x80", "no verb is named 'explode'"),
        ("/v1/policies/actor/info", b"\xc1", "not a readable message"),
        ("/v1/policies/actor/info", b"\x80", "Envelope"),
    ],
)
async def test_malformed_requests_are_answered_in_words(
    path: str, body: bytes, status: str
) -> None:
    async with serving(InstantTrain()) as url:
        http = HttpClient(url, name="test")
        with pytest.raises(Exception, match=status):
            await http.request("POST", path, body=body)
        await http.aclose()


async def test_server_process_prints_its_port_and_ends_on_sigterm() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "nexrl.services.train.server", "--config", json.dumps({"num_threads": 1})),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "NEXRL_SERVICE_TOKEN": "secret"},
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        ready = json.loads(await process.stdout.readline())
        assert ready["ready"] == "train"
        url = f"http://127.0.0.1:{ready['port']}"
        stranger, client = (HttpTrainService(url, token=token) for token in ("wrong", "secret"))
        with pytest.raises(ServiceError, match="bearer token"):
            await stranger.info("actor")
        await stranger.aclose()
        with pytest.raises(ConfigError, match="hosted here"):
            await client.info("actor")
        await client.aclose()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
