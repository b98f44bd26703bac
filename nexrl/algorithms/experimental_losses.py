"""Policy losses built from their papers and little used so far; `experimental` in the registry.

Shapes and letters as in `policy_losses.py`: rho the token's ratio, d = log rho, A the advantage, W =
exp(sum of d over the row) the ratio of a whole row, sg no gradient. Results are [n].

    sapo      -4/tau sigma(tau (rho - 1)) A
    vespo     -sg(W^k exp(lambda (1 - W))) A logprob
    topr      -A logprob where A >= 0, -sg(clip(W, 0, 1)) A logprob where A < 0
    kimi      -A logprob + tau/2 (sum of d over the row)^2
    clip_cov  ppo without gradient at a few tokens of high covariance
    kl_cov    -rho A + penalty |d| at the tokens of highest covariance
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nexrl.algorithms.array_namespace import (
    MAX_LOG_DIFFERENCE,
    constant,
    log_difference,
    namespace,
    row_sum,
)
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
from nexrl.algorithms.policy_losses import ppo, require_dual_clip, surrogate_clips
from nexrl.errors import ConfigError

_SELECTED = "selected"


def row_ratio(outputs: Outputs, inputs: Inputs) -> Any:
    """[n] W = exp(sum over the row of log rho), its log within +-MAX_LOG_DIFFERENCE."""
    logprobs = outputs["logprobs"]
    log_ratio = row_sum(logprobs - inputs["proximal_logprobs"], inputs["row"])
    xp = namespace(log_ratio)
    return xp.exp(xp.clip(log_ratio, -MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE))


def _by_sign(advantage: Any, positive: float, negative: float) -> Any:
    """[n] `positive` where A >= 0, `negative` elsewhere."""
    xp = namespace(advantage)
    return xp.where(
        advantage >= 0,
        xp.full_like(advantage, positive),
        xp.full_like(advantage, negative),
    )


def sapo(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """-4/tau sigma(tau (rho - 1)) A with tau_positive where A >= 0 and tau_negative where A < 0.

    A soft gate in place of the clip: its slope is that of rho at rho = 1 and falls on both sides.
    SAPO, Gao et al. 2025 (arXiv 2511.20347), eq. 5 and the gate under it.
    """
    advantage = inputs["advantage"]
    ratio = policy_ratio(outputs["logprobs"], inputs)
    tau = _by_sign(advantage, number(settings, "tau_positive"), number(settings, "tau_negative"))
    gate = 1.0 / (1.0 + namespace(ratio).exp(tau * (1.0 - ratio)))
    return -4.0 / tau * gate * advantage


def vespo(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """-sg(phi(W)) A logprob with phi(W) = W^k exp(lambda (1 - W)), k and lambda by the sign of A.

    phi is 1 on policy, falls to 0 for very small and very large W, and needs no division by the
    length. VESPO, Shen et al. 2026 (arXiv 2602.10693), eq. 20 and its pseudocode; k, lambda = 2, 3
    for A >= 0 and 3, 2 for A < 0.
    """
    logprobs, advantage = outputs["logprobs"], inputs["advantage"]
    ratio = row_ratio({"logprobs": constant(logprobs)}, inputs)
    xp = namespace(ratio)
    power = _by_sign(advantage, number(settings, "k_positive"), number(settings, "k_negative"))
    rate = _by_sign(
        advantage, number(settings, "lambda_positive"), number(settings, "lambda_negative")
    )
    weight = xp.exp(power * xp.log(ratio) + rate * (1.0 - ratio))
    return -(weight * advantage) * logprobs


def topr(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """-A logprob where A >= 0, -sg(min(W, 1 + clip_high)) A logprob where A < 0.

    What failed is unlearnt only as far as the policy would still do it; what succeeded is learnt as
    in supervised training. Tapered off-policy REINFORCE, Le Roux et al. 2025, eq. 7 and 8 with a+ =
    b+ = 1 and [0, 1] for negatives (clip_high 0), by the sign of the reward; here by that of A.
    """
    logprobs, advantage = outputs["logprobs"], inputs["advantage"]
    ratio = row_ratio({"logprobs": constant(logprobs)}, inputs)
    xp = namespace(ratio)
    capped = xp.clip(ratio, None, 1.0 + number(settings, "clip_high"))
    weight = xp.where(advantage < 0, capped, xp.ones_like(ratio))
    return -(weight * advantage) * logprobs


def _topr_clips(outputs: Outputs, inputs: Inputs, settings: Settings) -> tuple[Any, Any]:
    ratio, advantage = row_ratio(outputs, inputs), inputs["advantage"]
    high = (ratio > 1.0 + number(settings, "clip_high")) & (advantage < 0)
    return namespace(high).zeros_like(high), high


def kimi(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """-A logprob + tau/2 d D, D the sum of d over the row: the row's terms add up to
    -A log pi(row) + tau/2 D^2.

    Kimi k1.5 2025, eq. 3: the gradient of its squared loss, with A = r - mean r. It does not
    publish tau; 0.1 is ours.
    """
    difference = log_difference(outputs["logprobs"], inputs["proximal_logprobs"])
    distance = row_sum(difference, inputs["row"])
    penalty = 0.5 * number(settings, "tau") * difference * distance
    return penalty - inputs["advantage"] * outputs["logprobs"]


# --- covariance ---------------------------------------------------------------------------------


def _covariances(outputs: Outputs, inputs: Inputs) -> Any:
    """[n] (logprob - its mean) (A - its mean), means over the whole optimizer step."""
    logprobs, advantage = outputs["logprobs"], inputs["advantage"]
    return (logprobs - logprobs.mean()) * (advantage - advantage.mean())


def _marked(count: int, chosen: Any) -> PreparedStep:
    selected = np.zeros(count)
    selected[chosen] = 1.0
    return PreparedStep(inputs={_SELECTED: selected})


CLIP_COV_SETTINGS: Settings = {
    **REGULARISERS,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "fraction": 2e-4,
    "covariance_low": 1.0,
    "covariance_high": 5.0,
    "seed": 0,
}


def select_clip_cov(outputs: Outputs, inputs: Inputs, settings: Settings) -> PreparedStep:
    """`selected` [n]: `fraction` of the step's tokens, at least one, drawn at random by `seed` from
    those that ppo does not clip and whose covariance lies between the two bounds.

    Clip-Cov, Cui et al. 2025 ("The Entropy Mechanism of RL for Reasoning LLMs") and its code, which
    draws at least one too: a small step would be plain ppo.
    """
    settings = {**CLIP_COV_SETTINGS, **settings}
    covariance = _covariances(outputs, inputs) if len(outputs["logprobs"]) else np.zeros(0)
    ratio = policy_ratio(outputs["logprobs"], inputs)
    low, high = surrogate_clips(ratio, inputs["advantage"], settings)
    bounds = number(settings, "covariance_low"), number(settings, "covariance_high")
    inside = (covariance > bounds[0]) & (covariance < bounds[1]) & ~(low | high)
    candidates = np.flatnonzero(inside)
    # By size, so that the order of rows in the step does not decide what is drawn.
    candidates = candidates[np.argsort(covariance[candidates], kind="stable")]
    wanted = max(1, int(number(settings, "fraction") * len(covariance)))
    count = min(len(candidates), wanted)
    generator = np.random.default_rng(int(number(settings, "seed")))
    return _marked(len(covariance), generator.choice(candidates, size=count, replace=False))


def clip_cov(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """ppo, and 0 without gradient at selected tokens. Same paper."""
    term = ppo(outputs, inputs, settings)
    xp = namespace(term)
    return xp.where(inputs[_SELECTED] != 0, xp.zeros_like(term), term)


def _clip_cov_clips(outputs: Outputs, inputs: Inputs, settings: Settings) -> tuple[Any, Any]:
    ratio = policy_ratio(outputs["logprobs"], inputs)
    return surrogate_clips(ratio, inputs["advantage"], settings)


KL_COV_SETTINGS: Settings = {**REGULARISERS, "fraction": 2e-3, "penalty": 1.0}


def select_kl_cov(outputs: Outputs, inputs: Inputs, settings: Settings) -> PreparedStep:
    """`selected` [n]: the `fraction` of the step's tokens with the largest covariance, at least one.

    KL-Cov of the same paper.
    """
    settings = {**KL_COV_SETTINGS, **settings}
    length = len(outputs["logprobs"])
    if not length:
        return _marked(0, [])
    covariance = _covariances(outputs, inputs)
    count = min(length, max(1, math.floor(number(settings, "fraction") * length)))
    return _marked(length, np.argsort(-covariance, kind="stable")[:count])


def kl_cov(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """-rho A, plus penalty |d| at selected tokens; no clip.

    Same paper; it names a KL between the two policies, and its code takes |d| for it.
    """
    difference = log_difference(outputs["logprobs"], inputs["proximal_logprobs"])
    xp = namespace(difference)
    held = number(settings, "penalty") * (inputs[_SELECTED] != 0) * xp.abs(difference)
    return held - xp.exp(difference) * inputs["advantage"]


def _check_fraction(settings: Settings) -> None:
    if not 0 < number(settings, "fraction") <= 1:
        raise ConfigError(
            f"loss setting fraction must be above 0 and at most 1, got {settings['fraction']!r}"
        )


def _check_clip_cov(settings: Settings) -> None:
    require_dual_clip(settings)
    _check_fraction(settings)
    low, high = number(settings, "covariance_low"), number(settings, "covariance_high")
    if low >= high:
        raise ConfigError(
            "loss setting covariance_low must be below covariance_high, or no token is ever "
            f"chosen, got {low:g} and {high:g}"
        )
    if not isinstance(settings["seed"], int) or isinstance(settings["seed"], bool):
        raise ConfigError(f"loss setting seed must be a whole number, got {settings['seed']!r}")


def _check_kl_cov(settings: Settings) -> None:
    _check_fraction(settings)
    if number(settings, "penalty") < 0:
        raise ConfigError(f"loss setting penalty must be at least 0, got {settings['penalty']!r}")


def _positive(*keys: str) -> Any:
    def check(settings: Settings) -> None:
        for key in keys:
            if number(settings, key) <= 0:
                raise ConfigError(f"loss setting {key} must be above 0, got {settings[key]!r}")

    return check


EXPERIMENTAL_LOSSES: tuple[LossDefinition, ...] = (
    LossDefinition(
        name="sapo",
        required=POLICY_REQUIRED,
        optional=POLICY_OPTIONAL,
        config={**REGULARISERS, "tau_positive": 1.0, "tau_negative": 1.05},
        bounded=True,
        term_of=sapo,
        check=_positive("tau_positive", "tau_negative"),
        experimental=True,
    ),
    LossDefinition(
        name="vespo",
        required=POLICY_REQUIRED,
        optional=POLICY_OPTIONAL,
        config={
            **REGULARISERS,
            "k_positive": 2.0,
            "lambda_positive": 3.0,
            "k_negative": 3.0,
            "lambda_negative": 2.0,
        },
        bounded=True,
        term_of=vespo,
        level="row",
        ratio_of=row_ratio,
        check=_positive("k_positive", "lambda_positive", "k_negative", "lambda_negative"),
        experimental=True,
    ),
    LossDefinition(
        name="topr",
        required=POLICY_REQUIRED,
        optional=POLICY_OPTIONAL,
        config={**REGULARISERS, "clip_high": 0.0},
        bounded=True,
        term_of=topr,
        level="row",
        ratio_of=row_ratio,
        clips=_topr_clips,
        experimental=True,
    ),
    LossDefinition(
        name="kimi",
        required=POLICY_REQUIRED,
        optional=POLICY_OPTIONAL,
        config={**REGULARISERS, "tau": 0.1},
        bounded=True,
        term_of=kimi,
        level="row",
        ratio_of=row_ratio,
        check=_positive("tau"),
        experimental=True,
    ),
    LossDefinition(
        name="clip_cov",
        required=(*POLICY_REQUIRED, _SELECTED),
        optional=POLICY_OPTIONAL,
        config=CLIP_COV_SETTINGS,
        bounded=True,
        term_of=clip_cov,
        clips=_clip_cov_clips,
        prepare=select_clip_cov,
        prepares=(_SELECTED,),
        check=_check_clip_cov,
        experimental=True,
    ),
    LossDefinition(
        name="kl_cov",
        required=(*POLICY_REQUIRED, _SELECTED),
        optional=POLICY_OPTIONAL,
        config=KL_COV_SETTINGS,
        bounded=False,
        term_of=kl_cov,
        prepare=select_kl_cov,
        prepares=(_SELECTED,),
        check=_check_kl_cov,
        experimental=True,
    ),
)
