"""Turns as flat arrays, in the order of the trained tokens."""

from __future__ import annotations

import numpy as np
import pytest

from nexrl.algorithms.turns import turn_table
from nexrl.errors import InvariantError
from nexrl.testing.makers import make_row, make_trajectory
from nexrl.types import TokenRow, Trajectory, Turn


def row(mask: list[int], *turns: Turn) -> TokenRow:
    """A row of as many tokens as the mask is long."""
    loss_mask = np.array(mask, np.bool_)
    return TokenRow(
        token_ids=np.arange(len(mask), dtype=np.int32), loss_mask=loss_mask, turns=turns
    )


def trajectory(*rows: TokenRow, group_id: str = "g") -> Trajectory:
    return make_trajectory(rows=rows, group_id=group_id, trajectory_id="t7", item_id="i7")


def test_turns_stand_in_the_order_of_trajectory_row_and_position() -> None:
    forked = trajectory(
        row([0, 1, 1, 0, 1], Turn(start=1, end=3, reward=0.5), Turn(start=4, end=5)),
        row([0, 0, 1], Turn(start=2, end=3, reward=-1.0)),
    )
    table = turn_table([forked, make_trajectory()])
    assert table.rewards.tolist() == [0.5, 0.0, -1.0, 0.0]
    assert table.lengths.tolist() == [2, 1, 1, 3]
    assert table.counts.tolist() == [3, 1]


def test_turns_without_a_trained_token_are_left_out_with_their_reward() -> None:
    masked = trajectory(
        row([0, 0, 0, 1], Turn(start=1, end=3, reward=9.0), Turn(start=3, end=4, reward=1.0))
    )
    table = turn_table([masked, trajectory(row([0, 0], Turn(start=1, end=2)))])
    assert (table.rewards.tolist(), table.counts.tolist()) == ([1.0], [1, 0])


def test_the_first_token_of_a_row_is_never_trained() -> None:
    """As in the trainer's table: no token stands before it that could predict it."""
    table = turn_table([trajectory(row([1, 1, 1], Turn(start=0, end=3))), trajectory(row([1]))])
    assert (table.lengths.tolist(), table.counts.tolist()) == ([2], [1, 0])


def test_a_row_that_names_no_turns_is_one_turn() -> None:
    table = turn_table([trajectory(row([0, 1, 0, 1]))])
    assert (table.lengths.tolist(), table.anchors.tolist()) == ([2], [-1])


def test_equal_anchors_are_one_state_within_a_baseline_group_only() -> None:
    def visits(*anchors: str, group_id: str = "g") -> Trajectory:
        rows = [
            make_row(turns=(Turn(start=2, end=5, anchor=anchor),), versions=())
            for anchor in anchors
        ]
        return trajectory(*rows, group_id=group_id)

    table = turn_table(
        [visits("kitchen", "hall"), visits("hall", ""), visits("hall", group_id="h")]
    )
    assert table.anchors.tolist() == [0, 1, 1, -1, 2]


def test_a_trained_token_outside_the_turns_names_its_trajectory() -> None:
    stray = trajectory(row([0, 1, 1, 1], Turn(start=1, end=3)))
    with pytest.raises(InvariantError, match=r"'t7' \(item 'i7'\): 1 of 3 trained .* \[\(1, 3\)\]"):
        turn_table([stray])


def test_no_trajectories_make_an_empty_table() -> None:
    table = turn_table([])
    assert [len(a) for a in (table.rewards, table.lengths, table.counts, table.anchors)] == [0] * 4
