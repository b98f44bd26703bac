"""The builtin engine in process: batching, limits, versions, pauses, faults."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.errors import ConfigError, ContextOverflowError, DeadlineError, ServiceError
from nexrl.services.inference.engines.builtin.request import EndEvent, TokenEvent
from nexrl.services.inference.engines.builtin.service import BuiltinInference
from nexrl.services.inference.messages import Call
from nexrl.testing.contracts.inference import V0, V1, publish_model
from nexrl.testing.tiny_models import make_micro_model
from nexrl.types import Completion, PauseMode, Prompt, Sampling

MakeEngine = Callable[..., BuiltinInference]
GREEDY = Sampling(max_tokens=40, temperature=0.0)
HOT = Sampling(max_tokens=40, seed=3)


def make_prompt(seed: int, length: int = 6) -> Prompt:
    rng = np.random.default_rng(seed)
    return Prompt(token_ids=rng.integers(3, 16, length).astype(np.int32))


GREEDY_CALL = Call(make_prompt(5).token_ids, GREEDY, (0,), "actor")


async def greedy_by_transformers(model: Path, prompt: Prompt, max_tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.from_numpy(prompt.token_ids.astype(np.int64))[None]
    drawn = hf.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return [int(i) for i in drawn[0, ids.shape[1] :]]


async def test_greedy_draws_equal_those_of_transformers_whoever_runs_beside(
    micro_model: Path, make_engine: MakeEngine
) -> None:
    prompts = [make_prompt(i, 3 + 5 * i) for i in range(6)]
    inference = make_engine(max_batch=4)
    answers = await asyncio.gather(
        *(
            inference.generate(p, sampling=replace(GREEDY, max_tokens=5 + 3 * i))
            for i, p in enumerate(prompts)
        )
    )
    for i, (prompt, (completion,)) in enumerate(zip(prompts, answers, strict=True)):
        expected = await greedy_by_transformers(micro_model, prompt, 5 + 3 * i)
        assert completion.token_ids.tolist() == expected


async def test_a_long_sequence_survives_moving_into_the_slot_of_one_that_ended_at_once(
    make_engine: MakeEngine,
) -> None:
    long, short = make_prompt(0, 40), make_prompt(1, 3)
    inference = make_engine()
    (alone,) = await inference.generate(long, sampling=GREEDY)
    inference = make_engine()
    await inference.pause("keep")
    once = replace(GREEDY, max_tokens=1)
    calls = [(short, once), (short, once), (long, GREEDY)]
    tasks = [asyncio.create_task(inference.generate(p, sampling=s)) for p, s in calls]
    await asyncio.sleep(0)
    await inference.resume()
    (moved,) = await tasks[-1]
    await asyncio.gather(*tasks)
    assert np.array_equal(moved.token_ids, alone.token_ids)


async def test_a_prompt_is_prefilled_once_for_all_its_choices(make_engine: MakeEngine) -> None:
    inference = make_engine()
    await inference.generate(make_prompt(0, 7), sampling=HOT, n=12)
    assert inference.engine.counts.prompt_tokens == 7


async def test_more_choices_than_slots_are_all_drawn(make_engine: MakeEngine) -> None:
    inference = make_engine(max_batch=3)
    few = await inference.generate(make_prompt(0), sampling=HOT, n=10)
    inference = make_engine(max_batch=64)
    many = await inference.generate(make_prompt(0), sampling=HOT, n=10)
    for a, b in zip(few, many, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)


async def test_a_finished_sequence_makes_room_at_once(make_engine: MakeEngine) -> None:
    """With static batching the ten short requests would wait for the long one."""
    order: list[str] = []

    async def run(inference: BuiltinInference, name: str, max_tokens: int) -> None:
        await inference.generate(make_prompt(5), sampling=replace(GREEDY, max_tokens=max_tokens))
        order.append(name)

    inference = make_engine(max_batch=2)
    names = [("long", 40), *[("short", 2)] * 10]
    await asyncio.gather(*(run(inference, *name) for name in names))
    assert order[-1] == "long"


async def test_the_terminator_stays_in_the_row_with_its_logprob(make_engine: MakeEngine) -> None:
    """FR-026: a row ends with its end-of-sequence token, trained; FR-022: it is not truncated."""
    inference = make_engine()
    completions = await inference.generate(make_prompt(0), sampling=HOT, n=32)
    ended = [c for c in completions if c.finish_reason == "eos"]
    assert ended
    for completion in ended:
        assert completion.token_ids[-1] == 1
        assert completion.to_row().loss_mask[-1]
        assert not completion.truncated
        assert "<eos>" not in completion.text


async def test_a_stop_token_ends_and_is_kept(make_engine: MakeEngine) -> None:
    sampling = replace(GREEDY, stop_token_ids=tuple(range(2, 16)))
    inference = make_engine()
    (completion,) = await inference.generate(make_prompt(0), sampling=sampling)
    assert completion.finish_reason == "stop_token"
    assert len(completion.token_ids) == 1
    assert completion.text == ""


async def test_a_stop_string_keeps_its_tokens_and_cuts_the_text(make_engine: MakeEngine) -> None:
    inference = make_engine()
    (free,) = await inference.generate(make_prompt(0), sampling=GREEDY)
    stop = free.text[2:4]
    (cut,) = await inference.generate(
        make_prompt(0), sampling=replace(GREEDY, stop=(stop, "no such text"))
    )
    assert cut.finish_reason == "stop_string"
    assert cut.text == free.text[: free.text.index(stop)]
    assert inference.renderer.decode(cut.token_ids).endswith(stop)


async def test_a_draw_stops_at_the_end_of_the_context(make_engine: MakeEngine) -> None:
    inference = make_engine(max_context=10)
    (completion,) = await inference.generate(make_prompt(0, 6), sampling=GREEDY)
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 4


async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    make_engine: MakeEngine,
) -> None:
    """FR-077: the room to generate is checked before anything runs."""
    inference = make_engine(max_context=10)
    with pytest.raises(ContextOverflowError, match=r"12 tokens.*10"):
        await inference.generate(make_prompt(0, 12), sampling=GREEDY)
    assert inference.engine.counts.prompt_tokens == 0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"stop": ("",)}, "stop strings"),
    ],
)
async def test_sampling_out_of_range_is_refused_by_name(
    make_engine: MakeEngine, fields: dict[str, Any], text: str
) -> None:
    inference = make_engine()
    with pytest.raises(ConfigError, match=text):
        await inference.generate(make_prompt(0), sampling=Sampling(**fields))


@pytest.mark.parametrize("ids", [[], [3, 16], [-1]])
async def test_a_prompt_outside_the_vocabulary_is_refused(
    make_engine: MakeEngine, ids: list[int]
) -> None:
    inference = make_engine()
    with pytest.raises(ConfigError, match=r"prompt"):
        await inference.generate(Prompt(token_ids=np.array(ids, np.int32)), sampling=GREEDY)
    assert len(await inference.generate(make_prompt(0), sampling=GREEDY)) == 1


async def test_generation_config_does_not_leak(
    micro_model: Path, tmp_path: Path, make_engine: MakeEngine
) -> None:
    """FR-085: sampling defaults in the model folder change nothing."""
    model = shutil.copytree(micro_model, tmp_path / "model")
    path = model / "generation_config.json"
    leaky = {"do_sample": True, "top_p": 0.1, "top_k": 1, "temperature": 0.1}
    path.write_text(json.dumps(json.loads(path.read_text()) | leaky))
    plain, other = make_engine(), make_engine(model)
    (expected,) = await plain.generate(make_prompt(0), sampling=HOT)
    (completion,) = await other.generate(make_prompt(0), sampling=HOT)
    assert np.array_equal(completion.token_ids, expected.token_ids)


async def test_truncated_draws_are_flagged_and_greedy_ones_too(make_engine: MakeEngine) -> None:
    """FR-083: logprobs of a cut distribution are never taken for the policy's."""
    cases = {"tempered": HOT, "truncated": replace(HOT, top_p=0.5), "raw": GREEDY}
    inference = make_engine()
    for kind, sampling in cases.items():
        (completion,) = await inference.generate(make_prompt(0), sampling=sampling)
        assert completion.logprob_kind == kind


