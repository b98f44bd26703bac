"""Losses worked by hand: literal inputs, literal results, the arithmetic between them.

ln 2 = 0.69314718055994531, so a token with proximal logprob -1 and logprob LOG_TWICE has ratio 2.
`slopes` is the gradient of the plain sum of terms (every weight 1) by the loss's own output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LN_2 = 0.69314718055994531
LN_1_5 = 0.40546510810816438
LOG_TWICE = -1.0 + LN_2
LOG_HALF = -1.0 - LN_2
LOG_1_5 = -1.0 + LN_1_5
Numbers = Sequence[float] | Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossByHand:
    """One loss on a few tokens."""

    name: str
    """Name of the loss."""
    output: Numbers
    """The loss's own output: logprobs, values or candidate logprobs."""
    inputs: Mapping[str, Numbers]
    """Without weight, which is 1; `proximal_logprobs` is -1 where the loss needs it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the defaults."""
    terms: Sequence[float]
    """[n]"""
    slopes: Numbers
    """[n] or [n, K]"""
    arithmetic: str
    """How they come about."""


LOSSES_BY_HAND: tuple[LossByHand, ...] = (
    LossByHand(
        name="cross_entropy",
        output=[-0.5, -2.0],
        inputs={},
        terms=[0.5, 2.0],
        slopes=[-1.0, -1.0],
        arithmetic="-(-0.5) = 0.5; -(-2) = 2",
    ),
    LossByHand(
        name="reinforce",
        output=[-0.5, -2.0],
        inputs={"advantage": [2.0, -1.0]},
        terms=[1.0, -2.0],
        slopes=[-2.0, 1.0],
        arithmetic="-2 x -0.5 = 1; -(-1) x -2 = -2",
    ),
    LossByHand(
        name="importance_sampling",
        output=[LOG_TWICE, LOG_HALF],
        inputs={"advantage": [3.0, -1.0]},
        terms=[-6.0, 0.5],
        slopes=[-6.0, 0.5],
        arithmetic="-2 x 3 = -6; -0.5 x -1 = 0.5",
    ),
    LossByHand(
        name="ppo",
        output=[LOG_1_5, LOG_1_5, LOG_HALF, LOG_HALF],
        inputs={"advantage": [1.0, -1.0, 1.0, -1.0]},
        settings={"clip_low": 0.2, "clip_high": 0.28},
        terms=[-1.28, 1.5, -0.5, 0.8],
        slopes=[0.0, 1.5, -0.5, 0.0],
        arithmetic="A = 1: -min(1.5, 1.28) and -min(0.5, 0.8); A = -1: max(1.5, 1.28) and max(0.5, 0.8)",
    ),
    LossByHand(
        name="ppo",
        output=[LOG_TWICE],
        inputs={"advantage": [-1.0]},
        settings={"dual_clip": 1.5},
        terms=[1.5],
        slopes=[0.0],
        arithmetic="dual clip 1.5: min(2, 1.5)",
    ),
    LossByHand(
        name="bapo",
        output=[LOG_1_5, LOG_HALF],
        inputs={"advantage": [1.0, -1.0]},
        settings={"positive_share": 0.69},
        terms=[-1.35, 0.6],
        slopes=[0.0, 0.0],
        arithmetic="N = max(0.5, 0.6) = 0.6; P = 1.2, 1.25, 1.3, 1.35 as the bound rises; shares 0.667, 0.676, 0.684, 0.692 >= 0.69",
    ),
    LossByHand(
        name="cispo",
        output=[LOG_TWICE, LOG_HALF],
        inputs={"advantage": [1.0, 1.0]},
        settings={"clip_high": 0.5},
        terms=[0.46027922916008207, 0.84657359027997264],
        slopes=[-1.5, -0.5],
        arithmetic="-1.5 (ln 2 - 1); no lower bound: -0.5 (-1 - ln 2)",
    ),
    LossByHand(
        name="dppo",
        output=[-LN_2, -LN_2],
        inputs={"advantage": [1.0, -1.0], "proximal_logprobs": [-2 * LN_2, -2 * LN_2]},
        terms=[0.0, 2.0],
        slopes=[0.0, 2.0],
        arithmetic="pi - mu = 0.5 - 0.25 > 0.15: no further up; downwards -2 x -1 = 2",
    ),
    LossByHand(
        name="gspo",
        output=[-1.0 + 2 * LN_2, -1.0],
        inputs={"advantage": [-1.0, -1.0]},
        settings={"clip_low": 0.2, "clip_high": 0.28},
        terms=[2.0, 2.0],
        slopes=[2.0, 2.0],
        arithmetic="s = exp((ln 4 + 0) / 2) = 2; each logprob has half of two terms of slope 2",
    ),
    LossByHand(
        name="gspo",
        output=[-1.0 + 2 * LN_2, -1.0],
        inputs={"advantage": [1.0, 1.0]},
        settings={"clip_low": 0.2, "clip_high": 0.28},
        terms=[-1.28, -1.28],
        slopes=[0.0, 0.0],
        arithmetic="-min(2, 1.28)",
    ),
    LossByHand(
        name="gspo_token",
        output=[-1.0 + 2 * LN_2, -1.0],
        inputs={"advantage": [-1.0, -3.0]},
        settings={"clip_low": 0.2, "clip_high": 0.28},
        terms=[2.0, 6.0],
        slopes=[2.0, 6.0],
        arithmetic="s = 2 for both, each with its own advantage and its own slope",
    ),
    LossByHand(
        name="luspo",
        output=[-1.0 + 2 * LN_2, -1.0],
        inputs={"advantage": [-1.0, -1.0]},
        settings={"clip_low": 0.2, "clip_high": 0.28},
        terms=[2.0, 2.0],
        slopes=[2.0, 2.0],
        arithmetic="the two terms add up to |y| s = 2 x 2 for the row, under the weight 1 / R",
    ),
    LossByHand(
        name="gmpo",
        output=[-0.4, -0.8],
        inputs={"advantage": [1.0, 1.0]},
        settings={"clip_high": 0.4},
        terms=[-1.3498588075760032, -1.3498588075760032],
        slopes=[0.0, -1.3498588075760032],
        arithmetic="-exp((min(0.6, 0.4) + 0.2) / 2) = -e^0.3; the first token is clipped",
    ),
    LossByHand(
        name="sapo",
        output=[-1.0, -1.0],
        inputs={"advantage": [1.0, -1.0]},
        settings={"tau_positive": 1.0, "tau_negative": 2.0},
        terms=[-2.0, 1.0],
        slopes=[-1.0, 1.0],
        arithmetic="4 / tau x sigma(0) = 2 / tau; the slope on policy is A's, whatever tau",
    ),
    LossByHand(
        name="vespo",
        output=[LOG_TWICE, -1.0],
        inputs={"advantage": [1.0, 1.0]},
        terms=[0.06110920920133526, 0.19914827347145578],
        slopes=[-0.19914827347145578, -0.19914827347145578],
        arithmetic="W = 2: 2^2 exp(3 (1 - 2)) = 4 e^-3 = 0.199, times -logp",
    ),
    LossByHand(
        name="topr",
        output=[LOG_TWICE, -1.0],
        inputs={"advantage": [-1.0, -1.0]},
        terms=[LOG_TWICE, -1.0],
        slopes=[1.0, 1.0],
        arithmetic="min(W, 1) = min(2, 1) = 1, times -A logp = logp",
    ),
    LossByHand(
        name="topr",
        output=[LOG_HALF, -1.0],
        inputs={"advantage": [-1.0, -1.0]},
        terms=[0.5 * LOG_HALF, -0.5],
        slopes=[0.5, 0.5],
        arithmetic="min(W, 1) = 0.5",
    ),
    LossByHand(
        name="kimi",
        output=[-0.8, -0.6],
        inputs={"advantage": [1.0, 1.0]},
        settings={"tau": 0.1},
        terms=[0.806, 0.612],
        slopes=[-0.94, -0.94],
        arithmetic="d = 0.2, 0.4, D = 0.6: 0.8 + 0.05 x 0.2 x 0.6; 0.6 + 0.05 x 0.4 x 0.6; -1 + 0.1 x 0.6",
    ),
    LossByHand(
        name="clip_cov",
        output=[-1.0, -1.0],
        inputs={"advantage": [1.0, 1.0], "selected": [1.0, 0.0]},
        terms=[0.0, -1.0],
        slopes=[0.0, -1.0],
        arithmetic="the selected token is cut off; the other is ppo at ratio 1",
    ),
    LossByHand(
        name="kl_cov",
        output=[LOG_TWICE, LOG_TWICE],
        inputs={"advantage": [1.0, 1.0], "selected": [1.0, 0.0]},
        settings={"penalty": 1.0},
        terms=[-2.0 + LN_2, -2.0],
        slopes=[-1.0, -2.0],
        arithmetic="-2 + |ln 2|, slope -2 + 1; the other is -rho A",
    ),
    LossByHand(
        name="value",
        output=[1.0, 0.0, 0.9],
        inputs={"returns": [0.0, 1.0, 1.0], "old_values": [0.5, 0.5, 0.5]},
        settings={"clip": 0.2},
        terms=[0.5, 0.5, 0.045],
        slopes=[1.0, -1.0, 0.0],
        arithmetic="max(1, 0.7^2) / 2; max(1, 0.7^2) / 2; max(0.1^2, 0.3^2) / 2, beyond the clip",
    ),
    LossByHand(
        name="reverse_kl",
        output=[-LN_2],
        inputs={"teacher_logprobs": [-2 * LN_2]},
        terms=[LN_2],
        slopes=[LN_2],
        arithmetic="ln(0.5 / 0.25)",
    ),
    LossByHand(
        name="reverse_kl_top_k",
        output=[[-LN_2]],
        inputs={"teacher_candidate_logprobs": [[-2 * LN_2]]},
        terms=[0.14384103622589042],
        slopes=[[0.5493061443340549]],
        arithmetic="s = 0.5 | 0.5, t = 0.25 | 0.75: 0.5 ln 2 + 0.5 ln(2/3); 0.5 (ln 2 - ln(2/3))",
    ),
    LossByHand(
        name="forward_kl_top_k",
        output=[[-LN_2]],
        inputs={"teacher_candidate_logprobs": [[-2 * LN_2]]},
        terms=[0.13081203594113697],
        slopes=[[0.5]],
        arithmetic="0.25 ln(1/2) + 0.75 ln(3/2); -0.25 + 0.75 x 0.5 / 0.5",
    ),
    LossByHand(
        name="jsd_top_k",
        output=[[-LN_2]],
        inputs={"teacher_candidate_logprobs": [[-2 * LN_2]]},
        settings={"beta": 0.5},
        terms=[0.033822075568605205],
        slopes=[[0.12770640594149762]],
        arithmetic="m = 0.375 | 0.625: half of 0.25 ln(2/3) + 0.75 ln 1.2 and of 0.5 ln(4/3) + 0.5 ln 0.8; 0.25 (ln(4/3) - ln 0.8)",
    ),
)
