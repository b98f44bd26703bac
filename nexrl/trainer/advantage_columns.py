"""Trajectories and frozen columns to what an estimator of advantages is given.

    trajectories, RowTable, [N] columns -> AdvantageInputs ([T], [U], [M]) -> estimator

What an estimator needs and a trajectory lacks is an error that names the trajectory; nothing is
filled with 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.advantage_definition import AdvantageInputs, Advantages, AdvantageSettings
from nexrl.algorithms.advantages import compute_advantages, find_advantage
from nexrl.algorithms.groups import Float64Array, group_index
from nexrl.algorithms.metrics import advantage_metrics, reward_metrics
from nexrl.algorithms.turns import NO_ANCHOR, turn_table
from nexrl.config.schema_algorithm import AdvantageConfig
from nexrl.errors import InvariantError
from nexrl.trainer.batching import RowTable, describe
from nexrl.trainer.own_code import is_path, load_own_advantage
from nexrl.types import Array, BoolArray, Trajectory

GREEDY_REWARD = "greedy_reward"
"""Key in `Trajectory.extra` of the reward of the draw's greedy completion."""


class AdvantageEstimator:
    """A named estimator, or a recipe's own, with the settings that configuration gives it."""

    def __init__(self, config: AdvantageConfig, recipe_dir: Path) -> None:
        self._definition = (
            load_own_advantage(config.name, recipe_dir)
            if is_path(config.name)
            else find_advantage(config.name)
        )
        known = {field.name for field in fields(AdvantageSettings)} & set(type(config).model_fields)
        self._settings = AdvantageSettings(**{name: getattr(config, name) for name in known})

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of AdvantageInputs that it cannot do without."""
        return self._definition.needs

    @property
    def uses_reward(self) -> bool:
        """False for pure distillation, which asks the teacher alone."""
        return self._definition.name != "distill" or self._settings.task_coefficient != 0

    def estimate(self, inputs: AdvantageInputs, *, moving_baseline: float | None) -> Advantages:
        """Advantages in the order of the inputs."""
        settings = replace(self._settings, moving_baseline=moving_baseline)
        return compute_advantages(self._definition, inputs, settings)


_TURN_FIELDS = ("turn_rewards", "turn_lengths", "turn_counts", "turn_anchors")
_NEEDED = ", which trainer.algorithm.advantage needs"
_NEEDED_TOKEN_FIELDS = ("values", "behavior_logprobs", "teacher_logprobs")


def advantage_inputs(
    trajectories: Sequence[Trajectory],
    table: RowTable,
    columns: Mapping[str, Array],
    *,
    needs: Sequence[str],
) -> AdvantageInputs:
    """What is known of the trajectories in a table that was made of them.

    `columns` are [N] and may hold token_rewards, values, behavior_logprobs, teacher_logprobs;
    `needs` are the estimator's. InvariantError names a trajectory that lacks one of them, or that
    has no group. A trajectory without a reward counts as 0: the caller has removed those where
    rewards matter.
    """
    _require_each(
        trajectories,
        lambda t: bool(t.group_id),
        "has no group_id, so it cannot be compared with others",
    )
    found: dict[str, Any] = {
        name: columns[name][table.mask].astype(np.float64)
        for name in ("token_rewards", *_NEEDED_TOKEN_FIELDS)
        if name in columns and (name in needs or name == "token_rewards")
    }
    if any(name in needs for name in _TURN_FIELDS):
        found.update(_turn_fields(trajectories, needs))
    if "greedy_rewards" in needs:
        found["greedy_rewards"] = _greedy_rewards(trajectories)
    return AdvantageInputs(
        rewards=np.array([t.reward or 0.0 for t in trajectories], np.float64),
        groups=group_index(t.group_id for t in trajectories),
        lengths=table.trained_lengths(len(trajectories)),
        reward_parts=_reward_parts(trajectories, required="reward_parts" in needs),
        **found,
    )


def row_column(table: RowTable, trajectories: Sequence[Trajectory], name: str) -> Array:
    """[N] a further column of the rows; InvariantError names a trajectory without it, or whose
    entries are no numbers about each token given the tokens before it."""
    for index, row in zip(table.trajectories.tolist(), table.rows, strict=True):
        found = row.columns.get(name)
        if found is None:
            raise InvariantError(
                f"{describe(trajectories[index])} has no column {name!r}, which "
                f"trainer.algorithm needs (its columns: {sorted(row.columns) or 'none'})"
            )
        if found.values.ndim != 1 or found.alignment != "token_given_prefix":
            raise InvariantError(
                f"{describe(trajectories[index])}: column {name!r} has shape "
                f"{found.values.shape} and alignment {found.alignment!r} (accepted: one number a "
                "token, of the token given those before it)"
            )
    if not table.num_rows:
        return np.zeros(0, np.float32)
    column: Array = np.concatenate([row.columns[name].values for row in table.rows])
    broken = ~np.isfinite(column) & table.mask
    if broken.any():
        row_number = int(table.owners(np.flatnonzero(broken)[:1])[0])
        owner = trajectories[int(table.trajectories[row_number])]
        raise InvariantError(f"{describe(owner)}: column {name!r} is not finite at a trained token")
    return column


def judgement_metrics(
    trajectories: Sequence[Trajectory],
    given: AdvantageInputs,
    shaped: AdvantageInputs,
    found: Advantages,
    kept: BoolArray,
) -> dict[str, float]:
    """advantage/*, reward/* and group/*.

    Rewards are as they were given, over the trajectories `kept` [T] for training; groups are judged
    as the estimator saw them. Without rewards (distillation) only advantages remain.
    """
    assert given.lengths is not None
    judged = (
        found.per_trajectory[kept]
        if found.per_trajectory is not None
        else np.asarray(found.per_token)[np.repeat(kept, given.lengths)]
    )
    if any(t.reward is None for t in trajectories):
        return advantage_metrics(judged)
    trained = AdvantageInputs(rewards=given.rewards[kept], groups=given.groups[kept])
    metrics = reward_metrics(trained, judged)
    if kept.all() and np.array_equal(shaped.rewards, given.rewards):
        return metrics
    seen = reward_metrics(AdvantageInputs(rewards=shaped.rewards, groups=shaped.groups), judged)
    return {
        **metrics,
        **{name: value for name, value in seen.items() if name.startswith("group/")},
        "reward/shaped_mean": float(shaped.rewards[kept].mean()) if kept.any() else 0.0,
        "reward/masked": float((~kept).sum()),
    }


def _turn_fields(trajectories: Sequence[Trajectory], needs: Sequence[str]) -> dict[str, Any]:
    """[U] turns. A turn without a reward earned none, but a trajectory of which no turn has one was
    not judged by turns at all; the same goes for anchors."""
    turns = turn_table(trajectories)
    if "turn_rewards" in needs:
        _require_each(
            trajectories,
            lambda t: any(turn.reward is not None for row in t.rows for turn in row.turns),
            "has no turn with a reward (Turn.reward)" + _NEEDED,
        )
    if "turn_anchors" in needs:
        _require_each(
            trajectories,
            lambda t: any(turn.anchor for row in t.rows for turn in row.turns),
            "has no turn with an anchor state (Turn.anchor)" + _NEEDED,
        )
    known = turns.anchors != NO_ANCHOR
    return {
        "turn_rewards": turns.rewards,
        "turn_lengths": turns.lengths,
        "turn_counts": turns.counts,
        "turn_anchors": turns.anchors if known.any() or "turn_anchors" in needs else None,
    }


def _greedy_rewards(trajectories: Sequence[Trajectory]) -> Float64Array:
    _require_each(
        trajectories,
        lambda t: isinstance(found := t.extra.get(GREEDY_REWARD), Real) and math.isfinite(found),
        f"has no number extra[{GREEDY_REWARD!r}]: the reward of its draw's greedy completion "
        "(trainer.algorithm.greedy_baseline: true draws one)" + _NEEDED,
    )
    return np.array([float(t.extra[GREEDY_REWARD]) for t in trajectories], np.float64)


def _reward_parts(
    trajectories: Sequence[Trajectory], *, required: bool
) -> dict[str, npt.NDArray[np.float64]]:
    """[T] each named part; parts that not all trajectories have are an error where they matter."""
    names = list(dict.fromkeys(name for t in trajectories for name in t.reward_parts))
    if required and trajectories:
        if not names:
            raise InvariantError(
                f"{describe(trajectories[0])} has no reward parts, which "
                "trainer.algorithm.advantage needs: the reward function must return a mapping"
            )
        for t in trajectories:
            if missing := [name for name in names if name not in t.reward_parts]:
                raise InvariantError(f"{describe(t)} has no reward part {missing}, others do")
    return {
        name: np.array([t.reward_parts[name] for t in trajectories], np.float64)
        for name in names
        if all(name in t.reward_parts for t in trajectories)
    }


def _require_each(
    trajectories: Sequence[Trajectory], has: Callable[[Trajectory], bool], complaint: str
) -> None:
    for t in trajectories:
        if not has(t):
            raise InvariantError(f"{describe(t)} {complaint}")
