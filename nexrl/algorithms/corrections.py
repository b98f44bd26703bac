"""Off-policy correction between engine and trainer: a weight for each trained token.

The engine drew tokens from the behavior policy; the loss starts from the proximal one, as the
trainer recomputes it. c = proximal / behavior repairs the difference. The trainer computes these
weights once per optimizer step, on numpy, and sends them as the loss input `correction`, which
multiplies the policy term: no gradient flows through them by construction. They are no part of any
denominator: what a bound zeroes stays counted in `weight`, so that masking never raises the effective
learning rate (denominator class ii).

    level      c of a token
    token      exp(proximal logprob - behavior logprob)
    sequence   product over the trained tokens of its row
    geometric  geometric mean over the trained tokens of its row

    action     weight
    none       1
    truncate   clip(c, low, high)
    mask       c within [low, high], else 0 for the unit (token, or row for the other levels)
    reject     c, or 0 for a whole row that has a unit beyond [low, high]

Products are sums of logs, and a log is held within +-MAX_LOG_DIFFERENCE before it is exponentiated:
weights are finite whatever the row's length (FR-088). A product over hundreds of tokens leaves any
bounds as soon as engine and trainer differ by a little on each: prefer token or geometric for long
rows, and watch `correction/masked_share`.

Sources: truncated importance sampling (TIS), Yao et al. 2025; masked importance sampling (MIS) by token,
sequence and geometric mean, Liu et al. 2025 ("When Speed Kills Stability"); IcePop, Ring-1T 2025; the
decoupled objective, AReaL 2025, is `ppo` with recomputed proximal logprobs and any of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.array_namespace import MAX_LOG_DIFFERENCE, row_mean, row_sum
from nexrl.errors import ConfigError

Level = Literal["token", "sequence", "geometric"]
Action = Literal["none", "truncate", "mask", "reject"]
LEVELS: Final = ("token", "sequence", "geometric")
ACTIONS: Final = ("none", "truncate", "mask", "reject")
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionPreset:
    """One name of `trainer.algorithm.correction`."""

    level: Level
    """Unit of the ratio."""
    action: Action
    """What a ratio beyond the bounds does."""
    low: float | None = None
    """Lower bound of c; None is none."""
    high: float | None = None
    """Upper bound of c; None is none."""


CORRECTION_PRESETS: Final[Mapping[str, CorrectionPreset]] = {
    "none": CorrectionPreset(level="token", action="none"),
    "tis": CorrectionPreset(level="token", action="truncate", high=2.0),
    "mis": CorrectionPreset(level="token", action="mask", high=2.0),
    "icepop": CorrectionPreset(level="token", action="mask", low=0.5, high=5.0),
    "sequence_mis": CorrectionPreset(level="sequence", action="mask", high=2.0),
    "geo_mask": CorrectionPreset(level="geometric", action="mask", low=0.999, high=1.001),
}


def correction_weights(
    proximal: npt.NDArray[np.floating],
    behavior: npt.NDArray[np.floating],
    rows: npt.NDArray[np.integer],
    *,
    level: Level = "token",
    action: Action = "none",
    low: float | None = None,
    high: float | None = None,
) -> tuple[Float64Array, npt.NDArray[np.bool_]]:
    """Weights [n] of the policy term, and flags [n] of the tokens that a bound zeroes.

    `proximal`, `behavior` [n] logprobs of trained tokens, `rows` [n] number of each token's row. A
    token whose behavior logprob is unknown (not finite) has ratio 1 (FR-089); the trainer counts
    it in `mismatch/unknown_share`. ConfigError on an unknown name or on bounds that exclude all.
    """
    _check(level, action, low, high)
    masked = np.zeros(len(proximal), np.bool_)
    if action == "none" or not len(proximal):
        return np.ones(len(proximal)), masked
    difference = proximal.astype(np.float64) - behavior
    difference[~np.isfinite(behavior)] = 0.0
    log_ratio = {"token": lambda d, _: d, "sequence": row_sum, "geometric": row_mean}[level](
        difference, rows
    )
    log_low = -np.inf if not low else np.log(low)
    log_high = np.inf if high is None else np.log(high)
    if action == "truncate":
        log_ratio = np.clip(log_ratio, log_low, log_high)
    else:
        masked = (log_ratio < log_low) | (log_ratio > log_high)
        if action == "reject":
            masked = row_sum(masked.astype(np.float64), rows) > 0
    weights = np.exp(np.clip(log_ratio, -MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE))
    weights[masked] = 0.0
    return weights, masked


def _check(level: str, action: str, low: float | None, high: float | None) -> None:
    for key, value, accepted in (("level", level, LEVELS), ("action", action, ACTIONS)):
        if value not in accepted:
            raise ConfigError(
                f"trainer.algorithm.correction.{key}: {value!r} is not one of {list(accepted)}"
            )
    if high is not None and high <= (low or 0.0):
        raise ConfigError(
            f"trainer.algorithm.correction.high must be above low ({low or 0.0}), got {high}"
        )
