"""The real `openai` client against our server: answers, streams, errors, extensions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from nexrl.services.inference.client import HttpInferenceService
from nexrl.services.inference.engines.builtin.service import BuiltinInference

MakeEngine = Callable[..., BuiltinInference]
MESSAGES: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
TOKEN = "secret"
Served = tuple[HttpInferenceService, openai.AsyncOpenAI, BuiltinInference]


@pytest.fixture
async def served(chat_model: Path, serve: Any, make_engine: MakeEngine) -> AsyncIterator[Served]:
    builtin = make_engine(chat_model)
    async with serve(builtin) as service:
        url = service._http.base_url + "/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0)
        yield service, client, builtin
        await client.close()


async def test_chat_answers_in_the_shape_of_openai(served: Served) -> None:
    _, client, builtin = served
    answer = await client.chat.completions.create(
        model="actor", messages=MESSAGES, max_tokens=8, seed=1, n=2, logprobs=True
    )
    assert [c.index for c in answer.choices] == [0, 1]
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert all(t.logprob <= 0 for t in choice.logprobs.content)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(builtin.renderer.render(MESSAGES))
    assert answer.usage.completion_tokens >= len(choice.logprobs.content)


async def test_the_chat_template_is_rendered_once_and_begins_with_one_marker(
    served: Served,
) -> None:
    """FR-014, FR-172: the prompt is the template's own text, encoded once."""
    _, client, builtin = served
    answer = await client.chat.completions.create(
        model="actor", messages=MESSAGES, max_tokens=1, extra_body={"return_token_ids": True}
    )
    fed = answer.model_dump()["prompt_token_ids"]
    assert fed == builtin.renderer.render(MESSAGES).tolist()


async def test_a_seed_repeats_an_answer_and_choices_differ(served: Served) -> None:
    _, client, _ = served

    async def ask(seed: int) -> list[str]:
        answer = await client.completions.create(
            model="actor", prompt="1+1=", max_tokens=20, n=2, seed=seed
        )
        return [c.text for c in answer.choices]

    assert await ask(5) == await ask(5)
    assert await ask(5) != await ask(6)
    first, second = await ask(5)
    assert first != second


async def test_text_and_token_prompts_and_lists_of_them_agree(served: Served) -> None:
    _, client, builtin = served
    ids = builtin.renderer.encode("1+1=").tolist()
    prompts: list[Any] = ["1+1=", ids, ["1+1=", "2+2="], [ids, ids]]
    answers = [
        await client.completions.create(model="actor", prompt=p, max_tokens=6, temperature=0)
        for p in prompts
    ]
    texts = [[c.text for c in a.choices] for a in answers]
    assert [len(t) for t in texts] == [1, 1, 2, 2]
    assert texts[0][0] == texts[1][0] == texts[2][0] == texts[3][1]


async def test_completion_logprobs_list_the_drawn_tokens(served: Served) -> None:
    _, client, _ = served
    answer = await client.completions.create(
        model="actor", prompt="1+1=", max_tokens=5, logprobs=0, seed=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs)
    assert "".join(logprobs.tokens).startswith(answer.choices[0].text)


async def test_ids_versions_and_seeds_come_on_request(served: Served) -> None:
    _, client, _ = served
    answer = await client.completions.create(
        model="actor",
        prompt="1+1=",
        max_tokens=5,
        n=2,
        logprobs=1,
        extra_body={"return_token_ids": True, "seeds": [11, 12]},
    )
    for choice, seed in zip(answer.model_dump()["choices"], (11, 12), strict=True):
        num_drawn = len(choice["token_ids"])
        assert num_drawn == len(choice["logprobs"]["token_logprobs"])
        assert choice["versions"] == [{"start": 0, "end": num_drawn, "version": "actor@0.0"}]
        assert choice["seed"] == seed
        assert choice["prompt_token_ids"]
    plain = await client.completions.create(model="actor", prompt="1", max_tokens=1)
    assert "token_ids" not in plain.model_dump()["choices"][0]


async def test_a_stream_joins_to_the_same_text(served: Served) -> None:
    _, client, _ = served
    fields: dict[str, Any] = {"model": "actor", "messages": MESSAGES, "max_tokens": 12, "seed": 4}
    whole = await client.chat.completions.create(**fields, n=2)
    texts, reasons, usage = ["", ""], ["", ""], None
    stream = await client.chat.completions.create(
        **fields, n=2, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.message.content for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    assert usage == whole.usage


async def test_a_streamed_stop_string_never_shows(served: Served) -> None:
    _, client, _ = served
    free = await client.completions.create(
        model="actor", prompt="1+1=", max_tokens=30, temperature=0
    )
    stop = free.choices[0].text[5:8]
    stream = await client.completions.create(
        model="actor", prompt="1+1=", max_tokens=30, temperature=0, stop=stop, stream=True
    )
    chunks = [chunk.choices[0] async for chunk in stream]
    text = "".join(c.text for c in chunks)
    assert text == free.choices[0].text.split(stop)[0]
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].model_dump()["stop_reason"] == stop


