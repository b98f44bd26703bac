"""Settings beside the defaults under which a loss is certified as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VARIANTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "ppo": (
        {"clip_low": 0.2, "clip_high": 0.28},
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5},
    ),
    "cispo": ({"clip_low": 0.4, "clip_high": 0.3},),
    "dppo": ({"clip_low": 0.05, "clip_high": 0.08},),
    "bapo": ({"positive_share": 0.6}, {"positive_share": 0.9, "dual_clip": 2.0}),
    "sapo": ({"tau_positive": 2.0, "tau_negative": 3.0},),
    "topr": ({"clip_high": 0.5},),
    "vespo": ({"k_positive": 0.5, "lambda_positive": 0.3},),
    "kimi": ({"tau": 1.0},),
    "clip_cov": (
        {"fraction": 0.3, "covariance_low": -0.5, "covariance_high": 0.5},
        {"fraction": 1.0, "covariance_low": -9.0, "covariance_high": 0.7, "dual_clip": 1.2},
    ),
    "kl_cov": ({"fraction": 0.3, "penalty": 0.5},),
    "gmpo": ({"clip_low": 0.1, "clip_high": 0.2},),
    "jsd_top_k": ({"beta": 0.1},),
    "value": ({"clip": None}, {"clip": 0.5}),
    "gspo": (
        {"clip_low": 0.1, "clip_high": 0.15},
        {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.2},
    ),
    "gspo_token": ({"clip_low": 0.1, "clip_high": 0.15},),
}
