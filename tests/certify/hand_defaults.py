"""Default settings by name, literal: what a name does when nothing else is written.

Numbers of the papers where they publish one; docs/algorithms.md says which are ours. The composed
references (`reference_presets.py`) start from these, never from the registries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nexrl.algorithms.advantage_definition import AdvantageSettings
from nexrl.algorithms.corrections import CORRECTION_PRESETS
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES

Settings = Mapping[str, Any]

_TERMS: Settings = {"kl_coefficient": 0.0, "kl_estimator": "k3", "entropy_coefficient": 0.0}
_CLIPS: Settings = {**_TERMS, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}

LOSS_DEFAULTS: Mapping[str, Settings] = {
    "cross_entropy": {},
    "reinforce": _TERMS,
    "importance_sampling": _TERMS,
    "ppo": _CLIPS,
    "bapo": {
        **_TERMS,
        "clip_low": 0.4,
        "clip_high": 0.2,
        "dual_clip": None,
        "clip_low_end": 0.1,
        "clip_high_end": 2.0,
        "clip_low_step": 0.02,
        "clip_high_step": 0.05,
        "positive_share": 0.4,
    },
    "cispo": {**_TERMS, "clip_low": None, "clip_high": 4.0},
    "dppo": {**_TERMS, "clip_low": 0.15, "clip_high": 0.15},
    "gspo": {**_CLIPS, "clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {**_CLIPS, "clip_low": 3e-4, "clip_high": 4e-4},
    "luspo": {**_CLIPS, "clip_low": 2e-3, "clip_high": 2.5e-3},
    "gmpo": {**_TERMS, "clip_low": 0.4, "clip_high": 0.4},
    "sapo": {**_TERMS, "tau_positive": 1.0, "tau_negative": 1.05},
    "vespo": {
        **_TERMS,
        "k_positive": 2.0,
        "lambda_positive": 3.0,
        "k_negative": 3.0,
        "lambda_negative": 2.0,
    },
    "topr": {**_TERMS, "clip_high": 0.0},
    "kimi": {**_TERMS, "tau": 0.1},
    "clip_cov": {
        **_TERMS,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "fraction": 2e-4,
        "covariance_low": 1.0,
        "covariance_high": 5.0,
        "seed": 0,
    },
    "kl_cov": {**_TERMS, "fraction": 2e-3, "penalty": 1.0},
    "value": {"clip": 0.2},
    "reverse_kl": _TERMS,
    "reverse_kl_top_k": _TERMS,
    "forward_kl_top_k": _TERMS,
    "jsd_top_k": {**_TERMS, "beta": 0.5},
}

FIXED_AGGREGATIONS: Mapping[str, str] = {
    "gspo": "sequence_mean_token_mean",
    "gspo_token": "sequence_mean_token_mean",
    "luspo": "sequence_mean_token_sum",
    "gmpo": "sequence_mean_token_mean",
}
"""Losses that are defined under one denominator only."""

PREFERENCE_DEFAULTS: Mapping[str, Settings] = {
    "dpo": {"beta": 0.1, "label_smoothing": 0.0, "sft_coefficient": 0.0},
    "ipo": {"beta": 0.1, "sft_coefficient": 0.0},
    "hinge": {"beta": 0.1, "sft_coefficient": 0.0},
    "simpo": {"beta": 0.1, "margin": 0.0, "sft_coefficient": 0.0},
    "orpo": {"odds_coefficient": 0.1},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "reward_model": {"margin": 0.0},
    "process_reward_model": {},
}

CORRECTION_DEFAULTS: Mapping[str, tuple[str, str, float | None, float | None]] = {
    "none": ("token", "none", None, None),
    "tis": ("token", "truncate", None, 2.0),
    "mis": ("token", "mask", None, 2.0),
    "icepop": ("token", "mask", 0.5, 5.0),
    "sequence_mis": ("sequence", "mask", None, 2.0),
    "geo_mask": ("geometric", "mask", 0.999, 1.001),
}
"""Level, action, lower and upper bound."""

ADVANTAGE_DEFAULTS: Settings = {
    "std": "sample",
    "gamma": 1.0,
    "gae_lambda": 1.0,
    "critic_lambda": None,
    "length_adaptive": None,
    "whiten": True,
    "pass_k": 2,
    "success_reward": 1.0,
    "part_weights": {},
    "baseline": "none",
    "moving_baseline": None,
    "step_weight": 1.0,
    "distill_coefficient": 1.0,
    "task_coefficient": 0.0,
}


SHAPING_DEFAULTS: Settings = {
    "overlong_cache": None,
    "overlong_penalty": 1.0,
    "mask_truncated": False,
    "length_penalty": 0.0,
}


def defaults_error(family: str, name: str) -> float:
    """0 when the implementation's defaults are these, 1 when they are not."""
    if family == "loss":
        loss = LOSSES[name]
        same = dict(loss.config) == dict(LOSS_DEFAULTS.get(name, {"": None}))
        return float(not same or loss.aggregation != FIXED_AGGREGATIONS.get(name))
    if family == "preference loss":
        return float(dict(PREFERENCE_LOSSES[name].config) != PREFERENCE_DEFAULTS.get(name))
    if family == "correction":
        preset = CORRECTION_PRESETS[name]
        found = (preset.level, preset.action, preset.low, preset.high)
        return float(found != CORRECTION_DEFAULTS.get(name))
    if family == "advantage":
        return float(asdict(AdvantageSettings()) != ADVANTAGE_DEFAULTS)
    return 0.0
