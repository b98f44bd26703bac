"""Numbers about a training step as sums and counts, so that any split of it gives the same ones.

A trainer adds trained tokens, all at once or chunk by chunk, then reads the results.
Every metric states its unit of averaging in `METRIC_UNITS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.advantages import AdvantageInputs, group_statistics
from nexrl.algorithms.array_namespace import log_difference
from nexrl.algorithms.kl import KL_ESTIMATORS, k3

Values = npt.NDArray[Any]
_TOKEN = "trained tokens of the batch"  # noqa: S105 - a unit, not a password
_TRAJECTORY = "trained trajectories of the batch"
_GROUP = "baseline groups of the batch"
_STEP = "optimizer steps of the batch"

METRIC_UNITS: Final[Mapping[str, str]] = {
    "loss/policy": f"weighted sum over an optimizer step, mean over {_STEP}",
    "loss/kl": f"weighted sum over an optimizer step with its coefficient, mean over {_STEP}",
    "loss/entropy": f"weighted sum over an optimizer step with its coefficient, mean over {_STEP}",
    "loss/total": f"weighted sum as differentiated by the train service, mean over {_STEP}",
    "ratio/mean": f"mean over {_TOKEN}",
    "ratio/max": f"max over {_TOKEN}",
    "ratio/clip_share_low": f"share of {_TOKEN} whose gradient the lower clip removes",
    "ratio/clip_share_high": f"share of {_TOKEN} whose gradient the upper clip removes",
    "kl/k1": f"mean over {_TOKEN}, policy against reference",
    "kl/k2": f"mean over {_TOKEN}, policy against reference",
    "kl/k3": f"mean over {_TOKEN}, policy against reference",
    "kl/proximal": f"k3 of proximal against policy, mean over {_TOKEN}",
    "entropy": f"nats, mean over {_TOKEN}",
    "mismatch/abs_mean": f"|trainer - engine logprob|, mean over {_TOKEN} with an engine logprob "
    "before the first optimizer step",
    "mismatch/max": f"|trainer - engine logprob|, max over {_TOKEN} of the same",
    "mismatch/kl": f"k3 of engine against trainer, mean over {_TOKEN} of the same",
    "mismatch/stale_abs_mean": "mismatch/abs_mean over tokens of rows older than the batch's "
    "version",
    "mismatch/unknown_share": f"share of {_TOKEN} without an engine logprob",
    "advantage/mean": f"mean over {_TRAJECTORY}",
    "advantage/std": f"population standard deviation over {_TRAJECTORY}",
    "advantage/max_abs": f"max over {_TRAJECTORY}",
    "reward/trained_mean": f"mean over {_TRAJECTORY}",
    "reward/trained_std": f"population standard deviation over {_TRAJECTORY}",
    "reward/trained_min": f"min over {_TRAJECTORY}",
    "reward/trained_max": f"max over {_TRAJECTORY}",
    "reward/group_std": f"population standard deviation within a group, mean over {_GROUP}",
    "reward/abstained": "trajectories without a reward, left out",
    "group/constant_share": f"share of {_GROUP} without spread",
    "group/size_mean": f"trajectories, mean over {_GROUP}",
    "response_length/mean": f"trained tokens, mean over {_TRAJECTORY}",
    "response_length/min": f"trained tokens, min over {_TRAJECTORY}",
    "response_length/max": f"trained tokens, max over {_TRAJECTORY}",
    "response_length/truncated_share": f"share of {_TRAJECTORY}",
    "nll/token": f"nats, mean over {_TOKEN}",
    "grad_norm": f"before clipping, mean over {_STEP}",
    "lr": "of the batch's last optimizer step",
    "optimizer/skipped": "optimizer steps whose gradient was not finite",
    "train/tokens": "trained tokens of the batch",
}


class MetricSums:
    """Means and maxima under construction.

    Invariant: `result()` depends on the multiset of values added, not on how calls split it
    (means up to rounding of float64 sums).
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, float] = {}

    def add_mean(self, name: str, values: Values) -> None:
        """Values of which `name` becomes the mean."""
        self._sums[name] = self._sums.get(name, 0.0) + float(values.sum(dtype=np.float64))
        self._counts[name] = self._counts.get(name, 0) + int(values.size)

    def add_max(self, name: str, values: Values) -> None:
        """Values of which `name` becomes the maximum."""
        if values.size:
            self._maxima[name] = max(self._maxima.get(name, -np.inf), float(values.max()))

    def result(self) -> dict[str, float]:
        """Every metric by name; one without any value is absent."""
        means = {name: self._sums[name] / n for name, n in self._counts.items() if n}
        return {**means, **self._maxima}


