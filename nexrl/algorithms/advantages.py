"""Advantages: what a batch's rewards say about each trained token.

The trainer calls `compute_advantages` once a batch. Estimators are named; each declares what it
needs and whether the zero rule for groups without signal holds for it. A trajectory counts once
however many rows it has (FR-047); groups are found by index, so any sizes in any order work
(FR-043, FR-044, FR-053).

    rewards, groups, token columns -> estimator -> [T] or [M] advantages (float64)

The estimators: `group_advantages.py` compares within groups, `baseline_advantages.py` with a number
from elsewhere, `return_advantages.py` steps over time, `distill_advantage.py` asks a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nexrl.algorithms.advantage_definition import (
    AdvantageDefinition,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
)
from nexrl.algorithms.baseline_advantages import BASELINE_ADVANTAGES
from nexrl.algorithms.distill_advantage import DISTILL_ADVANTAGE
from nexrl.algorithms.group_advantages import GROUP_ADVANTAGES
from nexrl.algorithms.groups import group_statistics
from nexrl.algorithms.return_advantages import RETURN_ADVANTAGES
from nexrl.algorithms.segments import plain_sum
from nexrl.errors import ConfigError, InvariantError

ADVANTAGES: Mapping[str, AdvantageDefinition] = {
    definition.name: definition
    for definition in (
        *GROUP_ADVANTAGES,
        *BASELINE_ADVANTAGES,
        *RETURN_ADVANTAGES,
        DISTILL_ADVANTAGE,
    )
}

PROVIDERS: Mapping[str, str] = {
    "lengths": "the trainer counts them in the rows' loss masks",
    "token_rewards": "trainer.algorithm.kl.placement: reward",
    "values": "a critic on the train service forwards them; preset `ppo` has one",
    "turn_rewards": "Turn.reward, from the rollout worker or the reward function",
    "turn_lengths": "the trainer counts them in the turns of the rows",
    "turn_counts": "the trainer counts the turns of the rows",
    "turn_anchors": "Turn.anchor, from the rollout worker: the state that a turn started from",
    "reward_parts": "a reward function that returns named parts",
    "greedy_rewards": "trainer.algorithm.greedy_baseline: true",
    "behavior_logprobs": "the inference service, or the trainer with recompute_proximal: true",
    "teacher_logprobs": "trainer.algorithm.teacher.path, or the rows' column teacher_logprobs",
}
"""Who provides what an estimator may need."""


def find_advantage(name: str) -> AdvantageDefinition:
    """The estimator of that name; ConfigError lists the known ones."""
    if name not in ADVANTAGES:
        raise ConfigError(
            f"no advantage estimator is named {name!r} (accepted: {sorted(ADVANTAGES)})"
        )
    return ADVANTAGES[name]


def compute_advantages(
    name: str | AdvantageDefinition,
    inputs: AdvantageInputs,
    settings: AdvantageSettings | None = None,
) -> Advantages:
    """Advantages in the order given, of a named estimator or of one's own.

    ConfigError on an unknown name or a missing input, InvariantError when the result is not one
    finite number for each trajectory or token.
    """
    definition = find_advantage(name) if isinstance(name, str) else name
    _refuse_missing(definition, inputs)
    totals = inputs.total_rewards()
    if not np.isfinite(totals).all():
        raise InvariantError("advantages: token_rewards are not finite")
    statistics = group_statistics(totals, inputs.groups)
    if definition.folds_token_rewards and inputs.token_rewards is not None:
        inputs = replace(inputs, rewards=totals, token_rewards=None)
    found = definition.estimate(inputs, statistics, settings or AdvantageSettings())
    if definition.group_relative and found.per_trajectory is not None:
        silent = statistics.silent if found.silent is None else found.silent
        zeroed = np.where(silent, 0.0, found.per_trajectory)
        found = replace(found, per_trajectory=zeroed)
    _refuse_malformed(definition, inputs, found)
    return found


def _refuse_missing(definition: AdvantageDefinition, inputs: AdvantageInputs) -> None:
    missing = [need for need in definition.needs if not _is_given(getattr(inputs, need))]
    if missing:
        raise ConfigError(
            f"trainer.algorithm.advantage: {definition.name} needs "
            + ", ".join(f"{need} ({PROVIDERS[need]})" for need in missing)
            + ", which this batch does not have"
        )


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, Mapping) and not value)


def _refuse_malformed(
    definition: AdvantageDefinition, inputs: AdvantageInputs, found: Advantages
) -> None:
    num_tokens = None if inputs.lengths is None else int(inputs.lengths.sum())
    for name, array, expected in (
        ("per_trajectory", found.per_trajectory, len(inputs.rewards)),
        ("per_token", found.per_token, num_tokens),
        ("returns", found.returns, num_tokens),
    ):
        if array is None:
            continue
        if expected is not None and np.shape(array) != (expected,):
            raise InvariantError(
                f"advantage estimator {definition.name}: {name} has shape {np.shape(array)}, "
                f"expected ({expected},)"
            )
        if array is not found.returns and not _all_finite(array):
            given = [need for need in definition.needs if not _all_finite(getattr(inputs, need))]
            raise InvariantError(
                f"advantage estimator {definition.name}: {name} is not finite"
                + (f"; nor is its input {given}" if given else "")
            )
    if (found.per_trajectory is None) == (found.per_token is None):
        raise InvariantError(
            f"advantage estimator {definition.name} must give exactly one of per_trajectory and "
            "per_token"
        )


def _all_finite(values: Any) -> bool:
    if isinstance(values, Mapping):
        return all(map(_all_finite, values.values()))
    # One sum in place of an array of booleans: a NaN or an infinity cannot be summed away.
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.isfinite(plain_sum(np.ravel(values))))
