"""Everything but losses of single rows, worked by hand: advantages, preferences, KL, denominators,
corrections.

Each entry is literal: what goes in, what comes out, the arithmetic between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.certify.hand_losses import LN_2


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageByHand:
    """One estimator on a few trajectories."""

    name: str
    """Name of the estimator."""
    inputs: Mapping[str, Any]
    """Fields of AdvantageInputs, as lists; groups are all 0 unless given."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of AdvantageSettings."""
    expected: Sequence[float]
    """[T] or [M]"""
    returns: Sequence[float] | None = None
    """[M]"""
    arithmetic: str
    """How they come about."""


ADVANTAGES_BY_HAND: tuple[AdvantageByHand, ...] = (
    AdvantageByHand(
        name="grpo",
        inputs={"rewards": [1, 0, 1, 0]},
        expected=[0.8660239037870368, -0.8660239037870368] * 2,
        arithmetic="mean 0.5, sd = sqrt(4 x 0.25 / 3) = sqrt(1/3); 0.5 / (sqrt(1/3) + 1e-6)",
    ),
    AdvantageByHand(
        name="grpo",
        inputs={"rewards": [1, 3, 5], "groups": [0, 0, 1]},
        settings={"std": "none"},
        expected=[-1, 1, 0],
        arithmetic="1 - 2; 3 - 2; alone, so 0",
    ),
    AdvantageByHand(
        name="dr_grpo",
        inputs={"rewards": [1, 0, 0, 1, 7], "groups": [0, 0, 1, 1, 2]},
        expected=[0.5, -0.5, -0.5, 0.5, 0],
        arithmetic="r - 0.5 in both pairs; alone, so 0",
    ),
    AdvantageByHand(
        name="rloo",
        inputs={"rewards": [1, 0, 0, 0]},
        expected=[1, -1 / 3, -1 / 3, -1 / 3],
        arithmetic="1 - 0; 0 - 1/3",
    ),
    AdvantageByHand(
        name="opo",
        inputs={"rewards": [1, 0], "lengths": [3, 1]},
        expected=[0.25, -0.75],
        arithmetic="baseline (3 x 1 + 1 x 0) / 4 = 0.75",
    ),
    AdvantageByHand(
        name="pass_at_k",
        inputs={"rewards": [1, 0, 0, 0]},
        settings={"pass_k": 2},
        expected=[1, -1 / 3, -1 / 3, -1 / 3],
        arithmetic="R = 1 - 3/6 = 0.5, s = 0.5: 0.5 / 0.5; (0.5 - 2/3) / 0.5",
    ),
    AdvantageByHand(
        name="gdpo",
        inputs={
            "rewards": [1, 0.5],
            "reward_parts": {"answer": [1, 0], "format": [0, 1]},
        },
        settings={"part_weights": {"format": 0.5}},
        expected=[0.9999999717156896, -0.9999999717156896],
        arithmetic="z = 0.5 / (sqrt(0.5) + 1e-6), z - 0.5 z = 0.354, over its own size + 1e-8",
    ),
    AdvantageByHand(
        name="reinforce_pp_baseline",
        inputs={"rewards": [1, 0, 1, 1], "groups": [0, 0, 1, 1], "lengths": [3, 1, 2, 2]},
        expected=[1.1338933847419683, -1.8898223079032808, 0, 0],
        arithmetic="0.5 three times, -0.5 once, 0 four times: mean 1/8, sd sqrt(7)/8, + 1e-8",
    ),
    AdvantageByHand(
        name="remax",
        inputs={"rewards": [1, 0], "greedy_rewards": [0.4, 0.4]},
        expected=[0.6, -0.4],
        arithmetic="1 - 0.4; 0 - 0.4",
    ),
    AdvantageByHand(
        name="reinforce",
        inputs={"rewards": [1, 0, 0.5]},
        settings={"baseline": "batch"},
        expected=[0.5, -0.5, 0],
        arithmetic="mean 0.5",
    ),
    AdvantageByHand(
        name="gae",
        inputs={"rewards": [1], "lengths": [2], "values": [0.2, 0.4]},
        settings={"gamma": 0.5, "gae_lambda": 0.5, "whiten": False},
        expected=[0.15, 0.6],
        returns=[0.35, 1.0],
        arithmetic="delta = 0 + 0.5 x 0.4 - 0.2 = 0, 1 - 0.4 = 0.6; A = 0 + 0.25 x 0.6; plus values",
    ),
    AdvantageByHand(
        name="reinforce_pp",
        inputs={"rewards": [1], "lengths": [3], "token_rewards": [0, -0.1, 0]},
        settings={"gamma": 0.5, "whiten": False},
        expected=[0.2, 0.4, 1],
        arithmetic="1; -0.1 + 0.5 x 1; 0 + 0.5 x 0.4",
    ),
    AdvantageByHand(
        name="step_returns",
        inputs={
            "rewards": [0.8],
            "turn_rewards": [0.5, 0],
            "turn_lengths": [1, 2],
            "turn_counts": [2],
        },
        settings={"gamma": 0.5},
        expected=[0.9, 0.8, 0.8],
        arithmetic="0.8 at the last turn's two tokens; 0.5 + 0.5 x 0.8",
    ),
    AdvantageByHand(
        name="gigpo",
        inputs={
            "rewards": [1, 0],
            "turn_rewards": [0, 0],
            "turn_lengths": [1, 1],
            "turn_counts": [1, 1],
            "turn_anchors": [4, 4],
        },
        settings={"std": "none"},
        expected=[1, -1],
        arithmetic="0.5 against the other trajectory, 0.5 against the other turn from state 4",
    ),
    AdvantageByHand(
        name="distill",
        inputs={
            "rewards": [0],
            "lengths": [1],
            "behavior_logprobs": [-1],
            "teacher_logprobs": [-2],
        },
        settings={"distill_coefficient": 0.5},
        expected=[-0.5],
        arithmetic="-0.5 (-1 + 2)",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceByHand:
    """One loss on one entry."""

    name: str
    """Name of the loss."""
    inputs: Mapping[str, Any]
    """One number each; references are 0 and lengths 1 where not given."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """What differs from the defaults."""
    loss: float
    """Of the entry."""
    slopes: Mapping[str, float]
    """By live input."""
    arithmetic: str
    """How they come about."""


_PAIR = {"chosen_logprobs": 2.0, "rejected_logprobs": -1.0}

PREFERENCES_BY_HAND: tuple[PreferenceByHand, ...] = (
    PreferenceByHand(
        name="dpo",
        inputs=_PAIR,
        loss=0.5543552444685271,
        slopes={"chosen_logprobs": -0.0425557483188341, "rejected_logprobs": 0.0425557483188341},
        arithmetic="x = 0.1 (2 + 1): log(1 + e^-0.3); 0.1 sigma(-0.3)",
    ),
    PreferenceByHand(
        name="ipo",
        inputs=_PAIR,
        loss=4.0,
        slopes={"chosen_logprobs": -4.0, "rejected_logprobs": 4.0},
        arithmetic="(3 - 1 / 0.2)^2 = 4; 2 (3 - 5)",
    ),
    PreferenceByHand(
        name="hinge",
        inputs=_PAIR,
        settings={"beta": 0.2},
        loss=0.4,
        slopes={"chosen_logprobs": -0.2, "rejected_logprobs": 0.2},
        arithmetic="1 - 0.2 x 3",
    ),
    PreferenceByHand(
        name="simpo",
        inputs={
            "chosen_logprobs": -1.0,
            "rejected_logprobs": -4.0,
            "chosen_lengths": 2,
            "rejected_lengths": 4,
        },
        settings={"beta": 2.0, "margin": 0.5},
        loss=0.4740769841801067,
        slopes={"chosen_logprobs": -0.3775406687981454, "rejected_logprobs": 0.1887703343990727},
        arithmetic="x = -1 + 2 - 0.5: log(1 + e^-0.5); sigma(-0.5) x 2/2 and x 2/4",
    ),
    PreferenceByHand(
        name="orpo",
        inputs={"chosen_logprobs": -LN_2, "rejected_logprobs": -1.6094379124341003},
        loss=0.7154615356913663,
        slopes={"chosen_logprobs": -1.04, "rejected_logprobs": 0.025},
        arithmetic="odds 1 and 1/4: ln 2 + 0.1 ln(1 + 1/4); -1 - 0.1 x 0.2 / 0.5; 0.1 x 0.2 / 0.8",
    ),
    PreferenceByHand(
        name="kto",
        inputs={"logprobs": 3.0, "desirable": True, "z0": 1.0},
        loss=0.45016600268752205,
        slopes={"logprobs": -0.024751657271185997},
        arithmetic="1 - sigma(0.1 (3 - 1)); sigma(0.2) sigma(-0.2) x 0.1",
    ),
    PreferenceByHand(
        name="kto",
        inputs={"logprobs": 3.0, "desirable": False, "z0": 1.0},
        loss=0.5498339973124778,
        slopes={"logprobs": 0.024751657271185997},
        arithmetic="1 - sigma(0.1 (1 - 3))",
    ),
    PreferenceByHand(
        name="reward_model",
        inputs={"chosen_scores": 2.0, "rejected_scores": 0.5},
        settings={"margin": 0.5},
        loss=0.31326168751822286,
        slopes={"chosen_scores": -0.2689414213699951, "rejected_scores": 0.2689414213699951},
        arithmetic="log(1 + e^-1); sigma(-1)",
    ),
    PreferenceByHand(
        name="process_reward_model",
        inputs={"scores": 2.0, "labels": 1.0},
        loss=0.1269280110429725,
        slopes={"scores": -0.11920292202211769},
        arithmetic="log(1 + e^-2); sigma(2) - 1",
    ),
)

KL_BY_HAND: Mapping[str, tuple[float, float]] = {
    "k1": (LN_2, 1.0),
    "k2": (0.2402265069591007, LN_2),
    "k3": (0.1931471805599453, 0.5),
    "k1+": (LN_2, LN_2),
    "k3+": (0.1931471805599453, LN_2),
}
"""Value and slope at d = ln 2: ln 2, 1; (ln 2)^2 / 2, ln 2; 1/2 - 1 + ln 2, 1 - 1/2."""

AGGREGATIONS_BY_HAND: Mapping[str, tuple[float, float, float]] = {
    "token_mean": (1 / 8, 1 / 8, 1 / 8),
    "sequence_mean_token_mean": (1 / 9, 1 / 3, 1 / 12),
    "sequence_mean_token_sum": (1 / 3, 1 / 3, 1 / 3),
    "constant": (1 / 16, 1 / 16, 1 / 16),
    "trajectory_mean": (1 / 8, 1 / 8, 1 / 8),
}
"""Rows of 3, 1 and 4 trained tokens, the first two of one trajectory, 8 the longest allowed: N = 8,
R = 3, T = 2, and both trajectories have 4 tokens."""

CORRECTIONS_BY_HAND: Mapping[str, tuple[float, float, float]] = {
    "none": (1.0, 1.0, 1.0),
    "tis": (2.0, 0.25, 2.0),
    "mis": (0.0, 0.25, 0.0),
    "icepop": (4.0, 0.0, 3.0),
    "sequence_mis": (1.0, 1.0, 0.0),
    "geo_mask": (1.0, 1.0, 0.0),
}
"""c = 4 and 1/4 in one row, 3 in another: the first row's product and geometric mean are 1."""
