"""Draws: right distribution, own seed, honest logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nexrl.services.inference.engines.builtin.sampler import DrawSettings, draw, uniforms

CASE = torch.tensor([[0.5, 0.3, 0.2]]).log()


def make_settings(num_rows: int, **fields: Any) -> DrawSettings:
    values: dict[str, Any] = {
        "seeds": np.arange(num_rows, dtype=np.uint64),
        "positions": np.zeros(num_rows, np.int64),
        "temperature": np.ones(num_rows, np.float32),
        "top_p": np.ones(num_rows, np.float32),
        "top_k": np.zeros(num_rows, np.int64),
    }
    for name, value in fields.items():
        values[name] = np.full(num_rows, value, values[name].dtype)
    return DrawSettings(**values)


def shares(tokens: np.ndarray[Any, Any], vocab: int) -> np.ndarray[Any, Any]:
    return np.bincount(tokens, minlength=vocab) / len(tokens)


def test_small_seeds_and_positions_give_uniform_numbers() -> None:
    seeds, positions = np.divmod(np.arange(40_000), 200)
    numbers = uniforms(seeds.astype(np.uint64), positions)
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(2000)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[:-200], numbers[200:])[0, 1]) < 0.02


def test_tokens_come_with_their_probability() -> None:
    tokens, _ = draw(CASE.expand(20_000, 3), make_settings(20_000))
    np.testing.assert_allclose(shares(tokens, 3), [0.5, 0.3, 0.2], atol=0.02)


def test_temperature_shapes_the_distribution_and_the_logprob_follows_it() -> None:
    tokens, logprobs = draw(CASE.expand(20_000, 3), make_settings(20_000, temperature=0.5))
    tempered = np.array([0.25, 0.09, 0.04]) / 0.38
    np.testing.assert_allclose(shares(tokens, 3), tempered, atol=0.02)
    np.testing.assert_allclose(logprobs, np.log(tempered)[tokens], atol=1e-5)


def test_nucleus_logprob_is_that_of_the_kept_set() -> None:
    """FR-083: p = [.5, .3, .2], top_p = .8 keeps two tokens; token 0 is ln .625, not ln .5."""
    tokens, logprobs = draw(CASE.expand(2000, 3), make_settings(2000, top_p=0.75))
    assert set(tokens) == {0, 1}
    np.testing.assert_allclose(logprobs[tokens == 0], np.log(0.625), atol=1e-5)


def test_top_k_keeps_exactly_k_even_among_ties() -> None:
    tokens, logprobs = draw(torch.zeros(2000, 8), make_settings(2000, top_k=3))
    assert len(set(tokens)) == 3
    np.testing.assert_allclose(logprobs, np.log(1 / 3), atol=1e-5)


def test_truncation_of_one_row_leaves_the_others_alone() -> None:
    logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    settings = make_settings(6)
    settings.top_k[2] = 1
    tokens, logprobs = draw(logits, settings)
    plain_tokens, plain_logprobs = draw(logits, make_settings(6))
    others = [0, 1, 3, 4, 5]
    assert np.array_equal(tokens[others], plain_tokens[others])
    assert np.array_equal(logprobs[others], plain_logprobs[others])
    assert tokens[2] == int(logits[2].argmax())
    assert logprobs[2] == 0.0


def test_temperature_zero_is_greedy_beside_rows_that_are_not() -> None:
    logits = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
    settings = make_settings(64)
    settings.temperature[::2] = 0.0
    tokens, logprobs = draw(logits, settings)
    assert np.array_equal(tokens[::2], logits[::2].argmax(-1).numpy())
    expected = torch.log_softmax(logits, -1).numpy()[np.arange(64), tokens]
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)
    assert not np.array_equal(tokens[1::2], logits[1::2].argmax(-1).numpy())


def test_a_draw_does_not_depend_on_its_place_in_the_batch() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    alone, _ = draw(logits, make_settings(1, seeds=99, positions=4))
    crowd = make_settings(50)
    crowd.seeds[37], crowd.positions[37] = 99, 4
    tokens, _ = draw(logits.expand(50, 30), crowd)
    assert tokens[37] == alone[0]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(5000, 5)
    tokens, logprobs = draw(logits, make_settings(5000))
    assert set(tokens) == {1, 3}
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)
