"""Turns of trajectories as flat arrays: what estimators that judge turns are given.

Between trajectories and `AdvantageInputs`, whose `turn_rewards`, `turn_lengths`, `turn_counts` and
`turn_anchors` these are. The order is trajectory, row, position, as everywhere in this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nexrl.algorithms.groups import Float64Array, IndexArray
from nexrl.errors import InvariantError
from nexrl.types import TokenRow, Trajectory, Turn

NO_ANCHOR = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTable:
    """The U trained turns of T trajectories with M trained tokens, in the order given.

    Invariant: each turn has a trained token, and each trained token belongs to exactly one turn.
    """

    rewards: Float64Array
    """[U] what each turn earned itself; 0 where nothing is known."""
    lengths: IndexArray
    """[U] trained tokens of each turn; they sum to M."""
    counts: IndexArray
    """[T] turns of each trajectory; they sum to U."""
    anchors: IndexArray
    """[U] index of the state that the turn started from: equal exactly for turns of one baseline
    group with equal anchor keys; -1 where the key is empty."""


def turn_table(trajectories: Sequence[Trajectory]) -> TurnTable:
    """The turns of trajectories that have a trained token.

    Trained are tokens with `loss_mask`, save the first of a row, before which no token stands. A
    row that names no turns is one turn. InvariantError names the trajectory of a trained token
    that stands outside the turns of its row.
    """
    rewards: list[float] = []
    lengths: list[int] = []
    anchors: list[int] = []
    counts = np.zeros(len(trajectories), np.int64)
    keys: dict[tuple[str, str], int] = {}
    for index, trajectory in enumerate(trajectories):
        for row in trajectory.rows:
            for turn, length in _trained_turns(row, trajectory):
                counts[index] += 1
                lengths.append(length)
                rewards.append(0.0 if turn is None or turn.reward is None else turn.reward)
                if turn is None or not turn.anchor:
                    anchors.append(NO_ANCHOR)
                else:
                    anchors.append(keys.setdefault((trajectory.group_id, turn.anchor), len(keys)))
    return TurnTable(
        rewards=np.array(rewards, np.float64),
        lengths=np.array(lengths, np.int64),
        counts=counts,
        anchors=np.array(anchors, np.int64),
    )


def _trained_turns(row: TokenRow, owner: Trajectory) -> list[tuple[Turn | None, int]]:
    """Turns of a row with their trained tokens; None stands for the turn of a row without any."""
    mask = row.loss_mask
    total = int(np.count_nonzero(mask[1:]))
    if not total:
        return []
    if not row.turns:
        return [(None, total)]
    counted = [
        (turn, int(np.count_nonzero(mask[max(turn.start, 1) : turn.end]))) for turn in row.turns
    ]
    outside = total - sum(length for _, length in counted)
    if outside:
        raise InvariantError(
            f"trajectory {owner.trajectory_id!r} (item {owner.item_id!r}): {outside} of {total} "
            f"trained tokens of a row stand outside its turns "
            f"{[(turn.start, turn.end) for turn in row.turns]}"
        )
    return [(turn, length) for turn, length in counted if length]
