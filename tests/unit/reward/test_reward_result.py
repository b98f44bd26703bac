"""What a reward function may return, and what it may not."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from nexrl.errors import RewardError
from nexrl.services.reward.protocol import RewardResult
from nexrl.services.reward.result import to_result


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (Fraction(1, 4), 0.25),
        ([0.5], 0.5),
        (None, None),
        (RewardResult(value=2.0), 2.0),
    ],
)
def test_numbers_of_any_kind_and_none_are_accepted(returned: Any, value: float | None) -> None:
    result = to_result(returned, "f")
    assert result.value == value
    assert value is None or type(result.value) is float


def test_value_of_named_parts_is_their_sum() -> None:
    result = to_result({"right": 1, "format": np.float64(0.25)}, "f")
    assert (result.value, result.parts) == (1.25, {"right": 1.0, "format": 0.25})


def test_parts_that_abstain_are_left_out() -> None:
    """FR-070."""
    result = to_result({"right": 1.0, "style": None}, "f")
    assert (result.value, result.parts) == (1.0, {"right": 1.0})


def test_all_parts_abstaining_is_not_zero() -> None:
    """FR-071."""
    assert to_result({"right": None, "style": None}, "f").value is None


def test_a_reward_result_decides_its_own_value() -> None:
    result = to_result(RewardResult(value=0.1, parts={"a": 5.0}), "f")
    assert (result.value, result.parts) == (0.1, {"a": 5.0})


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (float("nan"), "returned nan"),
        (float("-inf"), "returned -inf"),
        ("1.0", "'1.0' of type str"),
        (b"1", "of type bytes"),
        (1 + 2j, "of type complex"),
        (object, "of type type"),
        ([], "0 values, expected 1"),
        ([0.5, 0.5, 0.5], "3 values, expected 1"),
        (np.array([0.5, 0.5]), "2 values, expected 1"),
        ({}, "empty mapping"),
        ({"a": "1"}, "of type str in part 'a'"),
        ({"a": float("nan")}, "nan in part 'a'"),
        ({1: 0.5}, "a part named 1"),
        (RewardResult(value=float("inf")), "returned inf"),
    ],
)
def test_anything_else_is_an_error_that_names_function_and_value(returned: Any, named: str) -> None:
    """FR-061: never broadcast, never 0."""
    with pytest.raises(RewardError) as caught:
        to_result(returned, "my_reward")
    assert "reward function my_reward returned" in str(caught.value)
    assert named in str(caught.value)
