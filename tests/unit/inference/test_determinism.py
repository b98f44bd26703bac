"""`deterministic: true`: a request has the same bits alone as among any others in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from nexrl.errors import ConfigError
from nexrl.services.inference.engines.builtin import decoder
from nexrl.services.inference.engines.builtin.service import BuiltinInference
from nexrl.types import Prompt, RowChunk, Sampling

MakeEngine = Callable[..., BuiltinInference]


def make_calls(num: int) -> list[tuple[Prompt, Sampling, int]]:
    rng = np.random.default_rng(num)
    return [
        (
            Prompt(token_ids=rng.integers(3, 16, rng.integers(2, 20)).astype(np.int32)),
            Sampling(
                max_tokens=int(rng.integers(1, 25)),
                temperature=float(rng.choice([0.0, 0.7, 1.0])),
                top_p=float(rng.choice([0.8, 1.0, 1.0])),
                seed=i,
            ),
            int(rng.integers(1, 5)),
        )
        for i in range(num)
    ]


def bits_of(completions: Sequence[object]) -> list[bytes]:
    return [c.token_ids.tobytes() + c.logprobs.tobytes() for c in completions]  # type: ignore[attr-defined]


async def run(
    inference: BuiltinInference, calls: Sequence[tuple[Prompt, Sampling, int]]
) -> list[list[bytes]]:
    answers = await asyncio.gather(*(inference.generate(p, sampling=s, n=n) for p, s, n in calls))
    return [bits_of(a) for a in answers]


@pytest.mark.parametrize("reference", [False, True], ids=["blocks", "alone"])
async def test_a_request_has_the_same_bits_alone_and_in_any_company(
    make_engine: MakeEngine, reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reference:
        monkeypatch.setattr(decoder, "rows_are_independent", lambda *_: False)
    inference = make_engine(deterministic=True, max_batch=40)
    expected = "alone" if reference else "blocks"
    assert (await inference.info()).capabilities["decoder"] == expected
    calls = make_calls(24)
    alone = [(await run(inference, [call]))[0] for call in calls]
    together = await run(inference, calls)
    shuffled = np.random.default_rng(1).permutation(len(calls))
    reordered = await run(inference, [calls[i] for i in shuffled])
    assert together == alone
    assert [reordered[int(np.flatnonzero(shuffled == i)[0])] for i in range(len(calls))] == alone


async def test_two_engines_agree_to_the_bit(make_engine: MakeEngine) -> None:
    first, second = (make_engine(deterministic=True) for _ in range(2))
    calls = make_calls(10)
    a, b = await asyncio.gather(run(first, calls), run(second, calls[::-1]))
    assert a == b[::-1]


async def test_a_score_has_the_same_bits_alone_and_in_a_chunk(make_engine: MakeEngine) -> None:
    inference = make_engine(deterministic=True)
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 16, n).astype(np.int32) for n in (3, 17, 1, 9, 30, 2)]
    together = await inference.score(RowChunk.from_rows(rows))
    alone = [await inference.score(RowChunk.from_rows([row])) for row in rows]
    assert together.tobytes() == np.concatenate(alone).tobytes()


async def test_without_it_tokens_still_depend_on_their_seed_alone(make_engine: MakeEngine) -> None:
    """Rounding may differ with the batch, the random numbers never do."""
    inference = make_engine()
    calls = make_calls(16)
    alone = [(await run(inference, [call]))[0] for call in calls]
    together = await run(inference, calls)
    sizes = [[len(b) // 8 * 4 for b in choices] for choices in alone]
    same = [
        a[:size] == b[:size]
        for mine, theirs, widths in zip(alone, together, sizes, strict=True)
        for a, b, size in zip(mine, theirs, widths, strict=True)
    ]
    assert np.mean(same) > 0.95


def test_it_is_refused_where_it_is_not_promised(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from nexrl.services.inference.engines.builtin import runner

    monkeypatch.setattr(runner, "_choose_device", lambda _: torch.device("meta"))
    with pytest.raises(ConfigError, match=r"deterministic.*cpu only.*meta"):
        make_engine(deterministic=True)