# --- pauses and versions ----------------------------------------------------------------------


async def paused_midway(
    inference: BuiltinInference, mode: PauseMode, between: Any = None
) -> Completion:
    """A greedy completion that is paused in `mode` after its first token."""
    request = None
    async for event in inference.stream(GREEDY_CALL):
        if request is None and isinstance(event, TokenEvent):
            await inference.pause(mode)
            if between is not None:
                await between()
            await inference.resume()
        request = event.request
    assert request is not None
    return inference.completion(request.choices[0])


@pytest.mark.parametrize("mode", ["keep", "recompute"])
async def test_a_pause_does_not_change_what_is_drawn(
    make_engine: MakeEngine, mode: PauseMode
) -> None:
    inference = make_engine()
    (whole,) = await inference.generate(make_prompt(5), sampling=GREEDY)
    paused = await paused_midway(inference, mode)
    assert len(whole.token_ids) == GREEDY.max_tokens
    assert np.array_equal(paused.token_ids, whole.token_ids)
    assert paused.logprobs is not None
    assert whole.logprobs is not None
    np.testing.assert_allclose(paused.logprobs, whole.logprobs, atol=1e-4)


async def test_an_abort_returns_the_tokens_so_far(make_engine: MakeEngine) -> None:
    inference = make_engine()
    (whole,) = await inference.generate(make_prompt(5), sampling=GREEDY)
    aborted = await paused_midway(inference, "abort")
    assert aborted.finish_reason == "abort"
    assert aborted.truncated
    num_drawn = len(aborted.token_ids)
    assert 1 <= num_drawn < len(whole.token_ids)
    assert np.array_equal(aborted.token_ids, whole.token_ids[:num_drawn])


