"""KL estimators, denominators and corrections once more: one number at a time, from the papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Graded = tuple[float, float]
"""Value and derivative with respect to the logprob of the policy."""


# --- KL, Schulman 2020: d = logprob - reference logprob ---------------------------------------------


def k1(logprob: float, reference: float) -> Graded:
    """d; d(k1) = 1."""
    return logprob - reference, 1.0


def k2(logprob: float, reference: float) -> Graded:
    """d^2 / 2; d(k2) = d."""
    difference = logprob - reference
    return difference * difference / 2.0, difference


def k3(logprob: float, reference: float) -> Graded:
    """exp(-d) - 1 + d; d(k3) = 1 - exp(-d)."""
    difference = logprob - reference
    return math.exp(-difference) - 1.0 + difference, 1.0 - math.exp(-difference)


def straight_through(name: str, logprob: float, reference: float, frozen: float) -> Graded:
    """Value of the estimator, gradient of k2: sg(k) + k2 - sg(k2), the named one at `frozen`."""
    moving, slope = k2(logprob, reference)
    return PLAIN[name](frozen, reference)[0] + moving - k2(frozen, reference)[0], slope


PLAIN: dict[str, Callable[[float, float], Graded]] = {"k1": k1, "k2": k2, "k3": k3}
KL_NAMES = (*PLAIN, "k1+", "k3+")


def kl(name: str, logprob: float, reference: float, frozen: float | None = None) -> Graded:
    """The named estimator; `frozen` is the logprob inside stop-gradients."""
    if not name.endswith("+"):
        return PLAIN[name](logprob, reference)
    held = logprob if frozen is None else frozen
    return straight_through(name[:-1], logprob, reference, held)


# --- denominators ---------------------------------------------------------------------------------


AGGREGATION_NAMES = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant",
    "trajectory_mean",
)
CORRECTION_NAMES = ("none", "tis", "mis", "icepop", "sequence_mis", "geo_mask")


def token_weight(
    method: str, row: int, num_trained: Sequence[int], trajectories: Sequence[int], longest: int
) -> float:
    """Weight of each trained token of `row`; a row without any is in no denominator."""
    live = [r for r in range(len(num_trained)) if num_trained[r] > 0]
    if row not in live:
        return 0.0
    num_trajectories = len({trajectories[r] for r in live})
    own = trajectories[row]
    in_trajectory = sum(num_trained[r] for r in live if trajectories[r] == own)
    return {
        "token_mean": 1.0 / sum(num_trained[r] for r in live),
        "sequence_mean_token_mean": 1.0 / len(live) / num_trained[row],
        "sequence_mean_token_sum": 1.0 / len(live),
        "constant": 1.0 / (num_trajectories * longest),
        "trajectory_mean": 1.0 / num_trajectories / in_trajectory,
    }[method]


# --- corrections ----------------------------------------------------------------------------------


def correction(
    log_ratios: Sequence[float],
    rows: Sequence[int],
    level: str,
    action: str,
    low: float,
    high: float,
) -> tuple[list[float], list[bool]]:
    """Weight of each token, and whether a bound zeroes it; low and high are 0 and inf where none.

    TIS, Yao et al. 2025: min(c, C). MIS, Liu et al. 2025: c where the unit is within bounds, else 0.
    `reject` zeroes a whole row that has a unit beyond.
    """
    units = []
    for row in rows:
        own = [x for x, other in zip(log_ratios, rows, strict=True) if other == row]
        total = math.fsum(own)
        units.append({"sequence": total, "geometric": total / len(own)}.get(level))
    ratios = [
        math.exp(x if unit is None else unit) for x, unit in zip(log_ratios, units, strict=True)
    ]
    if action == "none":
        return [1.0] * len(ratios), [False] * len(ratios)
    if action == "truncate":
        return [min(max(c, low), high) for c in ratios], [False] * len(ratios)
    beyond = [not low <= c <= high for c in ratios]
    if action == "reject":
        bad = {row for row, out in zip(rows, beyond, strict=True) if out}
        beyond = [row in bad for row in rows]
    return [0.0 if out else c for c, out in zip(ratios, beyond, strict=True)], beyond
