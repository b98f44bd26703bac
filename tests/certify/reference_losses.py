"""A whole loss once more: references of single tokens and rows, summed with everything added.

    loss = sum_t weight_t (correction_t term_t + kl_coefficient sg(rho_t) k_t - entropy_coefficient H_t)

`graded` gives that sum and its gradient with respect to every output of the model. Numbers inside
stop-gradients are read from `frozen`, so that finite differences can hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.certify import reference_policy as policy
from tests.certify.reference_distillation import CANDIDATES
from tests.certify.reference_divergences import kl
from tests.certify.reference_sequences import ROWS

Float64 = npt.NDArray[np.float64]
Arrays = Mapping[str, Any]
Settings = Mapping[str, Any]

TOKENS: dict[str, Callable[[policy.Token, Settings], policy.Graded]] = {
    "cross_entropy": policy.cross_entropy,
    "reinforce": policy.reinforce,
    "importance_sampling": policy.importance_sampling,
    "ppo": policy.ppo,
    "bapo": policy.ppo,
    "cispo": policy.cispo,
    "dppo": policy.dppo,
    "sapo": policy.sapo,
    "clip_cov": policy.clip_cov,
    "kl_cov": policy.kl_cov,
    "reverse_kl": policy.reverse_kl,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedLoss:
    """A loss and its gradient."""

    loss: float
    """Sum of weight x term."""
    gradients: dict[str, Float64]
    """By output of the model, of the output's shape; 0 where the loss does not depend on it."""
    scale: float
    """Sum of |weight x term|: what the rounding of the loss is relative to."""


def known_losses() -> set[str]:
    """Names that have a reference."""
    return {*TOKENS, *ROWS, *CANDIDATES, *policy.VALUES}


def graded(
    name: str,
    outputs: Arrays,
    inputs: Arrays,
    settings: Settings,
    frozen: Arrays | None = None,
) -> GradedLoss:
    """The reference of loss `name`; `settings` are complete."""
    tokens = _tokens(outputs, inputs, frozen or outputs)
    gradients = {key: np.zeros(np.shape(array)) for key, array in outputs.items()}
    terms = [0.0] * len(tokens)
    weights = [token["weight"] for token in tokens]
    factors = [w * token.get("correction", 1.0) for w, token in zip(weights, tokens, strict=True)]
    if name in ROWS:
        for members in _rows(tokens):
            found, jacobian = ROWS[name]([tokens[t] for t in members], settings)
            for i, t in enumerate(members):
                terms[t] = factors[t] * found[i]
                for j, u in enumerate(members):
                    gradients["logprobs"][u] += factors[t] * jacobian[i][j]
    else:
        key, function = _single(name)
        for t, token in enumerate(tokens):
            term, slope = function(token, settings)
            terms[t] = factors[t] * term
            gradients[key][t] += factors[t] * np.asarray(slope)
    for t, token in enumerate(tokens):
        terms[t] += weights[t] * _regularisers(token, settings, gradients, t)
    return GradedLoss(
        loss=math.fsum(terms), gradients=gradients, scale=math.fsum(abs(x) for x in terms)
    )


def _single(name: str) -> tuple[str, Callable[[Any, Settings], tuple[float, Any]]]:
    if name in TOKENS:
        return "logprobs", TOKENS[name]
    if name in policy.VALUES:
        return "values", policy.VALUES[name]
    return "candidate_logprobs", CANDIDATES[name]


def _tokens(outputs: Arrays, inputs: Arrays, frozen: Arrays) -> list[dict[str, Any]]:
    count = len(inputs["weight"])
    arrays = {**inputs, **outputs}
    tokens = [
        {key: np.asarray(array, np.float64)[t].tolist() for key, array in arrays.items()}
        for t in range(count)
    ]
    for t, token in enumerate(tokens):
        if "logprobs" in frozen:
            token["frozen"] = float(frozen["logprobs"][t])
    return tokens


def _rows(tokens: list[dict[str, Any]]) -> list[list[int]]:
    rows: dict[float, list[int]] = {}
    for t, token in enumerate(tokens):
        rows.setdefault(token["row"], []).append(t)
    return list(rows.values())


def _regularisers(
    token: Mapping[str, Any], settings: Settings, gradients: dict[str, Float64], t: int
) -> float:
    """KL and entropy of one token; their derivatives are added where they belong."""
    total, weight = 0.0, token["weight"]
    if coefficient := settings.get("kl_coefficient"):
        value, slope = kl(
            settings["kl_estimator"],
            token["logprobs"],
            token["reference_logprobs"],
            token["frozen"],
        )
        if "proximal_logprobs" in token:
            coefficient *= policy.ratio(token, "frozen")
        total += coefficient * value
        gradients["logprobs"][t] += weight * coefficient * slope
    if coefficient := settings.get("entropy_coefficient"):
        total -= coefficient * token["entropy"]
        gradients["entropy"][t] -= weight * coefficient
    return total


def prepared_reference(
    name: str, outputs: Arrays, inputs: Arrays, settings: Settings
) -> dict[str, Any]:
    """What `prepare` shall find: settings and inputs by name; a draw is numpy's own by the seed."""
    tokens = _tokens(outputs, inputs, outputs)
    if name == "bapo":
        low, high = policy.bapo_bounds(tokens, settings)
        return {"clip_low": low, "clip_high": high}
    if name == "kl_cov":
        return {"selected": policy.most_covariant(tokens, settings)}
    if name == "clip_cov":
        candidates, count = policy.drawable(tokens, settings)
        drawn = np.random.default_rng(settings["seed"]).choice(candidates, count, replace=False)
        return {"selected": [t in drawn for t in range(len(tokens))]}
    return {}
