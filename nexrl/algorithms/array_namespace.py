"""One formula for numpy and torch: the few functions in which their spelling differs.

Losses and KL estimators are written once. A train service evaluates them on torch tensors with
gradients; the trainer's metrics and the float64 tests evaluate them on numpy arrays. Torch is
never imported here: it is looked up among the loaded modules when an argument is not numpy.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

MAX_LOG_DIFFERENCE = 20.0
"""Bound on a difference of two logprobs before it is exponentiated: e^20 = 4.9e8. Without it a
difference of 80 has a float32 gradient whose square overflows, and one token stops the step."""


def namespace(array: Any) -> Any:
    """The module (numpy or torch) whose functions work on `array`."""
    return np if isinstance(array, np.ndarray | np.generic) else sys.modules["torch"]


def constant(array: Any) -> Any:
    """The same values without gradient (stop-gradient)."""
    return array if isinstance(array, np.ndarray | np.generic) else array.detach()


def log_difference(logprobs: Any, others: Any) -> Any:
    """`logprobs - others` within +-MAX_LOG_DIFFERENCE; the gradient is 0 beyond it."""
    xp = namespace(logprobs)
    return xp.clip(logprobs - others, -MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)


def row_sum(values: Any, rows: Any) -> Any:
    """[n] for each token, the sum of `values` [n] over the tokens of its row.

    `rows` [n] holds row numbers from 0, in any order; rows that own no token cost nothing.
    """
    if not len(values):
        return values
    if isinstance(values, np.ndarray):
        rows = rows.astype(np.int64, copy=False)
        sums = np.bincount(rows, weights=values).astype(values.dtype, copy=False)
        return sums[rows]
    rows = rows.long()
    sums = values.new_zeros(int(rows.max()) + 1).index_add(0, rows, values)
    return sums.index_select(0, rows)


def row_lengths(rows: Any, like: Any) -> Any:
    """[n] number of tokens in the row of each token, with the dtype of `like`."""
    return row_sum(namespace(like).ones_like(like), rows)


def row_mean(values: Any, rows: Any) -> Any:
    """[n] for each token, the mean of `values` [n] over the tokens of its row."""
    return row_sum(values, rows) / row_lengths(rows, constant(values))
