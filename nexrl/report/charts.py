"""The charts of a run page: which metrics stand together, and on what scale.

A table and nothing else; `figures.py` draws what of it a run has logged, `report.py` names what of
the usual it has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart over training steps."""

    title: str
    """Shown above it; a stage's own chart adds the stage."""
    lines: Mapping[str, str]
    """Metric by label: what is drawn, where it was logged."""
    usual: bool = False
    """Whether the page says so when a run has not logged any of it."""
    per_stage: bool = False
    """Whether each stage has its own, because scales have nothing in common."""
    is_log: bool = False
    """A logarithmic scale: values are positive and of very different size."""
    limits: tuple[float, float] | None = None
    """Values beyond are drawn at the border, where single ones would hide the rest."""
    min_lines: int = 1
    """Fewer lines are no chart: they say nothing that another chart does not say."""


CURVE = Chart(
    title="Curve",
    lines={
        "held-out accuracy": "validation/accuracy",
        "reward, all rollouts": "reward/mean",
        "reward, trained": "reward/trained_mean",
    },
)
"""What curve.png shows."""

CHARTS: tuple[Chart, ...] = (
    Chart(title="Held-out accuracy", lines={"accuracy": "validation/accuracy"}, usual=True),
    Chart(
        title="Reward",
        lines={
            "all rollouts": "reward/mean",
            "trained": "reward/trained_mean",
            "held-out": "validation/reward",
        },
        usual=True,
    ),
    Chart(
        title="Told apart, share",
        lines={
            "training pairs": "preference/accuracy",
            "training steps": "process_reward_model/accuracy",
        },
    ),
    Chart(
        title="Margin between preferred and rejected",
        lines={
            "training": "preference/margin",
            "training steps": "process_reward_model/margin",
            "held-out": "validation/margin",
        },
    ),
    Chart(
        title="Rewards or scores of the two sides",
        lines={
            "preferred": "preference/reward_chosen",
            "rejected": "preference/reward_rejected",
            "right steps": "process_reward_model/reward_chosen",
            "wrong steps": "process_reward_model/reward_rejected",
        },
    ),
    Chart(
        title="Logprobs of the two sides, nats per response",
        lines={
            "preferred": "preference/logprob_chosen",
            "rejected": "preference/logprob_rejected",
        },
    ),
    Chart(
        title="Loss",
        lines={"loss": "loss/total", "nll per token": "nll/token"},
        usual=True,
        per_stage=True,
    ),
    Chart(
        title="Terms of the loss",
        lines={
            "policy": "loss/policy",
            "KL": "loss/kl",
            "entropy": "loss/entropy",
            "imitation": "loss/imitation",
        },
        per_stage=True,
        min_lines=2,
    ),
    Chart(title="Gradient norm", lines={"before clipping": "grad_norm"}, usual=True),
    Chart(
        title="Response length, tokens",
        lines={"mean": "response_length/mean", "longest": "response_length/max"},
        usual=True,
    ),
    Chart(title="Entropy, nats per token", lines={"entropy": "entropy"}, usual=True),
    Chart(
        title="KL, nats per token",
        lines={
            **{f"to the reference, {e}": f"kl/{e}" for e in ("k1", "k2", "k3", "k1+", "k3+")},
            "within the batch": "kl/proximal",
        },
    ),
    Chart(
        title="Tokens held back by the clip, share",
        lines={"lower bound": "ratio/clip_share_low", "upper bound": "ratio/clip_share_high"},
    ),
    Chart(
        title="Off-policy correction, share of tokens",
        lines={"effective sample": "correction/ess", "masked": "correction/masked_share"},
    ),
    Chart(
        title="Rollout groups, share",
        lines={"equal rewards": "group/constant_share", "kept by filters": "pool/kept_share"},
        min_lines=2,
    ),
    Chart(
        title="Critic: values and what they should be",
        lines={"value": "values/mean", "return": "values/return_mean"},
    ),
    Chart(
        title="Critic: explained variance, at least -1",
        lines={"of returns": "values/explained_variance"},
        limits=(-1.0, 1.0),
    ),
    Chart(
        title="Trainer and engine disagree, nats",
        lines={"mean": "mismatch/abs_mean", "largest": "mismatch/max"},
        usual=True,
        is_log=True,
    ),
    Chart(
        title="Throughput, tokens per second",
        lines={"generated": "rollout/tokens_per_s"},
        usual=True,
    ),
    Chart(
        title="Seconds of each step",
        lines={
            "train": "time/train",
            "sync": "time/sync",
            "validation": "time/validation",
            "waiting for rollouts": "time/rollout_wait",
            "other": "time/other",
        },
        usual=True,
        is_log=True,
    ),
)
"""In the order of the page: what was learned first, what it took last."""
