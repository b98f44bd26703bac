"""Numbers about a training step as sums and counts, so that any split of it gives the same ones.

A trainer adds trained tokens, all at once or chunk by chunk, then reads the results.
Every metric states its unit of averaging in `METRIC_UNITS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.advantage_definition import AdvantageInputs, Advantages
from nexrl.algorithms.groups import group_statistics
from nexrl.algorithms.kl import KL_ESTIMATORS, k3
from nexrl.algorithms.loss_definition import (
    Inputs,
    LossDefinition,
    Outputs,
    Settings,
    policy_ratio,
)
from nexrl.algorithms.preference_metrics import PREFERENCE_METRIC_UNITS
from nexrl.algorithms.segments import sum_of_products

Values = npt.NDArray[Any]
Formula = Callable[..., float | None]
_TOKEN = "trained tokens of the batch"  # noqa: S105 - a unit, not a password
_TRAJECTORY = "trained trajectories of the batch"
_JUDGED = f"{_TRAJECTORY}, or over its trained tokens where the estimator judges tokens"
_GROUP = "baseline groups of the batch"
_STEP = "optimizer steps of the batch"

METRIC_UNITS: Final[Mapping[str, str]] = {
    "loss/policy": f"weighted sum over an optimizer step, mean over {_STEP}",
    "loss/kl": f"weighted sum over an optimizer step with its coefficient, mean over {_STEP}",
    "loss/entropy": f"weighted sum over an optimizer step with its coefficient, mean over {_STEP}",
    "loss/total": f"weighted sum as differentiated by the train service, mean over {_STEP}",
    "loss/clip_low": f"lower clip that the loss found for an optimizer step, mean over {_STEP}",
    "loss/clip_high": f"upper clip that the loss found for an optimizer step, mean over {_STEP}",
    "ratio/mean": f"the loss's own ratio (a row's for row losses), mean over {_TOKEN}",
    "ratio/max": f"the loss's own ratio, max over {_TOKEN}",
    "ratio/clip_share_low": f"share of {_TOKEN} whose gradient the loss's lower bound removes "
    "(or caps, where it only caps)",
    "ratio/clip_share_high": f"share of {_TOKEN} whose gradient the loss's upper bound removes "
    "(or caps, where it only caps)",
    **{f"kl/{name}": f"mean over {_TOKEN}, policy against reference" for name in KL_ESTIMATORS},
    "kl/proximal": f"k3 of proximal against policy, mean over {_TOKEN}",
    "entropy": f"nats, mean over {_TOKEN}",
    "entropy/coefficient": "adaptive coefficient that the batch was trained with",
    "mismatch/abs_mean": f"|trainer - engine logprob|, mean over {_TOKEN} with an engine logprob "
    "before the first optimizer step",
    "mismatch/max": f"|trainer - engine logprob|, max over {_TOKEN} of the same",
    "mismatch/kl": f"k3 of engine against trainer, mean over {_TOKEN} of the same",
    "mismatch/stale_abs_mean": "mismatch/abs_mean over tokens of rows older than the batch's "
    "version",
    **{
        f"mismatch/abs_mean_{place}": f"mismatch/abs_mean over tokens {where} of a row"
        for place, where in (
            ("to_64", "0 to 63 of the trained tokens"),
            ("to_512", "64 to 511 of the trained tokens"),
            ("to_4096", "512 to 4095 of the trained tokens"),
            ("from_4096", "4096 and later of the trained tokens"),
        )
    },
    "mismatch/unknown_share": f"share of {_TOKEN} without an engine logprob",
    "correction/ess": f"effective sample size (sum c)^2 / sum c^2 as a share of {_TOKEN}",
    "correction/masked_share": f"share of {_TOKEN} that the correction zeroes",
    "values/mean": f"critic's value before the batch, mean over {_TOKEN}",
    "values/return_mean": f"what the critic shall learn, mean over {_TOKEN}",
    "values/explained_variance": "1 - variance of (return - value before the batch) / variance of "
    f"returns, over {_TOKEN}; absent when returns do not vary",
    "values/clip_share": f"share of {_TOKEN} whose gradient the value clip removes",
    "values/loss": f"weighted sum over an optimizer step of the critic, mean over {_STEP}",
    "values/grad_norm": "before clipping, mean over the critic's optimizer steps of the batch",
    "advantage/mean": f"mean over {_JUDGED}",
    "advantage/std": f"population standard deviation over {_JUDGED}",
    "advantage/max_abs": f"max over {_JUDGED}",
    "advantage/positive_share": f"share of {_JUDGED}",
    "reward/trained_mean": f"mean over {_TRAJECTORY}",
    "reward/trained_std": f"population standard deviation over {_TRAJECTORY}",
    "reward/trained_min": f"min over {_TRAJECTORY}",
    "reward/trained_max": f"max over {_TRAJECTORY}",
    "reward/group_std": f"population standard deviation within a group, mean over {_GROUP}",
    "reward/abstained": "trajectories without a reward, left out",
    "reward/shaped_mean": f"after length and truncation penalties, mean over {_TRAJECTORY}",
    "reward/masked": "truncated trajectories left out of the loss and its denominator",
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
    "train/trajectories": "trained trajectories of the batch",
    **PREFERENCE_METRIC_UNITS,
}


class MetricSums:
    """Means, maxima and functions of sums under construction.

    Invariant: `result()` depends on the multiset of values added, not on how calls split it
    (up to rounding of float64 sums).
    """

    def __init__(self) -> None:
        self._sums: dict[str, npt.NDArray[np.float64]] = {}
        self._formulas: dict[str, Formula] = {}
        self._maxima: dict[str, float] = {}

    def add_sums(self, name: str, formula: Formula, sums: Sequence[float]) -> None:
        """Parts of sums of which `name` becomes `formula(*totals)`. The last one is a count; with
        none, or where the formula gives None, the metric is absent."""
        self._formulas[name] = formula
        self._sums[name] = self._sums.get(name, 0.0) + np.array(sums, np.float64)

    def add_mean(self, name: str, values: Values) -> None:
        """Values of which `name` becomes the mean."""
        self.add_sums(name, _mean, (values.sum(dtype=np.float64), values.size))

    def add_max(self, name: str, values: Values) -> None:
        """Values of which `name` becomes the maximum."""
        if values.size:
            self._maxima[name] = max(self._maxima.get(name, -np.inf), float(values.max()))

    def result(self) -> dict[str, float]:
        """Every metric by name; one without any value is absent."""
        found = {
            name: self._formulas[name](*sums.tolist())
            for name, sums in self._sums.items()
            if sums[-1]
        }
        return {n: value for n, value in found.items() if value is not None} | self._maxima


def _mean(total: float, count: float) -> float:
    return total / count


def _moments(values: Values) -> tuple[float, float, float]:
    wide = values.astype(np.float64, copy=False)
    return float(wide.sum()), sum_of_products(wide, wide), float(wide.size)


def _variance(total: float, squares: float, count: float) -> float:
    return max(0.0, squares / count - (total / count) ** 2)


def _effective_share(total: float, squares: float, count: float) -> float:
    return total * total / (squares * count) if squares else 0.0


def _explained(
    errors: float, error_squares: float, total: float, squares: float, count: float
) -> float | None:
    spread = _variance(total, squares, count)
    # What remains of equal returns after the subtraction is rounding.
    if spread <= 1e-12 * squares / count:
        return None
    return 1.0 - _variance(errors, error_squares, count) / spread


def add_ratio(
    sums: MetricSums,
    loss: LossDefinition,
    outputs: Outputs,
    inputs: Inputs,
    settings: Settings,
) -> None:
    """ratio/* and kl/proximal of [n] trained tokens by the loss's own rule; nothing without
    `proximal_logprobs`.

    The ratio is the one that the loss clips or weighs by (for gspo a row's), and a clip counts only
    where it acts on the gradient. `settings` are resolved or not.
    """
    if "proximal_logprobs" not in inputs:
        return
    logprobs, proximal = outputs["logprobs"], inputs["proximal_logprobs"]
    own = (
        policy_ratio(logprobs, inputs) if loss.ratio_of is None else loss.ratio_of(outputs, inputs)
    )
    sums.add_mean("ratio/mean", own)
    sums.add_max("ratio/max", own)
    if loss.clips is not None:
        low, high = loss.clips(outputs, inputs, loss.resolve(settings))
        sums.add_mean("ratio/clip_share_low", low)
        sums.add_mean("ratio/clip_share_high", high)
    # Tokens come from the proximal policy, so its KL to the present one is the one they estimate.
    sums.add_mean("kl/proximal", k3(proximal, logprobs))


def add_correction(sums: MetricSums, weights: Values, masked: Values) -> None:
    """correction/* of [n] trained tokens from what `corrections.correction_weights` returned."""
    sums.add_sums("correction/ess", _effective_share, _moments(weights))
    sums.add_mean("correction/masked_share", masked)


def add_values(
    sums: MetricSums, loss: LossDefinition, outputs: Outputs, inputs: Inputs, settings: Settings
) -> None:
    """values/* of [n] trained tokens of a critic.

    outputs: values; inputs: returns, old_values; `loss` is the definition of `value`.
    """
    returns, old = inputs["returns"], inputs["old_values"]
    errors = _moments(returns - old)[:2]
    sums.add_mean("values/mean", old)
    sums.add_mean("values/return_mean", returns)
    sums.add_sums("values/explained_variance", _explained, (*errors, *_moments(returns)))
    if loss.clips is not None:
        low, high = loss.clips(outputs, inputs, loss.resolve(settings))
        sums.add_mean("values/clip_share", low | high)


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


def reward_metrics(inputs: AdvantageInputs, advantages: Advantages | Values) -> dict[str, float]:
    """advantage/*, reward/* and group/* of n trajectories, each counted once (FR-079).

    Advantages of tokens are counted by token, those of trajectories by trajectory. The spread within
    groups and over the batch are apart: the latter can be large while no group carries a signal
    (FR-056).
    """
    rewards = inputs.rewards
    if not len(rewards):
        return {}
    statistics = group_statistics(rewards, inputs.groups)
    deviations = rewards - statistics.means[statistics.inverse]
    variances = np.bincount(statistics.inverse, weights=deviations**2) / statistics.sizes
    return {
        **advantage_metrics(_judged(advantages)),
        "reward/trained_mean": float(rewards.mean()),
        "reward/trained_std": float(rewards.std()),
        "reward/trained_min": float(rewards.min()),
        "reward/trained_max": float(rewards.max()),
        "reward/group_std": float(np.sqrt(variances).mean()),
        "group/constant_share": float(statistics.constant.mean()),
        "group/size_mean": float(statistics.sizes.mean()),
    }


def _judged(advantages: Advantages | Values) -> Values:
    if not isinstance(advantages, Advantages):
        return advantages
    per_token = advantages.per_token
    return np.asarray(advantages.per_trajectory if per_token is None else per_token)


def advantage_metrics(advantages: Values) -> dict[str, float]:
    """advantage/* of [n] advantages, of trajectories or of tokens."""
    if not advantages.size:
        return {}
    return {
        "advantage/mean": float(advantages.mean(dtype=np.float64)),
        "advantage/std": float(advantages.std(dtype=np.float64)),
        "advantage/max_abs": float(max(advantages.max(), -advantages.min())),
        "advantage/positive_share": float((advantages > 0).mean()),
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
