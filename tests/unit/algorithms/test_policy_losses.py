"""Token losses by hand: reinforce, importance sampling, ppo, bapo, cispo, dppo."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.algorithms.loss_definition import Settings
from nexrl.algorithms.losses import LOSSES
from nexrl.errors import ConfigError


def given(ratios: list[float], advantages: list[float], prob: float = 0.1) -> tuple[Any, Any]:
    """Outputs and inputs whose tokens have these ratios to a proximal policy of probability `prob`."""
    proximal = np.full(len(ratios), math.log(prob))
    inputs = {
        "weight": np.ones(len(ratios)),
        "advantage": np.array(advantages),
        "proximal_logprobs": proximal,
    }
    return {"logprobs": proximal + np.log(ratios)}, inputs


def term(
    name: str, ratios: list[float], advantages: list[float], config: Settings | None = None
) -> Any:
    return LOSSES[name].term(*given(ratios, advantages), config or {})


def slope(name: str, ratio: float, advantage: float, **inputs: float) -> float:
    """The gradient of the term by the logprob."""
    outputs, arrays = given([ratio], [advantage])
    logprobs = torch.tensor(outputs["logprobs"], requires_grad=True)
    tensors = {k: torch.tensor(v) for k, v in arrays.items()}
    tensors |= {k: torch.tensor([v], dtype=torch.float64) for k, v in inputs.items()}
    LOSSES[name].term({"logprobs": logprobs}, tensors, {}).sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.item()


def flags(name: str, ratios: list[float], advantages: list[float], **config: Any) -> list[Any]:
    clips = LOSSES[name].clips
    assert clips is not None
    outputs, inputs = given(ratios, advantages)
    return [f.tolist() for f in clips(outputs, inputs, LOSSES[name].resolve(config))]


def test_numbers_by_hand() -> None:
    logprobs = {"logprobs": np.array([-0.5, -2.0])}
    assert LOSSES["cross_entropy"].term(logprobs, {}, {}).tolist() == [0.5, 2.0]
    advantage = {"advantage": np.array([3.0, -1.0])}
    assert LOSSES["reinforce"].term(logprobs, advantage, {}).tolist() == [1.5, -2.0]
    assert term("importance_sampling", [0.5], [2.0]) == pytest.approx([-1.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 1.0, -1.28),  # beyond the upper clip: bounded
        (1.5, -1.0, 1.5),  # pushed back: not clipped
        (0.5, -1.0, 0.8),  # beyond the lower clip: bounded
        (0.5, 1.0, -0.5),  # pushed back: not clipped
        (9.0, -1.0, 9.0),  # the side that dual clip is for
    ],
)
def test_ppo_takes_the_pessimistic_side(ratio: float, advantage: float, expected: float) -> None:
    assert term("ppo", [ratio], [advantage]) == pytest.approx([expected])


def test_dual_clip_bounds_only_negative_advantages() -> None:
    result = term("ppo", [9.0, 9.0], [-1.0, 1.0], {"dual_clip": 3.0})
    assert result == pytest.approx([3.0, -1.28])


def test_clips_are_counted_where_they_remove_the_gradient() -> None:
    ratios, advantages = [0.5, 0.5, 1.5, 1.5, 9.0], [1.0, -1.0, 1.0, -1.0, -1.0]
    low, high = flags("ppo", ratios, advantages, dual_clip=3.0)
    assert low == [False, True, False, False, False]
    assert high == [False, False, True, False, True]


@pytest.mark.parametrize("name", ["ppo", "dppo"])
def test_a_flagged_token_has_no_gradient_and_any_other_has_one(name: str) -> None:
    for ratio in (0.1, 0.9, 1.1, 3.0):
        for advantage in (-1.0, 1.0):
            low, high = flags(name, [ratio], [advantage])
            assert (slope(name, ratio, advantage) == 0.0) == (low[0] or high[0])


# --- cispo --------------------------------------------------------------------------------------


def test_cispo_weighs_the_logprob_by_a_capped_ratio() -> None:
    """A = 2, ratio 9, cap 5: the gradient is -10, not 0 as in ppo."""
    logprob = math.log(0.9)
    assert term("cispo", [9.0], [2.0]) == pytest.approx([-5.0 * 2.0 * logprob])
    assert slope("cispo", 9.0, 2.0) == pytest.approx(-10.0)
    assert slope("cispo", 0.01, -2.0) == pytest.approx(0.02)


def test_cispo_has_a_lower_bound_only_when_it_is_given() -> None:
    low, high = flags("cispo", [0.01, 9.0], [1.0, 1.0])
    assert (low, high) == ([False, False], [False, True])
    low, high = flags("cispo", [0.01, 9.0], [1.0, 1.0], clip_low=0.5)
    assert low == [True, False]
    bounded = term("cispo", [0.01], [1.0], {"clip_low": 0.5})
    assert bounded == pytest.approx([-0.5 * math.log(0.001)])


# --- dppo ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prob", "ratio", "advantage", "expected"),
    [
        (0.1, 2.0, 1.0, -2.0),  # 0.1 -> 0.2: ratio 2, but the distribution moved by 0.1 only
        (0.1, 3.0, 1.0, 0.0),  # 0.1 -> 0.3: too far up
        (0.1, 3.0, -1.0, 3.0),  # pushed back
        (0.8, 0.7, -1.0, 0.0),  # 0.8 -> 0.56: too far down, where ppo's 0.7 would be close
        (0.8, 0.7, 1.0, -0.7),  # pushed back
    ],
)
def test_dppo_masks_by_how_far_the_probability_moved(
    prob: float, ratio: float, advantage: float, expected: float
) -> None:
    outputs, inputs = given([ratio], [advantage], prob)
    assert LOSSES["dppo"].term(outputs, inputs, {}) == pytest.approx([expected])


def test_dppo_measures_from_the_behavior_policy_and_weighs_from_the_proximal_one() -> None:
    """Proximal 0.1, behavior 0.02, now 0.2: the ratio is 2, and 0.18 from behavior is too far."""
    outputs, inputs = given([2.0], [1.0])
    inputs["behavior_logprobs"] = np.log([0.02])
    assert LOSSES["dppo"].term(outputs, inputs, {}) == pytest.approx([0.0])
    assert LOSSES["dppo"].term(outputs, inputs, {"clip_high": 0.2}) == pytest.approx([-2.0])


# --- bapo ---------------------------------------------------------------------------------------


def bounds(ratios: list[float], advantages: list[float], **config: Any) -> tuple[float, float]:
    prepare = LOSSES["bapo"].prepare
    assert prepare is not None
    settings = prepare(*given(ratios, advantages), LOSSES["bapo"].resolve(config)).settings
    assert set(settings) == {"clip_low", "clip_high"}
    return float(settings["clip_low"] or 0.0), float(settings["clip_high"] or 0.0)


def test_bapo_keeps_its_first_bounds_when_rewarded_tokens_have_their_share() -> None:
    assert bounds([1.0, 1.0], [1.0, -1.0]) == pytest.approx((0.4, 0.2))


def test_bapo_raises_the_upper_bound_first_and_no_further_than_needed() -> None:
    """P = min(3, c), N = 2.4: 40% needs P = 1.6, the ninth value 1.2 + 8 x 0.05."""
    assert bounds([3.0, 2.4], [1.0, -1.0]) == pytest.approx((0.4, 0.6))


def test_bapo_moves_the_lower_bound_when_the_upper_one_has_reached_its_end() -> None:
    """P = 3 at its end and N = 6 max(rho, c_low) with rho 0.2, which only grows with c_low: 6 x 0.76
    > 4.5, so the search runs to both ends."""
    assert bounds([3.0, 0.2], [1.0, -8.0]) == pytest.approx((0.1, 2.0))


def test_bapo_ends_at_its_first_bounds_when_there_is_nothing_to_balance() -> None:
    assert bounds([3.0, 3.0], [-1.0, -1.0]) == pytest.approx((0.4, 0.2))
    assert bounds([], []) == pytest.approx((0.4, 0.2))


@pytest.mark.parametrize("config", [{"clip_low": 0.05}, {"clip_high": 2.5}])
def test_bapo_refuses_bounds_that_begin_beyond_their_end(config: Settings) -> None:
    with pytest.raises(ConfigError, match="clip_low must be at least clip_low_end"):
        LOSSES["bapo"].resolve(config)


def test_bapo_counts_what_the_loss_counts() -> None:
    """The weight of a token, and a correction that zeroes it, change its share."""
    outputs, inputs = given([3.0, 2.4, 5.0], [1.0, -1.0, -1.0])
    prepare, settings = LOSSES["bapo"].prepare, LOSSES["bapo"].resolve({})
    assert prepare is not None
    masked = {**inputs, "correction": np.array([1.0, 1.0, 0.0])}
    unweighted = {**inputs, "weight": np.array([1.0, 1.0, 0.0])}
    for arrays in (masked, unweighted):
        assert prepare(outputs, arrays, settings).settings["clip_high"] == pytest.approx(0.6)


def test_bapo_with_the_bounds_found_is_ppo_with_them() -> None:
    outputs, inputs = given([3.0, 2.4, 0.3], [1.0, -1.0, -0.5])
    found = {"clip_low": 0.3, "clip_high": 0.6}
    np.testing.assert_array_equal(
        LOSSES["bapo"].term(outputs, inputs, found), LOSSES["ppo"].term(outputs, inputs, found)
    )