async def test_an_abort_ends_a_request_some_of_whose_choices_had_no_slot_yet(
    make_engine: MakeEngine,
) -> None:
    inference = make_engine(max_batch=2)
    call = replace(GREEDY_CALL, seeds=(0, 1, 2))
    request = inference.new_request(call, streamed=True)
    inference.submit([request])
    await request.inbox.get()
    await inference.pause("abort")
    ran, _, waited = inference.completions(request)
    assert [c.finish_reason for c in (ran, waited)] == ["abort", "abort"]
    assert ran.versions[0].end == len(ran.token_ids) > 0
    assert (len(waited.token_ids), waited.versions) == (0, ())


async def test_an_abort_leaves_requests_that_have_not_started_waiting(
    make_engine: MakeEngine,
) -> None:
    inference = make_engine()
    await inference.pause("keep")
    call = asyncio.create_task(inference.generate(make_prompt(0), sampling=GREEDY))
    await asyncio.sleep(0)
    await inference.pause("abort")
    await inference.resume()
    assert (await call)[0].finish_reason != "abort"


@pytest.mark.parametrize("mode", ["keep", "recompute"])
async def test_tokens_drawn_after_a_sync_carry_the_new_version(
    micro_model: Path, tmp_path: Path, mode: PauseMode, make_engine: MakeEngine
) -> None:
    manifest = publish_model(make_micro_model(tmp_path / "m", seed=9), tmp_path / "v1", V1)

    inference = make_engine()

    async def sync() -> None:
        await inference.load_weights(manifest)
        await inference.activate(V1)

    completion = await paused_midway(inference, mode, sync)
    first, second = completion.versions
    assert (first.version, second.version) == (V0, V1)
    assert 0 == first.start < first.end == second.start
    assert second.end == len(completion.token_ids)


async def test_recompute_draws_from_the_new_weights_alone(
    micro_model: Path, tmp_path: Path, make_engine: MakeEngine
) -> None:
    """FR-106: after a recompute no key or value of the old weights is left."""
    other = make_micro_model(tmp_path / "m", seed=9)
    manifest = publish_model(other, tmp_path / "v1", V1)
    inference = make_engine()

    async def sync() -> None:
        await inference.load_weights(manifest)
        await inference.activate(V1)

    mixed = await paused_midway(inference, "recompute", sync)
    start = mixed.versions[1].start
    ids = np.concatenate([mixed.prompt_token_ids, mixed.token_ids[:start]])
    fresh = make_engine(other)
    (rest,) = await fresh.generate(Prompt(token_ids=ids), sampling=GREEDY)
    num_rest = len(mixed.token_ids) - start
    assert np.array_equal(mixed.token_ids[start:], rest.token_ids[:num_rest])


# --- faults -----------------------------------------------------------------------------------


async def test_a_cancelled_request_leaves_its_slots(make_engine: MakeEngine) -> None:
    inference = make_engine(max_batch=2)
    await inference.pause("keep")
    call = asyncio.create_task(inference.generate(make_prompt(0), sampling=GREEDY, n=5))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await inference.resume()
    assert inference.engine.num_waiting == inference.engine.num_running == 0
    assert inference.engine.counts.drawn_tokens == 0


