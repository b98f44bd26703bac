"""Drawing from OpenAI-compatible servers that differ in what they return."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from nexrl.errors import ConfigError, ContextOverflowError, ServiceError
from nexrl.services.inference.client import OpenAIInferenceClient
from nexrl.services.inference.engines.builtin.service import BuiltinInference
from nexrl.services.inference.openai_client import normalise_finish_reason, read_logprobs
from nexrl.types import Prompt, Sampling

MakeEngine = Callable[..., BuiltinInference]
PROMPT = Prompt(token_ids=np.array([3, 4, 5], np.int32))
SAMPLING = Sampling(max_tokens=3, seed=1)
Body = dict[str, Any]
Answer = Callable[[Mapping[str, Any]], tuple[int, Body]]


def make_answer(body: Mapping[str, Any], **choice: Any) -> tuple[int, Body]:
    """What vLLM answers: ids, logprobs, raw unless the test says otherwise."""
    fields: dict[str, Any] = {
        "index": 0,
        "text": "abc",
        "finish_reason": "length",
        "token_ids": [7, 8, 9],
        "logprobs": {
            "token_logprobs": [-0.1, -0.2, -0.3],
            "top_logprobs": [{"a": -0.1}, {"b": -0.2}, {"c": -0.3}],
        },
    }
    fields.update(choice)
    ids = fields.get("token_ids") or [0, 0, 0]
    return 200, {"choices": [fields], "usage": {"completion_tokens": len(ids)}}


@asynccontextmanager
async def fake_server(
    answer: Answer, **settings: Any
) -> AsyncIterator[tuple[OpenAIInferenceClient, list[Body]]]:
    asked: list[Body] = []

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        status, reply = answer(body)
        return web.json_response(reply, status=status)

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    client = OpenAIInferenceClient(url, model="m", **settings)
    try:
        yield client, asked
    finally:
        await client.aclose()
        await runner.cleanup()


async def test_ids_and_logprobs_come_from_the_server() -> None:
    async with fake_server(make_answer) as (client, _):
        (completion,) = await client.generate(PROMPT, sampling=SAMPLING)
    assert completion.token_ids.tolist() == [7, 8, 9]
    assert completion.logprobs is not None
    np.testing.assert_allclose(completion.logprobs, [-0.1, -0.2, -0.3])
    assert completion.version_source == "pinned"
    assert completion.versions[0].end == 3


async def test_a_server_without_token_ids_is_refused_at_the_first_call() -> None:
    """FR-170, FR-008: ids are never made by encoding text again."""
    pieces = {"content": [{"token": "\ufffd", "bytes": [240, 159, 152], "logprob": -0.1}]}

    def answer(body: Mapping[str, Any]) -> tuple[int, Body]:
        return make_answer(body, token_ids=None, logprobs=pieces)

    async with fake_server(answer) as (client, asked):
        with pytest.raises(ConfigError, match=r"returns no token ids.*return_token_ids"):
            await client.generate(PROMPT, sampling=SAMPLING)
        assert len(asked) == 1


async def test_text_alone_is_enough_where_nothing_is_trained() -> None:
    async with fake_server(
        lambda body: make_answer(body, token_ids=None), needs_training_data=False
    ) as (client, _):
        (completion,) = await client.generate(PROMPT, sampling=SAMPLING)
    assert completion.text == "abc"
    assert completion.logprobs is None


async def test_every_sampling_field_is_stated_and_off_is_translated() -> None:
    """FR-085, FR-086: top_k None is -1 here; nothing is left to generation_config.json."""
    async with fake_server(make_answer) as (client, asked):
        await client.generate(PROMPT, sampling=SAMPLING)
    sent = asked[-1]
    assert sent["prompt"] == [3, 4, 5]
    expected = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "top_p": 1.0}
    expected |= {"temperature": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert expected.items() <= sent.items()


async def test_a_strict_server_is_found_out_once_and_asked_plainly() -> None:
    def answer(body: Mapping[str, Any]) -> tuple[int, Body]:
        if "min_p" in body:
            return 400, {"error": {"message": "unknown field min_p", "type": "invalid_request"}}
        return make_answer(body)

    async with fake_server(answer) as (client, asked):
        for _ in range(2):
            await client.generate(PROMPT, sampling=SAMPLING)
        assert sum("min_p" in body for body in asked) == 1
        assert not (await client.probe()).neutral_fields
        with pytest.raises(ConfigError, match="top_k"):
            await client.generate(PROMPT, sampling=Sampling(top_k=5))


async def test_each_choice_is_asked_for_with_its_own_seed() -> None:
    async with fake_server(make_answer) as (client, asked):
        completions = await client.generate(PROMPT, sampling=Sampling(seeds=(4, 5, 6)), n=3)
    assert [c.seed for c in completions] == [4, 5, 6]
    assert sorted(body["seed"] for body in asked[-3:]) == [4, 5, 6]


@pytest.mark.parametrize(("tempered", "kind"), [(False, "raw"), (True, "tempered")])
async def test_raw_logprobs_are_told_from_tempered_ones(tempered: bool, kind: str) -> None:
    """FR-095: two servers of the same model, one processes its logprobs."""

    def answer(body: Mapping[str, Any]) -> tuple[int, Body]:
        scores = np.array([2.0, 1.0, 0.0]) / (body["temperature"] if tempered else 1.0)
        top = float(scores[0] - np.log(np.exp(scores).sum()))
        listed = {"token_logprobs": [top] * 3, "top_logprobs": [{"a": top}] * 3}
        return make_answer(body, logprobs=listed)

    async with fake_server(answer) as (client, _):
        assert (await client.info()).capabilities["logprob_kind"] == kind
        (completion,) = await client.generate(PROMPT, sampling=SAMPLING)
        assert completion.logprob_kind == kind


async def test_a_null_logprob_leaves_the_row_without_any_and_is_counted() -> None:
    """FR-089"""

    def answer(body: Mapping[str, Any]) -> tuple[int, Body]:
        return make_answer(body, logprobs={"token_logprobs": [-0.1, None, -0.3]})

    async with fake_server(answer) as (client, _):
        (completion,) = await client.generate(PROMPT, sampling=SAMPLING)
        assert completion.logprobs is None
        assert len(completion.token_ids) == 3
        assert client.num_null_logprobs == 1


@pytest.mark.parametrize("value", [-9999.0, 0.5, -math.inf])
def test_a_number_that_is_no_logprob_fails_closed(value: float) -> None:
    with pytest.raises(ServiceError, match="as a logprob"):
        read_logprobs({"token_logprobs": [-0.1, value]}, 2)


def test_rounding_above_zero_is_brought_back() -> None:
    logprobs, num_null = read_logprobs({"token_logprobs": [1e-7, -1.0]}, 2)
    assert logprobs is not None
    assert logprobs[0] == 0.0
    assert num_null == 0


async def test_ids_and_logprobs_of_unequal_number_are_refused() -> None:
    def answer(body: Mapping[str, Any]) -> tuple[int, Body]:
        return make_answer(body, logprobs={"token_logprobs": [-0.1]})

    async with fake_server(answer) as (client, _):
        with pytest.raises(ServiceError, match="3 token ids but 1 logprobs"):
            await client.generate(PROMPT, sampling=SAMPLING)


async def test_a_server_that_leaves_the_stop_token_out_is_found_out() -> None:
    """FR-026: the row would not end with its end-of-sequence token."""

    def answer(body: Mapping[str, Any]) -> tuple[int, Body]:
        status, reply = make_answer(body, finish_reason="stop")
        reply["usage"]["completion_tokens"] = 4
        return status, reply

    async with fake_server(answer) as (client, _):
        with pytest.raises(ServiceError, match=r"counts 4 drawn tokens but returns 3 ids"):
            await client.generate(PROMPT, sampling=SAMPLING)


async def test_a_prompt_that_is_too_long_is_the_policys_own_business() -> None:
    def answer(body: Mapping[str, Any]) -> tuple[int, Body]:
        if len(body["prompt"]) > 1:
            return 400, {"error": {"message": "maximum context length is 2 tokens"}}
        return make_answer(body)

    async with fake_server(answer) as (client, _):
        with pytest.raises(ContextOverflowError, match="maximum context length"):
            await client.generate(PROMPT, sampling=SAMPLING)


@pytest.mark.parametrize(
    ("raw", "stop_reason", "expected"),
    [
        ("stop", None, "eos"),
        ("stop", 42, "stop_token"),
        ("stop", "\n", "stop_string"),
        ("length", None, "length"),
        ("abort", None, "abort"),
        ("eos_token", None, "eos"),
        ("stop_sequence", None, "stop_string"),
        ("max_tokens", None, "length"),
        ("tool_calls", None, "eos"),
        ("", None, "error"),
    ],
)
def test_finish_reasons_become_one_vocabulary(
    raw: str, stop_reason: int | str | None, expected: str
) -> None:
    """FR-022: the reason decides, never the last id."""
    sampling = Sampling(stop_token_ids=(42,))
    assert normalise_finish_reason(raw, stop_reason, sampling) == expected


async def test_it_draws_from_our_own_server_what_the_engine_draws(
    make_engine: MakeEngine, serve: Any
) -> None:
    builtin = make_engine()
    async with serve(builtin) as service:
        url = service._http.base_url + "/v1"
        client = OpenAIInferenceClient(url, model="actor", token="secret")
        completions = await client.generate(PROMPT, sampling=SAMPLING, n=3)
        expected = await builtin.generate(PROMPT, sampling=SAMPLING, n=3)
        assert (await client.probe()).logprob_kind == "tempered"
        await client.aclose()
    for a, b in zip(completions, expected, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert a.finish_reason == b.finish_reason
        assert a.logprobs is not None
        assert b.logprobs is not None
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
