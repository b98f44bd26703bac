"""InstantInference keeps the contract that it stands in for."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from nexrl.errors import ContextOverflowError, InvariantError, ServiceError
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.makers import make_version
from nexrl.types import Completion, Prompt, RowChunk, Sampling, WeightManifest

PROMPT = Prompt(token_ids=np.array([5, 6], np.int32))


def manifest(number: int) -> WeightManifest:
    return WeightManifest(version=make_version(number), path="", tensors=(), num_bytes=0)


async def draw(engine: InstantInference, **sampling: object) -> Completion:
    fields = {"max_tokens": 16, "seed": 1, **sampling}
    return (await engine.generate(PROMPT, sampling=Sampling(**fields)))[0]  # type: ignore[arg-type]


async def test_tokens_follow_from_the_seed() -> None:
    one, same = await draw(InstantInference()), await draw(InstantInference())
    other = await draw(InstantInference(), seed=2)
    assert one.token_ids.tolist() == same.token_ids.tolist() != other.token_ids.tolist()


async def test_greedy_ignores_the_seed() -> None:
    engine = InstantInference()
    one = await draw(engine, temperature=0.0, seed=1)
    assert (
        one.token_ids.tolist() == (await draw(engine, temperature=0.0, seed=2)).token_ids.tolist()
    )


async def test_short_max_tokens_end_by_length_and_long_ones_by_eos() -> None:
    engine = InstantInference(num_tokens=8)
    cut, whole = await draw(engine, max_tokens=3), await draw(engine)
    assert (len(cut.token_ids), cut.finish_reason) == (3, "length")
    assert (len(whole.token_ids), whole.finish_reason, whole.token_ids[-1]) == (8, "eos", 2)


async def test_score_agrees_with_the_logprobs_of_the_draw_and_changes_with_the_version() -> None:
    engine = InstantInference()
    completion = await draw(engine)
    row = np.concatenate([PROMPT.token_ids, completion.token_ids])
    chunk = RowChunk.from_rows([row])
    scored = await engine.score(chunk)
    assert completion.logprobs is not None
    assert scored[2:] == pytest.approx(completion.logprobs)
    assert scored[0] == 0.0
    await engine.load_weights(manifest(1))
    assert np.abs(await engine.score(chunk) - scored).max() > 0.01


async def test_tokens_are_stamped_with_the_version_that_was_activated() -> None:
    engine = InstantInference()
    await engine.load_weights(manifest(1))
    assert (await draw(engine)).versions[0].version == make_version(0)
    await engine.activate(make_version(1))
    assert (await draw(engine)).versions[0].version == make_version(1)


async def test_a_version_that_was_not_loaded_cannot_be_activated() -> None:
    engine = InstantInference()
    with pytest.raises(InvariantError, match=r"cannot activate actor@0.2"):
        await engine.activate(make_version(2))


async def test_nothing_is_answered_while_paused() -> None:
    engine = InstantInference()
    await engine.pause("keep")
    waiting = asyncio.create_task(draw(engine))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    await engine.resume()
    assert len((await waiting).token_ids) == 8


async def test_no_room_in_the_context_names_both_numbers() -> None:
    with pytest.raises(ContextOverflowError, match="2 tokens, the context 2"):
        await draw(InstantInference(max_context=2))


async def test_failures_come_at_the_asked_rate() -> None:
    engine = InstantInference(failure_rate=0.5)
    results = await asyncio.gather(*(draw(engine) for _ in range(100)), return_exceptions=True)
    assert 20 < sum(isinstance(r, ServiceError) for r in results) < 80


async def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ServiceError, match="no policy 'critic'"):
        await InstantInference().generate(PROMPT, sampling=Sampling(), policy="critic")
