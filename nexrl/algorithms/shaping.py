"""Shaping: what length and truncation do to rewards, before advantages.

The trainer calls `shape_rewards` on a batch's rewards and `trained_after_masking` on its
trajectories. `reward/*` metrics stay those of the rewards as they were given.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.groups import Float64Array, IndexArray
from nexrl.errors import ConfigError

BoolArray = npt.NDArray[np.bool_]


def soft_overlong(
    lengths: IndexArray,
    *,
    max_response_tokens: int,
    overlong_cache: int,
) -> Float64Array:
    """[T] soft overlong punishment, between -1 and 0 (DAPO, Yu et al. 2025, eq. 13).

    With l = length, L = `max_response_tokens`, C = `overlong_cache`:
    0 for l <= L - C;  ((L - C) - l) / C for L - C < l <= L, so -1 at L;  -1 for l > L.

    L is the longest response that can be drawn, its cache included (20,480 with a cache of 4,096).
    Length alone decides: a response cut by the end of the context before L is not punished here.
    """
    if not 0 < overlong_cache <= max_response_tokens:
        raise ConfigError(
            "trainer.algorithm.shaping.overlong_cache must be at least 1 and at most the longest "
            f"response, {max_response_tokens} tokens, got {overlong_cache}"
        )
    beyond = (lengths - (max_response_tokens - overlong_cache)) / overlong_cache
    return 0.0 - np.clip(beyond, 0.0, 1.0)


def shape_rewards(
    rewards: Float64Array,
    lengths: IndexArray,
    *,
    max_response_tokens: int,
    overlong_cache: int | None,
    overlong_penalty: float,
    length_penalty: float,
) -> Float64Array:
    """[T] reward + overlong_penalty x soft punishment - length_penalty x length, a new array.

    rewards: [T] as given. lengths: [T] trained tokens of each trajectory over all its rows.
    max_response_tokens: longest response in tokens.
    overlong_cache: tokens before it in which the punishment grows; None turns it off.
    """
    shaped = rewards - length_penalty * lengths
    if overlong_cache is None or not overlong_penalty:
        return shaped
    return shaped + overlong_penalty * soft_overlong(
        lengths, max_response_tokens=max_response_tokens, overlong_cache=overlong_cache
    )


def trained_after_masking(truncated: BoolArray, *, mask_truncated: bool) -> BoolArray:
    """[T] which trajectories stay in the loss and in its denominator.

    Overlong filtering (DAPO, Yu et al. 2025, section 3.4): the loss of truncated samples is masked.
    They are taken out before the batch's denominator is made, so the others weigh as if they had
    been alone (FR-032); their rewards still count in the baseline of their group, as in the paper.
    """
    return ~truncated if mask_truncated else np.ones(len(truncated), np.bool_)
