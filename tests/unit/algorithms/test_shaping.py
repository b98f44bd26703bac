"""Overlong punishment, length penalty and overlong mask, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nexrl.algorithms.shaping import shape_rewards, soft_overlong, trained_after_masking
from nexrl.errors import ConfigError


def shape(lengths: list[int], **settings: Any) -> list[float]:
    """Rewards of 1, shaped."""
    defaults: dict[str, Any] = {
        "max_response_tokens": 20,
        "overlong_cache": 4,
        "overlong_penalty": 1.0,
        "length_penalty": 0.0,
    }
    shaped = shape_rewards(
        np.ones(len(lengths)),
        np.array(lengths, np.int64),
        **{**defaults, **settings},
    )
    found: list[float] = shaped.tolist()
    return found


def test_the_punishment_grows_linearly_over_the_cache() -> None:
    """DAPO eq. 13 with L = 20 and C = 4."""
    assert shape([0, 15, 16, 17, 18, 20, 21, 99]) == [1.0, 1.0, 1.0, 0.75, 0.5, 0.0, 0.0, 0.0]


def test_the_papers_numbers() -> None:
    lengths = np.array([16_384, 18_432, 20_480, 20_481])
    found = soft_overlong(lengths, max_response_tokens=20_480, overlong_cache=4_096)
    assert found.tolist() == [0.0, -0.5, -1.0, -1.0]


def test_its_weight_is_the_penalty_at_the_longest_response() -> None:
    assert shape([18, 20], overlong_penalty=0.5) == [0.75, 0.5]


@pytest.mark.parametrize("off", [{"overlong_cache": None}, {"overlong_penalty": 0.0}])
def test_it_can_be_turned_off(off: dict[str, Any]) -> None:
    assert shape([20], **off) == [1.0]


@pytest.mark.parametrize("cache", [0, 21])
def test_a_cache_that_does_not_fit_is_refused_with_both_numbers(cache: int) -> None:
    with pytest.raises(ConfigError, match=rf"overlong_cache .* 20 tokens, got {cache}"):
        shape([1], overlong_cache=cache)


def test_each_trained_token_costs_the_length_penalty_beside_the_punishment() -> None:
    assert shape([10, 18], length_penalty=0.01) == pytest.approx([0.9, 0.32])


def test_given_rewards_are_not_changed() -> None:
    rewards = np.array([1.0])
    shape_rewards(
        rewards,
        np.array([20]),
        max_response_tokens=20,
        overlong_cache=4,
        overlong_penalty=1.0,
        length_penalty=1.0,
    )
    assert rewards.tolist() == [1.0]


def test_truncated_trajectories_leave_the_loss_only_when_asked() -> None:
    """FR-032."""
    truncated = np.array([False, True])
    assert trained_after_masking(truncated, mask_truncated=True).tolist() == [True, False]
    assert trained_after_masking(truncated, mask_truncated=False).tolist() == [True, True]
