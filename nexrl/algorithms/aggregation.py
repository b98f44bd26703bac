"""Loss denominators: the weight of a trained token in each row, over a whole optimizer step.

The trainer computes these once per optimizer step, before any chunk is sent, and every additive
term of the loss is multiplied by them. Rows and trajectories without a trained token are in no
denominator (FR-028, FR-032); what a correction later zeroes stays in it.

With R rows, T trajectories, n_r trained tokens of row r, N = sum n_r and m_t those of a trajectory:

    token_mean                1 / N                            DAPO 2025, eq. 8
    sequence_mean_token_mean  1 / (R n_r)                      GRPO, DeepSeekMath 2024, eq. 3
    sequence_mean_token_sum   1 / R
    constant                  1 / (T max_response_tokens)      Dr. GRPO 2025
    trajectory_mean           1 / (T m_t), m_t over all rows of the trajectory
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from nexrl.errors import ConfigError

Float64Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]

AGGREGATIONS: Final[Mapping[str, str]] = {
    "token_mean": "mean over all trained tokens",
    "sequence_mean_token_mean": "mean over rows of the mean over a row's trained tokens",
    "sequence_mean_token_sum": "mean over rows of the sum over a row's trained tokens",
    "constant": "sum over trained tokens / (trajectories x longest response allowed)",
    "trajectory_mean": "mean over trajectories of the mean over all their trained tokens",
}


def token_weights(
    num_trained: IndexArray,
    trajectories: IndexArray,
    method: str,
    *,
    max_response_tokens: int = 0,
) -> Float64Array:
    """[R] weight of every trained token of row r; 0 for rows without trained tokens.

    `num_trained` [R] trained tokens per row, `trajectories` [R] index of each row's trajectory,
    `max_response_tokens` the longest response allowed, for `constant` only.
    """
    if method not in AGGREGATIONS:
        raise ConfigError(
            f"trainer.algorithm.loss.aggregation: {method!r} is not one of {sorted(AGGREGATIONS)}"
        )
    if method == "constant" and max_response_tokens < 1:
        raise ConfigError(
            "trainer.algorithm.loss.aggregation: constant needs the longest response allowed, "
            f"rollout_worker.sampling.max_tokens, got {max_response_tokens}"
        )
    weights = np.zeros(len(num_trained), np.float64)
    active = num_trained > 0
    if not active.any():
        return weights
    lengths = num_trained[active].astype(np.float64)
    _, inverse = np.unique(trajectories[active], return_inverse=True)
    tokens_of = np.bincount(inverse, weights=lengths)
    num_rows, num_trajectories = float(len(lengths)), float(len(tokens_of))
    denominators = {
        "token_mean": np.full(len(lengths), lengths.sum()),
        "sequence_mean_token_mean": num_rows * lengths,
        "sequence_mean_token_sum": np.full(len(lengths), num_rows),
        "constant": np.full(len(lengths), num_trajectories * max_response_tokens),
        "trajectory_mean": num_trajectories * tokens_of[inverse],
    }
    weights[active] = 1.0 / denominators[method]
    return weights
