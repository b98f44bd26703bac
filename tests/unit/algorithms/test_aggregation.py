"""Denominators: one for the whole optimizer step, whatever the split."""

from __future__ import annotations

import numpy as np
import pytest

from nexrl.algorithms.aggregation import AGGREGATIONS, Float64Array, token_weights
from nexrl.errors import ConfigError


def weights(
    lengths: list[int], method: str, owners: list[int] | None = None, longest: int = 8
) -> Float64Array:
    owners = owners if owners is not None else list(range(len(lengths)))
    return token_weights(np.array(lengths), np.array(owners), method, max_response_tokens=longest)


def loss(sums: list[float], lengths: list[int], method: str) -> float:
    return float(np.dot(weights(lengths, method), sums))


def test_weights_per_token_match_the_formula_of_each_method() -> None:
    """FR-034: lengths 2 and 8."""
    assert weights([2, 8], "token_mean").tolist() == [0.1, 0.1]
    assert weights([2, 8], "sequence_mean_token_mean").tolist() == [1 / 4, 1 / 16]
    assert weights([2, 8], "sequence_mean_token_sum").tolist() == [0.5, 0.5]
    assert weights([2, 8], "constant").tolist() == [1 / 16, 1 / 16]


def test_a_row_without_trained_tokens_is_in_no_denominator() -> None:
    """FR-028: A mask [1,1] loss 2 each, B masked; FR-029: lengths 4, 1, 0."""
    assert loss([4.0, 0.0], [2, 0], "token_mean") == pytest.approx(2.0)
    assert loss([4.0, 0.0], [2, 0], "sequence_mean_token_mean") == pytest.approx(2.0)
    assert loss([4.0, 3.0, 0.0], [4, 1, 0], "token_mean") == pytest.approx(1.4)
    assert loss([4.0, 3.0, 0.0], [4, 1, 0], "sequence_mean_token_mean") == pytest.approx(2.0)


def test_masked_rows_do_not_dilute_the_others() -> None:
    """FR-032: four tokens of loss 1, six masked tokens of a truncated row."""
    assert loss([4.0, 0.0], [4, 0], "token_mean") == pytest.approx(1.0)


def test_a_filter_leaves_the_denominator_and_a_correction_stays_in_it() -> None:
    """FR-038: ten tokens, four of them kept with losses that sum to 4."""
    filtered = loss([4.0, 0.0], [4, 0], "token_mean")
    corrected = loss([4.0, 0.0], [4, 6], "token_mean")
    assert [filtered, corrected] == pytest.approx([1.0, 0.4])


def test_token_mean_is_over_tokens_and_not_over_rows() -> None:
    """FR-035: lengths 1 and 9, losses 11 and nine times 1."""
    assert loss([11.0, 9.0], [1, 9], "token_mean") == pytest.approx(2.0)


def test_trajectory_mean_counts_a_trajectory_once_however_many_rows() -> None:
    """FR-047: three rows of one trajectory weigh as much as one row of the other."""
    result = weights([2, 2, 4, 8], "trajectory_mean", owners=[0, 0, 0, 1])
    assert result.tolist() == [1 / 16, 1 / 16, 1 / 16, 1 / 16]


def test_constant_counts_trajectories_and_not_rows() -> None:
    assert weights([2, 2, 4], "constant", owners=[0, 0, 1]).tolist() == [1 / 16] * 3


@pytest.mark.parametrize("method", sorted(AGGREGATIONS))
def test_nothing_to_train_gives_zero_and_no_nan(method: str) -> None:
    assert weights([0, 0], method).tolist() == [0.0, 0.0]
    assert weights([], method).tolist() == []


@pytest.mark.parametrize("method", sorted(AGGREGATIONS))
def test_order_of_rows_does_not_matter(method: str) -> None:
    forward = weights([3, 0, 5, 1], method, owners=[0, 0, 1, 2])
    backward = weights([1, 5, 0, 3], method, owners=[2, 1, 0, 0])
    np.testing.assert_array_equal(forward, backward[::-1])


def test_constant_without_a_longest_response_and_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        weights([1], "constant", longest=0)
    with pytest.raises(ConfigError, match="token_mean"):
        weights([1], "mean")
