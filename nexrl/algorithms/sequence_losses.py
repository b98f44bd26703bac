"""Policy losses whose ratio belongs to a whole row: gspo and its kin.

The mean over a row runs over its trained tokens, those that are given. rho as in
`policy_losses.py`; d = log rho; n the trained tokens of the row; results [n tokens]. Terms are per
token like all others: under the weight 1 / (R n) of `sequence_mean_token_mean` the n equal terms of
a row add up to the row's own term over R.

    gspo        max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean d)
    gspo_token  the same with s_t = sg(s) pi_t / sg(pi_t): a gradient of its own for each token
    luspo (x)   gspo's term under 1 / R: a row counts by its length
    gmpo (x)    -exp(mean of clipped d) A
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nexrl.algorithms.array_namespace import (
    MAX_LOG_DIFFERENCE,
    constant,
    namespace,
    row_mean,
)
from nexrl.algorithms.loss_definition import (
    POLICY_OPTIONAL,
    POLICY_REQUIRED,
    REGULARISERS,
    Inputs,
    LossDefinition,
    Outputs,
    Settings,
    number,
)
from nexrl.algorithms.policy_losses import clipped_surrogate, require_dual_clip, surrogate_clips


def _exp(log_ratio: Any) -> Any:
    xp = namespace(log_ratio)
    return xp.exp(xp.clip(log_ratio, -MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE))


def sequence_ratio(outputs: Outputs, inputs: Inputs) -> Any:
    """[n] s = exp(mean over the row's trained tokens of log rho), the same for all of them.

    GSPO 2025, eq. 7. The mean, not each log ratio, is held within +-MAX_LOG_DIFFERENCE.
    """
    return _exp(row_mean(outputs["logprobs"] - inputs["proximal_logprobs"], inputs["row"]))


def gspo(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the row of log rho).

    The clip of ppo on one ratio for the row. GSPO 2025, eq. 5; clips 3e-4 and 4e-4 of its section
    5.1.
    """
    return clipped_surrogate(sequence_ratio(outputs, inputs), inputs["advantage"], settings)


def gspo_token(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """max(-s_t A, -clip(s_t, 1 - clip_low, 1 + clip_high) A), s_t = sg(s) pi_t / sg(pi_t).

    GSPO 2025, eq. 13 and 14: equal to gspo in value and gradient when A is one number per row, and
    exact in the gradient when it is not.
    """
    logprobs = outputs["logprobs"]
    frozen = constant(logprobs)
    # pi / sg(pi) is 1 with the gradient of the logprob, and so is the bracket.
    ratio = sequence_ratio({"logprobs": frozen}, inputs) * (1.0 + (logprobs - frozen))
    return clipped_surrogate(ratio, inputs["advantage"], settings)


def _gspo_clips(outputs: Outputs, inputs: Inputs, settings: Settings) -> tuple[Any, Any]:
    return surrogate_clips(sequence_ratio(outputs, inputs), inputs["advantage"], settings)


def _clipped_differences(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """[n] min(d, clip_high) where A > 0, max(d, -clip_low) where A < 0, d where A = 0."""
    advantage = inputs["advantage"]
    difference = outputs["logprobs"] - inputs["proximal_logprobs"]
    xp = namespace(difference)
    low, high = -number(settings, "clip_low"), number(settings, "clip_high")
    pessimistic = xp.where(advantage < 0, xp.clip(difference, low, None), difference)
    return xp.where(advantage > 0, xp.clip(difference, None, high), pessimistic)


def gmpo(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """-exp(mean over the row of clipped d) A: the geometric mean of clipped ratios.

    GMPO, Zhao et al. 2025: clip of each token to (e^-0.4, e^0.4), in log space and on the
    pessimistic side only.
    """
    clipped = _clipped_differences(outputs, inputs, settings)
    return -_exp(row_mean(clipped, inputs["row"])) * inputs["advantage"]


def _gmpo_clips(outputs: Outputs, inputs: Inputs, settings: Settings) -> tuple[Any, Any]:
    difference = outputs["logprobs"] - inputs["proximal_logprobs"]
    advantage = inputs["advantage"]
    low = (difference < -number(settings, "clip_low")) & (advantage < 0)
    high = (difference > number(settings, "clip_high")) & (advantage > 0)
    return low, high


_GSPO: Settings = {**REGULARISERS, "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}

_GSPO_DEFINITION = LossDefinition(
    name="gspo",
    required=POLICY_REQUIRED,
    optional=POLICY_OPTIONAL,
    config=_GSPO,
    bounded=True,
    term_of=gspo,
    level="row",
    aggregation="sequence_mean_token_mean",
    ratio_of=sequence_ratio,
    clips=_gspo_clips,
    check=require_dual_clip,
)

SEQUENCE_LOSSES: tuple[LossDefinition, ...] = (
    _GSPO_DEFINITION,
    replace(_GSPO_DEFINITION, name="gspo_token", term_of=gspo_token),
    replace(
        _GSPO_DEFINITION,
        name="luspo",
        # LUSPO, Liu et al. 2026, section 5.1: wider than gspo's.
        config={**_GSPO, "clip_low": 2e-3, "clip_high": 2.5e-3},
        # It multiplies the loss of a row by the row's length, which is this denominator.
        aggregation="sequence_mean_token_sum",
        experimental=True,
    ),
    LossDefinition(
        name="gmpo",
        required=POLICY_REQUIRED,
        optional=POLICY_OPTIONAL,
        config={**REGULARISERS, "clip_low": 0.4, "clip_high": 0.4},
        bounded=True,
        term_of=gmpo,
        level="row",
        aggregation="sequence_mean_token_mean",
        clips=_gmpo_clips,
        experimental=True,
    ),
)
