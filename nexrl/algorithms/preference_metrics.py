"""Accuracy and margins of preferences: how well rewards tell good responses from bad ones.

Pure functions of the inputs of a `PreferenceLoss`, over all entries at once, so that no split into
chunks or optimizer steps changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    Inputs,
    PreferenceLoss,
    Settings,
)

Values = npt.NDArray[Any]
_ENTRY = "pairs (kto: labelled responses) of the batch"
_STEP = "mean over entries of an optimizer step, mean over optimizer steps of the batch"

PREFERENCE_METRIC_UNITS: Final[Mapping[str, str]] = {
    **{f"loss/{name}": f"without imitation, {_STEP}" for name in PREFERENCE_LOSSES},
    "loss/imitation": f"cross entropy per token of chosen responses with its coefficient, {_STEP}",
    "preference/accuracy": f"share of {_ENTRY} whose chosen reward is the larger one (kto: of all "
    "combinations of a desirable and an undesirable response)",
    "preference/margin": f"reward of chosen minus rejected, mean over {_ENTRY}",
    "preference/reward_chosen": "mean over chosen (kto: desirable) responses of the batch",
    "preference/reward_rejected": "mean over rejected (kto: undesirable) responses of the batch",
    "preference/logprob_chosen": "nats, sum over a response, mean over chosen (kto: desirable) ones",
    "preference/logprob_rejected": "nats, sum over a response, mean over rejected (kto: "
    "undesirable) ones",
    "kto/z0": "nats, mean over labelled responses of their optimizer step's reference point",
    "process_reward_model/accuracy": "share of step ends of the batch",
    "process_reward_model/margin": "mean score of right step ends minus that of wrong ones",
    "process_reward_model/reward_chosen": "score, mean over right step ends of the batch",
    "process_reward_model/reward_rejected": "score, mean over wrong step ends of the batch",
}
"""Unit of averaging of what the trainers of preferences log; validation/* is over held-out rows."""


def preference_metrics(
    loss: PreferenceLoss, inputs: Inputs, settings: Settings
) -> dict[str, float]:
    """accuracy, margin, and means by side, of P entries as numpy arrays; absent where undefined.

    pair: accuracy is the share of pairs whose chosen reward is the larger one, margin the mean
    difference. labelled: the share of (desirable, undesirable) combinations in which the desirable
    reward is the larger one, and the difference of the two means. process: the share of step ends
    whose score has the sign of its label, and the same difference. Equal rewards count as wrong.
    """
    rewards = loss.rewards(inputs, settings)
    if loss.rows == "pair":
        chosen, rejected = rewards["chosen_"], rewards["rejected_"]
        metrics = {"accuracy": _mean(chosen > rejected), "margin": _mean(chosen - rejected)}
        sides = {"chosen": chosen, "rejected": rejected}
    else:
        good = _good(loss, inputs)
        sides = {"chosen": rewards[""][good], "rejected": rewards[""][~good]}
        metrics = {"margin": _mean(sides["chosen"]) - _mean(sides["rejected"])}
        if loss.rows == "process":
            metrics["accuracy"] = _mean(np.where(good, rewards[""], -rewards[""]) > 0)
        else:
            metrics["accuracy"] = share_outranked(sides["chosen"], sides["rejected"])
    metrics |= {f"reward_{side}": _mean(values) for side, values in sides.items()}
    metrics |= {f"logprob_{side}": _mean(v) for side, v in _logprobs(loss, inputs).items()}
    if "z0" in inputs:
        metrics["z0"] = _mean(inputs["z0"])
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def share_outranked(good: Values, bad: Values) -> float:
    """Share of all combinations in which the good value is larger (area under the ROC curve, ties
    counted as wrong); nan when either is empty."""
    if not len(good) or not len(bad):
        return float("nan")
    below = np.searchsorted(np.sort(bad), good, side="left")
    return float(below.mean() / len(bad))


def _good(loss: PreferenceLoss, inputs: Inputs) -> npt.NDArray[np.bool_]:
    if loss.rows == "labelled":
        return np.asarray(inputs["desirable"], np.bool_)
    return np.asarray(inputs["labels"] > 0.5, np.bool_)


def _logprobs(loss: PreferenceLoss, inputs: Inputs) -> dict[str, Values]:
    """Sums of logprobs by side; empty for losses on scores."""
    if loss.needs_scores:
        return {}
    if loss.rows == "pair":
        return {side: inputs[f"{side}_logprobs"] for side in ("chosen", "rejected")}
    good = _good(loss, inputs)
    return {"chosen": inputs["logprobs"][good], "rejected": inputs["logprobs"][~good]}


def _mean(values: Values) -> float:
    return float(np.mean(values, dtype=np.float64)) if len(values) else float("nan")