async def test_stop_reasons_tell_a_stop_token_from_an_end(served: Served) -> None:
    _, client, _ = served
    answer = await client.completions.create(
        model="actor",
        prompt="1+1=",
        max_tokens=30,
        temperature=0,
        extra_body={"stop_token_ids": list(range(5, 99))},
    )
    assert answer.choices[0].model_dump()["stop_reason"] in range(5, 99)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_regex": "a+"}, "unsupported field 'guided_regex'"),
        ({"frequency_penalty": 0.5}, "frequency_penalty = 0.5 is not supported"),
        ({"repetition_penalty": 1.05}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"best_of": 4}, "best_of"),
        ({"logprobs": 5}, "logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n = 0"),
        ({"stop": ""}, "stop strings must not be empty"),
        ({"seeds": [1, 2, 3]}, "seeds has 3 entries for n = 1"),
        ({"prompt": []}, "empty"),
        ({"prompt": [99999]}, "token ids must lie in"),
        ({"prompt": [-1]}, "greater than or equal to 0"),
        ({"prompt": [1 << 70]}, "less than 2147483648"),
    ],
)
async def test_a_field_that_would_be_ignored_is_refused_by_name(
    served: Served, fields: dict[str, Any], text: str
) -> None:
    _, client, _ = served
    body = {"prompt": "1", **fields}
    prompt = body.pop("prompt")
    with pytest.raises(openai.BadRequestError, match=text):
        await client.completions.create(model="actor", prompt=prompt, extra_body=body)


async def test_harmless_fields_are_accepted(served: Served) -> None:
    """FR-086: null, 0 and -1 all turn top_k off."""
    _, client, _ = served
    texts = set()
    for top_k in (None, 0, -1):
        answer = await client.completions.create(
            model="actor",
            prompt="1+1=",
            seed=3,
            user="me",
            frequency_penalty=0,
            extra_body={"top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0},
        )
        texts.add(answer.choices[0].text)
    assert len(texts) == 1


async def test_a_prompt_longer_than_the_context_is_a_bad_request(served: Served) -> None:
    _, client, _ = served
    with pytest.raises(openai.BadRequestError, match=r"200 tokens.*128"):
        await client.completions.create(model="actor", prompt="1" * 200)
    with pytest.raises(openai.BadRequestError, match=r"200 tokens.*128"):
        await client.completions.create(model="actor", prompt="1" * 200, stream=True)


async def test_an_unknown_model_is_not_found_and_a_wrong_token_unauthorized(
    served: Served,
) -> None:
    _, client, _ = served
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await client.completions.create(model="gpt-9", prompt="1")
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        await stranger.models.list()
    assert [m.id async for m in client.models.list()] == ["actor"]


async def test_messages_without_a_chat_template_are_a_bad_request(
    make_engine: MakeEngine, serve: Any
) -> None:
    builtin = make_engine()
    async with serve(builtin) as service:
        url = service._http.base_url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="no chat template"):
                await client.chat.completions.create(model="actor", messages=MESSAGES)


async def test_metrics_count_requests_tokens_and_latency(served: Served) -> None:
    service, client, builtin = served
    await client.completions.create(model="actor", prompt="1+1=", max_tokens=4, n=3)
    text = await service.metrics()
    assert 'nexrl_inference_requests_total{endpoint="completions",outcome="ok"} 1' in text
    assert f"nexrl_inference_drawn_tokens_total {builtin.engine.counts.drawn_tokens}" in text
    assert "nexrl_inference_choices_total 3" in text
    assert 'nexrl_inference_request_seconds_bucket{le="+Inf"} 1' in text
    assert 'nexrl_inference_policy_version{policy="actor",incarnation="0"} 0' in text
    assert "nexrl_inference_running 0" in text
    builtin.engine.counts.prompt_tokens = 123_456_789
    assert "nexrl_inference_prompt_tokens_total 123456789\n" in await service.metrics()


async def test_health_turns_with_the_engine_and_needs_no_token(served: Served) -> None:
    service, client, builtin = served
    url = service._http.base_url + "/health"
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            assert answer.status == 200

        def explode(*_: Any) -> None:
            raise RuntimeError("device lost")

        builtin._runner.model.register_forward_pre_hook(explode)
        with pytest.raises(openai.InternalServerError, match="device lost"):
            await client.completions.create(model="actor", prompt="1")
        async with session.get(url) as answer:
            assert answer.status == 503
            assert "device lost" in (await answer.json())["reason"]


async def test_control_messages_may_be_json_too(served: Served) -> None:
    """A person with curl can pause and resume."""
    service, _, builtin = served
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        url = service._http.base_url + "/control/"
        async with session.post(url + "pause", json={"mode": "keep"}) as answer:
            assert answer.status == 200
        assert builtin.engine.paused
        async with session.post(url + "pause", json={"mode": "later"}) as answer:
            assert answer.status == 400
        async with session.post(url + "resume") as answer:
            assert answer.status == 200
