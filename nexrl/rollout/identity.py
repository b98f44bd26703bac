"""Identity of what a rollout left, filled in by the runner when it has ended.

A worker says what happened; who did it, for which item, with which seed and when, is known to the
scope of the attempt. Built-in workers ask it beforehand and so build each trajectory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nexrl.rollout.scope import RolloutScope
from nexrl.types import DEFAULT_POLICY, EMPTY_PROVENANCE, Provenance, Trajectory


def identified(trajectories: Sequence[Trajectory], scope: RolloutScope) -> tuple[Trajectory, ...]:
    """The trajectories with every identity field and their provenance."""
    return tuple(_identified(t, i, scope) for i, t in enumerate(trajectories))


def _identified(trajectory: Trajectory, index: int, scope: RolloutScope) -> Trajectory:
    if trajectory.trajectory_id == f"{scope.rollout_id}.{index}":
        return trajectory
    identity = scope.identity(role=trajectory.role, index=index)
    if trajectory.group_id:
        identity["group_id"] = _inside(scope.source.key, trajectory.group_id)
    if trajectory.policy != DEFAULT_POLICY:
        identity["policy"] = trajectory.policy
    if trajectory.provenance is not EMPTY_PROVENANCE:
        identity["provenance"] = _merged(trajectory.provenance, identity["provenance"])
    if trajectory.reward is not None:
        identity["reward"] = float(trajectory.reward)
    return replace(trajectory, **identity)


def _inside(key: str, own: str) -> str:
    """A worker's own baseline key, kept inside the draw so that it never spans two hand-outs."""
    return own if own == key or own.startswith(f"{key}/") else f"{key}/{own}"


def _merged(own: Provenance, filled: Provenance) -> Provenance:
    """The worker's own statements win where it made any; times and attempts are the runner's."""
    stated: dict[str, Any] = {
        name: value
        for name in ("sampling", "seed", "engine", "capabilities", "reward_contract", "environment")
        if (value := getattr(own, name)) != getattr(EMPTY_PROVENANCE, name)
    }
    return replace(filled, **stated, segments=(*own.segments, *filled.segments))
