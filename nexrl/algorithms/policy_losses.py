"""Policy losses that judge each token by itself, after reinforce and ppo.

Shapes: logprobs, advantage, proximal_logprobs and every result are [n], over trained tokens.
rho = exp(logprob - proximal logprob), A the advantage, sg no gradient. Every term is minimised and
multiplied by the token's weight; what a clip or a mask removes keeps its place in the denominator.

    reinforce            -A logprob
    importance_sampling  -rho A
    ppo                  max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A); dual_clip c: <= c |A|
    bapo                 ppo with bounds found for each optimizer step
    cispo                -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logprob
    dppo                 -M rho A, M = 0 where the probability has moved too far already
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nexrl.algorithms.array_namespace import constant, namespace
from nexrl.algorithms.loss_definition import (
    POLICY_OPTIONAL,
    POLICY_REQUIRED,
    REGULARISERS,
    Inputs,
    LossDefinition,
    Outputs,
    PreparedStep,
    Settings,
    number,
    policy_ratio,
)
from nexrl.algorithms.segments import sum_of_products
from nexrl.errors import ConfigError


def reinforce(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """-A logprob. Williams 1992. No ratio: off-policy it is biased and has no trust region."""
    return -inputs["advantage"] * outputs["logprobs"]


def importance_sampling(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """-rho A. The gradient is unbiased off-policy and its variance unbounded."""
    return -policy_ratio(outputs["logprobs"], inputs) * inputs["advantage"]


def clipped_surrogate(ratio: Any, advantage: Any, settings: Settings) -> Any:
    """[n] `ppo` of any ratio [n]."""
    xp = namespace(ratio)
    low, high = 1.0 - number(settings, "clip_low"), 1.0 + number(settings, "clip_high")
    term = xp.maximum(-ratio * advantage, -xp.clip(ratio, low, high) * advantage)
    if settings["dual_clip"] is not None:
        bound = -number(settings, "dual_clip") * advantage
        term = xp.where(advantage < 0, xp.minimum(term, bound), term)
    return term


def surrogate_clips(ratio: Any, advantage: Any, settings: Settings) -> tuple[Any, Any]:
    """Tokens without gradient: A < 0 below the lower clip; above the upper one with A > 0, or
    above dual_clip with A < 0."""
    low = (ratio < 1.0 - number(settings, "clip_low")) & (advantage < 0)
    high = (ratio > 1.0 + number(settings, "clip_high")) & (advantage > 0)
    if settings["dual_clip"] is not None:
        high = high | ((ratio > number(settings, "dual_clip")) & (advantage < 0))
    return low, high


def ppo(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A); with dual_clip c > 1 and A < 0 the
    smaller of that and -c A.

    PPO, Schulman et al. 2017, eq. 7; dual clip, Ye et al. 2019; separate upper clip, DAPO 2025,
    eq. 8.
    """
    ratio = policy_ratio(outputs["logprobs"], inputs)
    return clipped_surrogate(ratio, inputs["advantage"], settings)


def _ppo_clips(outputs: Outputs, inputs: Inputs, settings: Settings) -> tuple[Any, Any]:
    ratio = policy_ratio(outputs["logprobs"], inputs)
    return surrogate_clips(ratio, inputs["advantage"], settings)


def require_dual_clip(settings: Settings) -> None:
    """ConfigError unless dual_clip is None or above 1."""
    if settings["dual_clip"] is not None and number(settings, "dual_clip") <= 1.0:
        raise ConfigError(
            f"loss setting dual_clip must be above 1 or null, got {settings['dual_clip']!r}"
        )


# --- bapo ---------------------------------------------------------------------------------------

BAPO_SETTINGS: Settings = {
    **REGULARISERS,
    "clip_low": 0.4,
    "clip_high": 0.2,
    "dual_clip": None,
    "clip_low_end": 0.1,
    "clip_high_end": 2.0,
    "clip_low_step": 0.02,
    "clip_high_step": 0.05,
    "positive_share": 0.4,
}
_ROUNDING = 1e-9
"""How far sums of steps may be from a bound that they reach."""