async def test_a_drawing_that_is_left_before_its_answers_leaves_its_slots(
    make_engine: MakeEngine,
) -> None:
    """A client may be gone before the first byte is sent to it."""
    inference = make_engine()
    await inference.pause("keep")
    with inference.draw([GREEDY_CALL]):
        await asyncio.sleep(0)
        await inference.pause("keep")
        assert inference.engine.num_waiting == 1
    await inference.pause("keep")
    assert inference.engine.num_waiting == 0


async def test_an_abandoned_stream_leaves_its_slot(make_engine: MakeEngine) -> None:
    inference = make_engine()
    stream = inference.stream(GREEDY_CALL)
    await anext(stream)
    await stream.aclose()
    await inference.pause("keep")
    assert inference.engine.num_running == 0


async def test_an_exception_in_the_model_fails_requests_and_marks_health(
    make_engine: MakeEngine,
) -> None:
    inference = make_engine()

    def explode(*_: Any) -> None:
        raise RuntimeError("out of memory at layer 3")

    inference._runner.model.register_forward_pre_hook(explode)
    calls = [inference.generate(make_prompt(i), sampling=GREEDY) for i in range(3)]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(e, ServiceError) and "layer 3" in str(e) for e in errors)
    assert not (await inference.info()).healthy
    with pytest.raises(ServiceError, match="layer 3"):
        await inference.generate(make_prompt(0), sampling=GREEDY)
    with pytest.raises(ServiceError, match="layer 3"):
        await inference.pause("keep")


async def test_logits_that_are_not_finite_fail_the_request_alone(make_engine: MakeEngine) -> None:
    """FR-089: a token is never made up from NaN."""
    inference = make_engine()
    embedding = inference._runner.model.get_input_embeddings().weight
    embedding.data[3] = float("nan")
    poisoned = Prompt(token_ids=np.array([4, 3, 5], np.int32))
    healthy = Prompt(token_ids=np.array([4, 5], np.int32))
    sampling = replace(GREEDY, max_tokens=1)
    bad, good = await asyncio.gather(
        inference.generate(poisoned, sampling=sampling),
        inference.generate(healthy, sampling=sampling),
        return_exceptions=True,
    )
    assert isinstance(bad, ServiceError)
    assert not bad.retryable
    assert "not finite" in str(bad)
    assert isinstance(good, list)
    assert (await inference.info()).healthy


async def test_a_request_that_waits_too_long_names_the_pause(make_engine: MakeEngine) -> None:
    inference = make_engine(request_deadline_s=0.05)
    await inference.pause("keep")
    with pytest.raises(DeadlineError, match=r"0\.05 s \(engine paused"):
        await inference.generate(make_prompt(0), sampling=GREEDY)


async def test_closing_fails_what_runs_and_refuses_what_comes(make_engine: MakeEngine) -> None:
    inference = make_engine()
    await inference.pause("keep")
    call = asyncio.create_task(inference.generate(make_prompt(0), sampling=GREEDY))
    await asyncio.sleep(0)
    await inference.aclose()
    with pytest.raises(ServiceError, match="closed"):
        await call
    with pytest.raises(ServiceError, match="closed"):
        await inference.generate(make_prompt(0), sampling=GREEDY)


async def test_a_request_that_comes_while_the_engine_closes_is_told(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    inference = make_engine()
    await inference.generate(make_prompt(0), sampling=replace(GREEDY, max_tokens=1))
    await inference.pause("keep")
    request, executor = inference.new_request(GREEDY_CALL), inference.engine._thread
    shut_down = executor.shutdown

    def shut_down_after_a_request() -> None:
        inference.engine.submit([request])
        shut_down()

    monkeypatch.setattr(executor, "shutdown", shut_down_after_a_request)
    await inference.aclose()
    monkeypatch.undo()
    event = await asyncio.wait_for(request.inbox.get(), 10)
    assert isinstance(event, EndEvent)
    assert "closed" in str(event.error)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_context": 65}, "65 is more than the model's own limit of 64"),
        ({"device": "nonsense"}, "nonsense"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(
    make_engine: MakeEngine, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        make_engine(**settings)


def test_a_folder_without_a_model_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json|config\.json"):
        make_engine(tmp_path)
