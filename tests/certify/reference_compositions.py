"""What each preset composes, once more: its parts and numbers, literal, from the papers.

`docs/algorithms.md` says which source each number has. Settings that are not written are those of
`hand_defaults.py`; nothing here is read from `nexrl.algorithms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """An objective on sampled trajectories."""

    advantage: str
    """Estimator."""
    judged: Settings = field(default_factory=dict)
    """Settings of the estimator."""
    loss: str = "ppo"
    """Policy or distillation loss."""
    settings: Settings = field(default_factory=dict)
    """Settings of the loss."""
    aggregation: str = "token_mean"
    """Denominator."""
    kl: tuple[float, str, str] | None = None
    """Coefficient, estimator, `loss` or `reward`."""
    correction: tuple[str, str, float | None, float | None] | None = None
    """Level, action, lower and upper bound; the proximal policy is recomputed then."""
    recomputed: bool = False
    """Whether it is in any case."""
    entropy: float = 0.0
    """Coefficient of the bonus."""
    held_at: float | None = None
    """Entropy that the coefficient is driven to hold."""
    rate: float = 1e-3
    """How far it is driven after a batch."""
    shaping: Settings = field(default_factory=dict)
    """overlong_cache, overlong_penalty, length_penalty, mask_truncated."""
    critic_clip: float | None = None
    """Bound on a value's move, where there is a critic."""
    warm_up: bool = False
    """Whether the first batches train the critic alone."""
    top_k: int = 0
    """Candidates of the teacher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """An objective on rows that are read."""

    loss: str
    """Preference loss, or `cross_entropy` over tokens."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Settings of the loss."""


CLIP_20: Settings = {"clip_low": 0.2, "clip_high": 0.2}
CLIP_28: Settings = {"clip_low": 0.2, "clip_high": 0.28}
ROW_MEAN = "sequence_mean_token_mean"
ROW_SUM = "sequence_mean_token_sum"
LONGEST = 10
"""Longest response of the batches that these are held against; dapo's cache is a fifth of it."""

