"""Off-policy corrections: weights by hand, finite products, an unchanged denominator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from nexrl.algorithms.aggregation import token_weights
from nexrl.algorithms.corrections import CORRECTION_PRESETS, correction_weights
from nexrl.algorithms.losses import LOSSES
from nexrl.errors import ConfigError

ROWS = np.array([0, 0, 1])


def weights(ratios: list[float], rows: Any = ROWS, **settings: Any) -> Any:
    """Weights of tokens with these ratios proximal / behavior."""
    return correction_weights(np.log(ratios), np.zeros(len(ratios)), rows, **settings)[0]


def preset(name: str) -> dict[str, Any]:
    found = CORRECTION_PRESETS[name]
    return {k: getattr(found, k) for k in ("level", "action", "low", "high")}


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [4.0, 0.5, 3.0]), ("sequence", [2.0, 2.0, 3.0])],
)
def test_the_unit_of_the_ratio_is_a_token_or_a_row(level: str, expected: list[float]) -> None:
    assert weights([4.0, 0.5, 3.0], level=level, action="truncate") == pytest.approx(expected)


def test_the_geometric_mean_of_a_row_does_not_depend_on_its_length() -> None:
    found = weights([4.0, 0.5, 3.0], level="geometric", action="truncate")
    assert found == pytest.approx([math.sqrt(2)] * 2 + [3.0])


@pytest.mark.parametrize(
    ("action", "expected", "zeroed"),
    [
        ("none", [1.0, 1.0, 1.0], [False] * 3),
        ("truncate", [2.0, 0.8, 1.5], [False] * 3),  # capped at 2, raised to 0.8
        ("mask", [0.0, 0.0, 1.5], [True, True, False]),
        ("reject", [0.0, 0.0, 1.5], [True, True, False]),
    ],
)
def test_what_a_ratio_beyond_the_bounds_does(
    action: Any, expected: list[float], zeroed: list[bool]
) -> None:
    found, masked = correction_weights(
        np.log([4.0, 0.5, 1.5]), np.zeros(3), ROWS, action=action, low=0.8, high=2.0
    )
    assert found == pytest.approx(expected)
    assert masked.tolist() == zeroed


def test_masking_zeroes_a_token_and_rejecting_its_whole_row() -> None:
    given: dict[str, Any] = {"high": 2.0}
    assert weights([4.0, 1.0, 1.5], action="mask", **given) == pytest.approx([0.0, 1.0, 1.5])
    assert weights([4.0, 1.0, 1.5], action="reject", **given) == pytest.approx([0.0, 0.0, 1.5])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", [1.0, 1.0, 1.0]),
        ("tis", [2.0, 0.4, 1.0005]),
        ("mis", [0.0, 0.4, 1.0005]),
        ("icepop", [4.0, 0.0, 1.0005]),
        ("sequence_mis", [1.6, 1.6, 1.0005]),
        ("geo_mask", [0.0, 0.0, 1.0005]),
    ],
)
def test_presets_by_hand(name: str, expected: list[float]) -> None:
    assert weights([4.0, 0.4, 1.0005], **preset(name)) == pytest.approx(expected)


def test_products_over_long_rows_stay_finite_and_are_flagged() -> None:
    """FR-088: 300 tokens of mean log-ratio 0.005, and 300 ratios 0.8 / 0.7."""
    rows = np.zeros(300, np.int64)
    for ratio in (math.exp(0.005), 0.8 / 0.7, math.exp(-80), math.exp(80)):
        for level in ("token", "sequence", "geometric"):
            found = weights([ratio] * 300, rows, level=level, action="truncate")
            assert np.isfinite(found).all()
    settings: dict[str, Any] = {"action": "mask", "high": 3.0}
    assert weights([math.exp(0.005)] * 300, rows, level="sequence", **settings).sum() == 0.0
    assert (weights([math.exp(0.005)] * 300, rows, level="geometric", **settings) > 0).all()


def test_a_token_without_an_engine_logprob_has_ratio_1() -> None:
    """FR-089: logprobs [-.1, null, -.3] under a policy that gives -.2 to each."""
    behavior = np.array([-0.1, np.nan, -0.3])
    found, masked = correction_weights(
        np.full(3, -0.2), behavior, ROWS, level="token", action="mask", low=0.5, high=2.0
    )
    assert found == pytest.approx([math.exp(-0.1), 1.0, math.exp(0.1)])
    assert not masked.any()


def test_masking_never_raises_the_weight_of_what_is_left() -> None:
    """FR-038: ten tokens, six masked, losses of the others sum to 4: 0.4, not 1."""
    ratios = [1.0] * 4 + [9.0] * 6
    rows = np.repeat([0, 1], [4, 6])
    correction = weights(ratios, rows, **preset("mis"))
    per_row = token_weights(np.array([4, 6]), np.arange(2), "token_mean")
    inputs = {"advantage": np.ones(10), "correction": correction}
    term = LOSSES["reinforce"].term({"logprobs": np.full(10, -1.0)}, inputs, {})
    assert np.dot(term, per_row[rows]) == pytest.approx(0.4)


def test_weights_do_not_depend_on_how_rows_are_ordered_or_split() -> None:
    generator = np.random.default_rng(0)
    ratios, rows = np.exp(generator.normal(size=9)), np.array([2, 0, 1, 0, 2, 2, 1, 0, 1])
    for name in CORRECTION_PRESETS:
        whole = weights(ratios.tolist(), rows, **preset(name))
        for row in range(3):
            part = weights(ratios[rows == row].tolist(), np.zeros(3, np.int64), **preset(name))
            np.testing.assert_allclose(whole[rows == row], part)


def test_no_tokens_give_no_weights() -> None:
    assert weights([], ROWS[:0], **preset("geo_mask")).tolist() == []


def test_impossible_settings_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"correction\.level"):
        weights([1.0] * 3, level="row")
    with pytest.raises(ConfigError, match=r"correction\.action"):
        weights([1.0] * 3, action="drop")
    with pytest.raises(ConfigError, match="above low"):
        weights([1.0] * 3, action="mask", low=2.0, high=1.0)
