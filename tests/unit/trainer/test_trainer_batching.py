"""Trajectories to chunks: nothing is lost, split, reordered or trained that must not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from nexrl.errors import InvariantError
from nexrl.testing.makers import make_row, make_trajectory
from nexrl.trainer.batching import RowTable, flatten, make_chunks, split_by_group
from nexrl.types import TokenRow, Trajectory


def trajectory(*rows: TokenRow, **fields: Any) -> Trajectory:
    return make_trajectory(rows=tuple(rows), **fields)


def row(length: int, *, temperature: float = 1.0, **fields: Any) -> TokenRow:
    """A row of `length` tokens whose prompt is its first token."""
    ids = range(1, length)
    made = make_row(
        prompt_ids=(9,), response_ids=tuple(ids), logprobs=tuple(-0.1 * i for i in ids), **fields
    )
    from dataclasses import replace

    return replace(made, temperature=temperature)


def lengths_of(table: RowTable, max_chunk_bytes: int) -> list[list[int]]:
    column = np.zeros(table.num_tokens, np.float32)
    chunks = make_chunks(
        table, np.arange(table.num_rows), {"weight": column}, max_chunk_bytes=max_chunk_bytes
    )
    return [chunk.rows.lengths.tolist() for chunk in chunks]


def test_columns_line_up_with_the_rows_given() -> None:
    table = flatten([trajectory(row(3), row(4)), trajectory(row(2))])
    assert table.lengths.tolist() == [3, 4, 2]
    assert table.trajectories.tolist() == [0, 0, 1]
    assert table.token_ids.tolist() == [9, 1, 2, 9, 1, 2, 3, 9, 1]
    assert table.mask.tolist() == [False, True, True, False, True, True, True, False, True]
    assert table.num_trained.tolist() == [2, 3, 1]
    assert table.behavior_logprobs == pytest.approx([0, -0.1, -0.2, 0, -0.1, -0.2, -0.3, 0, -0.1])


def test_the_first_token_of_a_row_is_never_trained() -> None:
    made = Trajectory(tokens=np.array([5, 6, 7]), loss_mask=np.array([True, True, True]))
    assert flatten([made]).mask.tolist() == [False, True, True]


def test_rows_without_anything_to_train_are_left_out() -> None:
    masked = Trajectory(tokens=np.array([5, 6]), loss_mask=np.array([False, False]))
    only_first = Trajectory(tokens=np.array([5, 6]), loss_mask=np.array([True, False]))
    single = Trajectory(tokens=np.array([5]), loss_mask=np.array([True]))
    table = flatten([masked, trajectory(row(3)), only_first, single])
    assert table.trajectories.tolist() == [1]
    assert flatten([masked]).num_rows == 0


def test_a_synthetic_stop_token_is_not_trained() -> None:
    """FR-017: a token that the engine did not sample has mask 0, whatever logprob is stored."""
    made = TokenRow(
        token_ids=np.array([9, 5, 2], np.int32),
        loss_mask=np.array([False, True, False]),
        sampled=np.array([False, True, False]),
        behavior_logprobs=np.array([0.0, -0.2, 0.0], np.float32),
    )
    table = flatten([trajectory(made)])
    assert table.mask.tolist() == [False, True, False]


def test_raw_logprobs_of_a_tempered_draw_count_as_unknown() -> None:
    from dataclasses import replace

    raw = replace(row(3, temperature=0.5), logprob_kind="raw")
    plain = replace(row(3, temperature=1.0), logprob_kind="raw")
    assert flatten([trajectory(raw), trajectory(plain)]).known.tolist() == [False, True]


def test_chunks_are_bounded_by_bytes_and_keep_order() -> None:
    table = flatten([trajectory(row(n)) for n in (4, 4, 4, 20, 2, 2)])
    assert lengths_of(table, 8 * 9) == [[4, 4], [4], [20], [2, 2]]
    assert lengths_of(table, 1_000_000) == [[4, 4, 4, 20, 2, 2]]


def test_rows_of_different_temperature_go_into_different_chunks() -> None:
    made = [row(n, temperature=t) for n, t in ((2, 1.0), (3, 0.7), (4, 1.0), (5, 0.7))]
    table = flatten([trajectory(r) for r in made])
    chunks = make_chunks(table, np.arange(4), {}, max_chunk_bytes=10**6)
    assert [(c.rows.temperature, c.rows.lengths.tolist()) for c in chunks] == [
        (1.0, [2, 4]),
        (0.7, [3, 5]),
    ]


def test_chunk_positions_lead_back_to_the_table() -> None:
    table = flatten([trajectory(row(n)) for n in (4, 3, 5)])
    column = np.arange(table.num_tokens, dtype=np.float32)
    chunks = make_chunks(table, np.array([2, 0]), {"weight": column}, max_chunk_bytes=40)
    for chunk in chunks:
        np.testing.assert_array_equal(table.token_ids[chunk.positions], chunk.rows.token_ids)
        np.testing.assert_array_equal(chunk.rows.inputs["weight"], chunk.positions)
    assert np.concatenate([c.positions for c in chunks]).tolist() == [7, 8, 9, 10, 11, 0, 1, 2, 3]


def test_a_greedy_draw_cannot_be_trained() -> None:
    table = flatten([trajectory(row(3, temperature=0.0))])
    with pytest.raises(InvariantError, match="temperature 0"):
        make_chunks(table, np.arange(1), {}, max_chunk_bytes=10**6)


def parts_of(items: Sequence[str], num_parts: int) -> list[list[int]]:
    made = [make_trajectory(item_id=i, group_id=f"{i}/0") for i in items]
    return [part.tolist() for part in split_by_group(made, num_parts)]


def test_optimizer_steps_hold_whole_groups() -> None:
    assert parts_of(["a", "a", "b", "b", "c", "c", "d"], 2) == [[0, 1, 2, 3], [4, 5, 6]]
    assert parts_of(["a", "b", "a", "b"], 2) == [[0, 2], [1, 3]]
    assert parts_of(["a", "a"], 4) == [[0, 1]]
    assert parts_of([], 2) == []


def test_roles_of_one_rollout_stay_in_one_optimizer_step() -> None:
    made = [
        make_trajectory(item_id=item, group_id=f"{item}/0/{role}", role=role)
        for item in ("a", "b")
        for role in ("solver", "judge")
    ]
    assert [part.tolist() for part in split_by_group(made, 2)] == [[0, 1], [2, 3]]
