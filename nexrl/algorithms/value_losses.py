"""The critic's loss: how far a value is from the return it should predict.

Used by the policy `critic` of a train service (a value head), for `gae`.
"""

from __future__ import annotations

import math
from typing import Any

from nexrl.algorithms.array_namespace import namespace
from nexrl.algorithms.loss_definition import Inputs, LossDefinition, Outputs, Settings, number
from nexrl.errors import ConfigError


def value(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """[n] 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); without clip 1/2 (V - R)^2.

    values V, returns R and old_values V_old (the critic's before the batch) are [n] at trained
    tokens. PPO's code, Schulman et al. 2017 (the paper has the unclipped square); the factor 1/2 is
    that of InstructGPT's and later codes.
    """
    values, returns = outputs["values"], inputs["returns"]
    error = (values - returns) ** 2
    if settings["clip"] is not None:
        xp, bound = namespace(values), number(settings, "clip")
        held = inputs["old_values"] + xp.clip(values - inputs["old_values"], -bound, bound)
        error = xp.maximum(error, (held - returns) ** 2)
    return 0.5 * error


def value_clips(outputs: Outputs, inputs: Inputs, settings: Settings) -> tuple[Any, Any]:
    """[n] tokens without gradient: the value fell, or rose, beyond the clip towards the return."""
    values, returns, old = outputs["values"], inputs["returns"], inputs["old_values"]
    moved = values - old
    bound = math.inf if settings["clip"] is None else number(settings, "clip")
    xp = namespace(values)
    held = old + xp.clip(moved, -bound, bound)
    nearer = (held - returns) ** 2 > (values - returns) ** 2
    return (moved < -bound) & nearer, (moved > bound) & nearer


def _check(settings: Settings) -> None:
    if settings["clip"] is not None and number(settings, "clip") <= 0:
        raise ConfigError(f"loss setting clip must be above 0 or null, got {settings['clip']!r}")


VALUE_LOSSES: tuple[LossDefinition, ...] = (
    LossDefinition(
        name="value",
        required=("weight", "returns", "old_values"),
        config={"clip": 0.2},
        bounded=True,
        term_of=value,
        needs=("values",),
        clips=value_clips,
        check=_check,
    ),
)