def add_ratio(
    sums: MetricSums,
    logprobs: Values,
    proximal: Values,
    advantage: Values,
    *,
    clip_low: float,
    clip_high: float,
) -> None:
    """ratio/* and kl/proximal of [n] trained tokens.

    A clip counts only where it removes the gradient: low where the advantage is negative and the
    ratio below 1 - clip_low, high where it is positive and the ratio above 1 + clip_high.
    """
    difference = log_difference(logprobs, proximal)
    ratio = np.exp(difference)
    sums.add_mean("ratio/mean", ratio)
    sums.add_max("ratio/max", ratio)
    sums.add_mean("ratio/clip_share_low", (ratio < 1.0 - clip_low) & (advantage < 0))
    sums.add_mean("ratio/clip_share_high", (ratio > 1.0 + clip_high) & (advantage > 0))
    # Tokens come from the proximal policy, so its KL to the present one is the one they estimate.
    sums.add_mean("kl/proximal", k3(proximal, logprobs))


def add_reference_kl(sums: MetricSums, logprobs: Values, reference: Values, estimator: str) -> None:
    """kl/<estimator> of [n] trained tokens: the estimator that is trained, by name (FR-098)."""
    sums.add_mean(f"kl/{estimator}", KL_ESTIMATORS[estimator](logprobs, reference))


def add_mismatch(sums: MetricSums, logprobs: Values, behavior: Values, stale: Values) -> None:
    """mismatch/* of [n] tokens with an engine logprob, at the weights the batch began with.

    `stale` marks tokens of rows that an older version drew.
    """
    distance = np.abs(logprobs - behavior)
    sums.add_mean("mismatch/abs_mean", distance)
    sums.add_max("mismatch/max", distance)
    sums.add_mean("mismatch/kl", k3(behavior, logprobs))
    sums.add_mean("mismatch/stale_abs_mean", distance[stale])


def reward_metrics(inputs: AdvantageInputs, advantages: Values) -> dict[str, float]:
    """advantage/*, reward/* and group/* of n trajectories, each counted once (FR-079).

    The spread within groups and over the batch are apart: the latter can be large while no group
    carries a signal (FR-056).
    """
    rewards = inputs.rewards
    if not len(rewards):
        return {}
    statistics = group_statistics(rewards, inputs.groups)
    deviations = rewards - statistics.means[statistics.inverse]
    variances = np.bincount(statistics.inverse, weights=deviations**2) / statistics.sizes
    return {
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std()),
        "advantage/max_abs": float(np.abs(advantages).max()),
        "reward/trained_mean": float(rewards.mean()),
        "reward/trained_std": float(rewards.std()),
        "reward/trained_min": float(rewards.min()),
        "reward/trained_max": float(rewards.max()),
        "reward/group_std": float(np.sqrt(variances).mean()),
        "group/constant_share": float(statistics.constant.mean()),
        "group/size_mean": float(statistics.sizes.mean()),
    }


def length_metrics(lengths: Values, truncated: Values) -> dict[str, float]:
    """response_length/* of n trajectories from their trained tokens and truncation flags."""
    if not len(lengths):
        return {}
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/min": float(lengths.min()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated_share": float(truncated.mean()),
    }