def bapo_bounds(outputs: Outputs, inputs: Inputs, settings: Settings) -> PreparedStep:
    """Bounds of ppo for one optimizer step: clip_low and clip_high.

    From c_low = 1 - clip_low and c_high = 1 + clip_high, c_high rises by clip_high_step to at most
    1 + clip_high_end, after that c_low by clip_low_step to at most 1 - clip_low_end, and the search
    ends as soon as tokens with A > 0 give at least `positive_share` of the loss:

        P(c_high) = sum_{A>0} w min(rho, c_high) A      N(c_low) = sum_{A<0} w max(rho, c_low) |A|
        P / (P + N) >= positive_share

    With dual_clip, the ratio in N is at most that. w is weight x correction, so that shares are
    those of the loss that is differentiated. A step without either sign keeps its first bounds.
    BAPO, Xi et al. 2025, eq. 8 and algorithm 1, with the numbers of its section 5.1 (0.4, [0.6,
    0.9], [1.2, 3.0], 0.05, 0.02). Two readings: the factor pi_rollout of eq. 8 is the expectation,
    which drawn tokens stand for already; and its denominator, printed as the size of a signed sum,
    is the sum of sizes, so that it gives the share that the text speaks of. The authors' code has no
    such factor either, but bounds P / N and moves c_low first; the paper's order is kept.
    """
    settings = {**BAPO_SETTINGS, **settings}
    share = number(settings, "positive_share")
    ratio = policy_ratio(outputs["logprobs"], inputs)
    contributions = inputs["advantage"] * inputs["weight"] * inputs.get("correction", 1.0)
    positive, negative = contributions > 0, contributions < 0
    gains, losses = contributions[positive], -contributions[negative]
    upper, lower = ratio[positive], ratio[negative]
    if settings["dual_clip"] is not None:
        lower = np.minimum(lower, number(settings, "dual_clip"))

    def reached(clip_low: float, clip_high: float) -> bool:
        above = sum_of_products(np.minimum(upper, 1.0 + clip_high), gains)
        below = sum_of_products(np.maximum(lower, 1.0 - clip_low), losses)
        return above >= share * (above + below)

    lows = _bapo_range(settings, "clip_low")
    highs = _bapo_range(settings, "clip_high")
    path = [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]
    if not len(gains) or not len(losses):
        path = path[:1]
    low, high = next((pair for pair in path if reached(*pair)), path[-1])
    return PreparedStep(settings={"clip_low": low, "clip_high": high})


def _bapo_range(settings: Settings, key: str) -> list[float]:
    """Values of a bound from its start towards its end, both included when steps fit."""
    start, end = number(settings, key), number(settings, f"{key}_end")
    step = number(settings, f"{key}_step")
    # A step that reaches the end but for rounding reaches it.
    count = math.floor(abs(end - start) / step + _ROUNDING)
    return [start + math.copysign(step, end - start) * i for i in range(count + 1)]


def _check_bapo(settings: Settings) -> None:
    require_dual_clip(settings)
    for key in ("clip_low_step", "clip_high_step"):
        if number(settings, key) <= 0:
            raise ConfigError(f"loss setting {key} must be above 0, got {settings[key]!r}")
    low, low_end = number(settings, "clip_low"), number(settings, "clip_low_end")
    high, high_end = number(settings, "clip_high"), number(settings, "clip_high_end")
    if low < low_end - _ROUNDING or high > high_end + _ROUNDING:
        raise ConfigError(
            "loss settings clip_low, clip_low_end, clip_high, clip_high_end: the lower bound rises "
            "and the upper one too, so clip_low must be at least clip_low_end and clip_high at most "
            f"clip_high_end, got {low:g}, {low_end:g}, {high:g}, {high_end:g}"
        )
    if not 0 < number(settings, "positive_share") < 1:
        raise ConfigError(
            "loss setting positive_share must be between 0 and 1, got "
            f"{settings['positive_share']!r}"
        )


# --- cispo --------------------------------------------------------------------------------------


def _cispo_bounds(settings: Settings) -> tuple[float | None, float]:
    low = None if settings["clip_low"] is None else 1.0 - number(settings, "clip_low")
    return low, 1.0 + number(settings, "clip_high")