SAMPLED: Mapping[str, Composition] = {
    "grpo": Composition(
        advantage="grpo", settings=CLIP_20, aggregation=ROW_MEAN, kl=(0.04, "k3", "loss")
    ),
    "dr_grpo": Composition(advantage="dr_grpo", settings=CLIP_20, aggregation="constant"),
    "dapo": Composition(
        advantage="grpo",
        settings=CLIP_28,
        shaping={"overlong_cache": LONGEST // 5, "overlong_penalty": 1.0},
    ),
    "ppo": Composition(
        advantage="gae", judged={"gae_lambda": 0.95}, settings=CLIP_20, critic_clip=0.2
    ),
    "vapo": Composition(
        advantage="gae",
        judged={"critic_lambda": 1.0, "length_adaptive": 0.05},
        settings=CLIP_28,
        critic_clip=0.2,
        warm_up=True,
    ),
    "rloo": Composition(advantage="rloo", loss="reinforce", aggregation=ROW_SUM),
    "opo": Composition(advantage="opo", loss="reinforce", aggregation=ROW_SUM),
    "remax": Composition(advantage="remax", loss="reinforce", aggregation=ROW_SUM),
    "reinforce": Composition(
        advantage="reinforce", judged={"baseline": "batch"}, loss="reinforce", aggregation=ROW_SUM
    ),
    "reinforce_pp": Composition(
        advantage="reinforce_pp",
        settings=CLIP_20,
        aggregation=ROW_MEAN,
        kl=(0.01, "k1", "reward"),
    ),
    "reinforce_pp_baseline": Composition(
        advantage="reinforce_pp_baseline",
        settings=CLIP_20,
        aggregation=ROW_MEAN,
        kl=(1e-5, "k2", "loss"),
    ),
    "gdpo": Composition(advantage="gdpo", settings=CLIP_20, aggregation=ROW_MEAN),
    "pass_at_k": Composition(advantage="pass_at_k", judged={"pass_k": 4}, settings=CLIP_28),
    "cispo": Composition(advantage="grpo", loss="cispo", settings={"clip_high": 4.0}),
    "gspo": Composition(
        advantage="grpo",
        loss="gspo",
        settings={"clip_low": 3e-4, "clip_high": 4e-4},
        aggregation=ROW_MEAN,
    ),
    "gspo_token": Composition(
        advantage="grpo",
        loss="gspo_token",
        settings={"clip_low": 3e-4, "clip_high": 4e-4},
        aggregation=ROW_MEAN,
    ),
    "bapo": Composition(advantage="grpo", loss="bapo"),
    "dppo": Composition(
        advantage="dr_grpo",
        loss="dppo",
        settings={"clip_low": 0.15, "clip_high": 0.15},
        aggregation="constant",
    ),
    "decoupled_ppo": Composition(
        advantage="grpo", settings=CLIP_20, correction=("token", "mask", None, 5.0)
    ),
    "gigpo": Composition(
        advantage="gigpo",
        judged={"gamma": 0.95},
        settings=CLIP_20,
        aggregation=ROW_MEAN,
        kl=(0.01, "k3", "loss"),
    ),
    "step_returns": Composition(advantage="step_returns", judged={"gamma": 0.95}, settings=CLIP_20),
    "distill": Composition(advantage="distill", loss="importance_sampling"),
    "distill_top_k": Composition(advantage="reinforce", loss="reverse_kl_top_k", top_k=16),
    "luspo": Composition(
        advantage="grpo",
        loss="luspo",
        settings={"clip_low": 2e-3, "clip_high": 2.5e-3},
        aggregation=ROW_SUM,
    ),
    "gmpo": Composition(
        advantage="grpo",
        loss="gmpo",
        settings={"clip_low": 0.4, "clip_high": 0.4},
        aggregation=ROW_MEAN,
    ),
    "sapo": Composition(advantage="grpo", loss="sapo", aggregation=ROW_MEAN),
    "vespo": Composition(advantage="dr_grpo", loss="vespo", aggregation=ROW_SUM),
    "topr": Composition(advantage="dr_grpo", loss="topr", aggregation=ROW_SUM),
    "kimi": Composition(advantage="dr_grpo", loss="kimi", aggregation=ROW_SUM),
    "clip_cov": Composition(advantage="grpo", loss="clip_cov"),
    "kl_cov": Composition(advantage="grpo", loss="kl_cov"),
}

READ: Mapping[str, Offline] = {
    "sft": Offline(loss="cross_entropy"),
    "dpo": Offline(loss="dpo", settings={"beta": 0.1}),
    "ipo": Offline(loss="ipo", settings={"beta": 0.1}),
    "hinge": Offline(loss="hinge", settings={"beta": 0.1}),
    "kto": Offline(loss="kto", settings={"beta": 0.1}),
    "simpo": Offline(loss="simpo", settings={"beta": 2.0, "margin": 1.0}),
    "orpo": Offline(loss="orpo", settings={"odds_coefficient": 0.1}),
    "reward_model": Offline(loss="reward_model"),
    "process_reward_model": Offline(loss="process_reward_model"),
}


def _varied(**changes: Any) -> Composition:
    """Another part in `dr_grpo`."""
    return replace(SAMPLED["dr_grpo"], **changes)


PARTS: Mapping[tuple[str, str], tuple[Settings, Composition]] = {
    **{
        ("aggregation", name): ({"loss.aggregation": name}, _varied(aggregation=name))
        for name in ("token_mean", ROW_MEAN, ROW_SUM, "constant", "trajectory_mean")
    },
    **{
        ("KL estimator", name): (
            {
                "kl.coefficient": 0.3,
                "kl.estimator": name,
                "kl.placement": placement,
                "recompute_proximal": placement == "reward",
            },
            _varied(kl=(0.3, name, placement), recomputed=placement == "reward"),
        )
        for name, placement in (
            ("k1", "reward"),
            ("k2", "loss"),
            ("k3", "loss"),
            ("k1+", "loss"),
            ("k3+", "loss"),
        )
    },
    **{
        ("correction", name): ({"correction": name}, _varied(correction=correction))
        for name, correction in (
            ("none", None),
            ("tis", ("token", "truncate", None, 2.0)),
            ("mis", ("token", "mask", None, 2.0)),
            ("icepop", ("token", "mask", 0.5, 5.0)),
            ("sequence_mis", ("sequence", "mask", None, 2.0)),
            ("geo_mask", ("geometric", "mask", 0.999, 1.001)),
        )
    },
    **{
        ("shaping rule", name): (
            {f"shaping.{key}": value for key, value in settings.items()},
            _varied(shaping=settings),
        )
        for name, settings in (
            ("overlong_cache", {"overlong_cache": 4}),
            ("overlong_penalty", {"overlong_cache": 4, "overlong_penalty": 0.3}),
            ("mask_truncated", {"mask_truncated": True}),
            ("length_penalty", {"length_penalty": 0.05}),
        )
    },
    **{
        ("entropy setting", name): (
            {f"entropy.{key}": value for key, value in settings.items()},
            _varied(
                entropy=0.05,
                held_at=settings.get("target"),
                rate=settings.get("rate", 1e-3),
            ),
        )
        for name, settings in (
            ("coefficient", {"coefficient": 0.05}),
            ("target", {"coefficient": 0.05, "target": 9.0}),
            ("rate", {"coefficient": 0.05, "target": 0.1, "rate": 0.02}),
        )
    },
}
"""(family, name) -> what is written of `trainer.algorithm` over preset `dr_grpo`, and what that
composes."""
