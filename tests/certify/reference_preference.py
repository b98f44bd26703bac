"""Preference losses once more: one pair, response or step end at a time, from the papers.

Each function is (entry, settings) -> (loss, derivative with respect to each live number). An entry
holds the numbers of one position of `PREFERENCE_INPUTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

Entry = Mapping[str, float]
Graded = tuple[float, dict[str, float]]


def _sigma(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _softplus(x: float) -> float:
    """log(1 + exp(x)) = -log sigma(-x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _margin(entry: Entry) -> float:
    """d_w - d_l, d = logp - reference logp."""
    chosen = entry["chosen_logprobs"] - entry["reference_chosen_logprobs"]
    return chosen - (entry["rejected_logprobs"] - entry["reference_rejected_logprobs"])


def _of_margin(loss: float, slope: float, entry: Entry, s: Entry) -> Graded:
    """A loss of d_w - d_l, plus sft_coefficient times cross entropy per chosen token."""
    slopes = {"chosen_logprobs": slope, "rejected_logprobs": -slope}
    if s.get("sft_coefficient"):
        per_token = s["sft_coefficient"] / entry["chosen_lengths"]
        loss -= per_token * entry["chosen_logprobs"]
        slopes["chosen_logprobs"] -= per_token
    return loss, slopes


def dpo(entry: Entry, s: Entry) -> Graded:
    """Rafailov et al. 2023, eq. 7; label smoothing e: Mitchell 2023."""
    x, e = s["beta"] * _margin(entry), s["label_smoothing"]
    loss = (1.0 - e) * _softplus(-x) + e * _softplus(x)
    slope = s["beta"] * (-(1.0 - e) * _sigma(-x) + e * _sigma(x))
    return _of_margin(loss, slope, entry, s)


def ipo(entry: Entry, s: Entry) -> Graded:
    """Azar et al. 2023, eq. 17."""
    gap = _margin(entry) - 1.0 / (2.0 * s["beta"])
    return _of_margin(gap * gap, 2.0 * gap, entry, s)


def hinge(entry: Entry, s: Entry) -> Graded:
    """Liu et al. 2023 (RSO), hinge-norm."""
    room = 1.0 - s["beta"] * _margin(entry)
    return _of_margin(max(0.0, room), -s["beta"] if room > 0 else 0.0, entry, s)


def simpo(entry: Entry, s: Entry) -> Graded:
    """Meng et al. 2024, eq. 6."""
    chosen = s["beta"] / entry["chosen_lengths"]
    rejected = s["beta"] / entry["rejected_lengths"]
    x = chosen * entry["chosen_logprobs"] - rejected * entry["rejected_logprobs"] - s["margin"]
    loss, slopes = _of_margin(_softplus(-x), 0.0, entry, s)
    slopes["chosen_logprobs"] += -_sigma(-x) * chosen
    slopes["rejected_logprobs"] += _sigma(-x) * rejected
    return loss, slopes


def orpo(entry: Entry, s: Entry) -> Graded:
    """Hong et al. 2024, eqs. 4, 6, 7; d(log odds)/d(mean logprob) = 1 / (1 - p)."""
    means, odds, inverse = {}, {}, {}
    for side in ("chosen", "rejected"):
        means[side] = entry[f"{side}_logprobs"] / entry[f"{side}_lengths"]
        probability = math.exp(means[side])
        odds[side] = math.log(probability / (1.0 - probability))
        inverse[side] = 1.0 / (1.0 - probability)
    x = odds["chosen"] - odds["rejected"]
    loss = -means["chosen"] + s["odds_coefficient"] * _softplus(-x)
    pull = -s["odds_coefficient"] * _sigma(-x)
    return loss, {
        "chosen_logprobs": (-1.0 + pull * inverse["chosen"]) / entry["chosen_lengths"],
        "rejected_logprobs": -pull * inverse["rejected"] / entry["rejected_lengths"],
    }


def kto(entry: Entry, s: Entry) -> Graded:
    """Ethayarajh et al. 2024, eq. 8; z0 has no gradient."""
    sign = 1.0 if entry["desirable"] else -1.0
    weight = s["desirable_weight"] if entry["desirable"] else s["undesirable_weight"]
    difference = entry["logprobs"] - entry["reference_logprobs"]
    value = _sigma(sign * s["beta"] * (difference - entry["z0"]))
    slope = -weight * value * (1.0 - value) * sign * s["beta"]
    return weight * (1.0 - value), {"logprobs": slope}


def reward_model(entry: Entry, s: Entry) -> Graded:
    """Ouyang et al. 2022, eq. 1; margin: Llama 2 2023, eq. 2."""
    margin = entry.get("margin", s["margin"])
    x = entry["chosen_scores"] - entry["rejected_scores"] - margin
    return _softplus(-x), {"chosen_scores": -_sigma(-x), "rejected_scores": _sigma(-x)}


def process_reward_model(entry: Entry, s: Entry) -> Graded:
    """Lightman et al. 2023: cross entropy; its derivative is sigma(s) - y."""
    score, label = entry["scores"], entry["labels"]
    loss = label * _softplus(-score) + (1.0 - label) * _softplus(score)
    return loss, {"scores": _sigma(score) - label}


PREFERENCE: dict[str, Callable[[Entry, Entry], Graded]] = {
    "dpo": dpo,
    "ipo": ipo,
    "hinge": hinge,
    "simpo": simpo,
    "orpo": orpo,
    "kto": kto,
    "reward_model": reward_model,
    "process_reward_model": process_reward_model,
}