def cispo(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logprob: every token keeps a gradient.

    CISPO, MiniMax-M1 2025, eq. 4 and 5, which has no effective lower bound (clip_low: null) and does
    not publish the upper one; a cap of 5 is that of ScaleRL 2025.
    """
    logprobs = outputs["logprobs"]
    xp, ratio = namespace(logprobs), policy_ratio(constant(logprobs), inputs)
    return -(xp.clip(ratio, *_cispo_bounds(settings)) * inputs["advantage"]) * logprobs


def _cispo_clips(outputs: Outputs, inputs: Inputs, settings: Settings) -> tuple[Any, Any]:
    ratio = policy_ratio(outputs["logprobs"], inputs)
    low, high = _cispo_bounds(settings)
    return ratio < (-1.0 if low is None else low), ratio > high


# --- dppo ---------------------------------------------------------------------------------------


def _dppo_masks(outputs: Outputs, inputs: Inputs, settings: Settings) -> tuple[Any, Any]:
    """[n] tokens beyond the lower and beyond the upper bound, in the direction of A."""
    logprobs, advantage = constant(outputs["logprobs"]), inputs["advantage"]
    anchor = inputs.get("behavior_logprobs", inputs["proximal_logprobs"])
    xp = namespace(logprobs)
    moved = xp.exp(logprobs) - xp.exp(anchor)
    low = (moved < -number(settings, "clip_low")) & (advantage < 0)
    high = (moved > number(settings, "clip_high")) & (advantage > 0)
    return low, high


def dppo(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """-M rho A, with M = 0 where A > 0 and pi - mu > clip_high, or A < 0 and mu - pi > clip_low.

    pi - mu is a difference of the drawn token's probabilities; |pi - mu| is the total variation of
    the two-outcome distribution (this token or another), so that rare tokens may move far in ratio
    and likely ones may not. mu is the policy that drew the token: `behavior_logprobs` where given,
    else the proximal ones, which are the same unless they are recomputed. The paper anchors both M
    and the ratio at mu and advises against recomputing.
    DPPO, Qi et al. 2026 ("Rethinking the Trust Region in LLM RL"), Binary-TV; bound 0.15 as in its
    runs, which do not cap the ratio.
    """
    low, high = _dppo_masks(outputs, inputs, settings)
    ratio = policy_ratio(outputs["logprobs"], inputs)
    xp, inside = namespace(ratio), ~(low | high)
    return xp.where(inside, -ratio * inputs["advantage"], xp.zeros_like(ratio))


_CLIPPED: Settings = {**REGULARISERS, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}

POLICY_LOSSES: tuple[LossDefinition, ...] = (
    LossDefinition(
        name="reinforce",
        required=("weight", "advantage"),
        optional=(*POLICY_OPTIONAL, "proximal_logprobs"),
        config=REGULARISERS,
        bounded=False,
        term_of=reinforce,
    ),
    LossDefinition(
        name="importance_sampling",
        required=POLICY_REQUIRED,
        optional=POLICY_OPTIONAL,
        config=REGULARISERS,
        bounded=False,
        term_of=importance_sampling,
    ),
    LossDefinition(
        name="ppo",
        required=POLICY_REQUIRED,
        optional=POLICY_OPTIONAL,
        config=_CLIPPED,
        bounded=True,
        term_of=ppo,
        clips=_ppo_clips,
        check=require_dual_clip,
    ),
    LossDefinition(
        name="bapo",
        required=POLICY_REQUIRED,
        optional=POLICY_OPTIONAL,
        config=BAPO_SETTINGS,
        bounded=True,
        term_of=ppo,
        clips=_ppo_clips,
        prepare=bapo_bounds,
        check=_check_bapo,
    ),
    LossDefinition(
        name="cispo",
        required=POLICY_REQUIRED,
        optional=POLICY_OPTIONAL,
        config={**REGULARISERS, "clip_low": None, "clip_high": 4.0},
        bounded=True,
        term_of=cispo,
        clips=_cispo_clips,
    ),
    LossDefinition(
        name="dppo",
        required=POLICY_REQUIRED,
        optional=(*POLICY_OPTIONAL, "behavior_logprobs"),
        config={**REGULARISERS, "clip_low": 0.15, "clip_high": 0.15},
        bounded=True,
        term_of=dppo,
        clips=_dppo_masks,
    ),
)
