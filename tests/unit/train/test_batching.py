"""Micro-batch plans and layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.services.train.batching import MicroBatch, micro_batches, plan_packed, plan_padded
from nexrl.types import RowChunk

LENGTHS = st.lists(st.integers(2, 12), min_size=1, max_size=20)


def lay_out(rows: list[list[int]], *, max_tokens: int = 64, packing: bool) -> list[MicroBatch]:
    chunk = RowChunk.from_rows([np.array(row, np.int32) for row in rows])
    wanted = np.ones(chunk.num_tokens, np.bool_)
    return list(
        micro_batches(chunk, range(len(rows)), wanted, max_tokens=max_tokens, packing=packing)
    )


def predictions(batch: MicroBatch, rows: list[list[int]]) -> list[tuple[int, int]]:
    """(fed token, predicted token) pairs."""
    flat = [t for row in rows for t in row]
    fed = batch.token_ids.reshape(-1)
    return [
        (int(fed[s]), flat[t])
        for s, t in zip(batch.slots.tolist(), batch.targets.tolist(), strict=True)
    ]


def test_nothing_is_predicted_across_a_packed_border() -> None:
    """FR-092: labels of [10, 11, 12 | 20, 21] are [11, 12, ignore, 21, ignore]."""
    rows = [[10, 11, 12], [20, 21], [30, 31]]
    [batch] = lay_out(rows, packing=True)
    assert batch.token_ids.tolist() == [[10, 11], [20, 30]]
    assert predictions(batch, rows) == [(10, 11), (11, 12), (20, 21), (30, 31)]


def test_positions_restart_with_each_row_and_are_never_shifted() -> None:
    """FR-094: a row of 4 tokens has positions 0, 1, 2 (the last token is fed to nobody)."""
    [packed] = lay_out([[1, 2, 3, 4, 5], [1, 2, 3], [1, 2], [1, 2]], packing=True)
    assert packed.position_ids is not None
    assert packed.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    [padded] = lay_out([[1, 2, 3, 4], [1, 2]], packing=False)
    assert padded.position_ids is None
    assert padded.token_ids.tolist() == [[1, 2, 3], [1, 0, 0]]


@pytest.mark.parametrize("packing", [False, True])
def test_padding_is_told_by_length_and_never_by_a_token(packing: bool) -> None:
    """FR-019: [5, 6, 7] has no EOS (2). FR-020: [5, 2] and [5, 6, 7, 2] have 2 and 4 targets."""
    rows = [[8, 5, 6, 7], [8, 5, 2], [8, 5, 6, 7, 2]]
    [batch] = lay_out(rows, packing=packing)
    predicted = sorted(target for _, target in predictions(batch, rows))
    assert predicted == sorted([5, 6, 7, 5, 2, 5, 6, 7, 2])


def test_padding_behind_the_last_row_is_a_run_of_its_own() -> None:
    [batch] = lay_out([[1, 2, 3, 4, 5, 6], [1, 2], [1, 2]], packing=True)
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]


@pytest.mark.parametrize("plan", [plan_padded, plan_packed])
@given(lengths=LENGTHS, max_tokens=st.integers(1, 40))
def test_every_row_is_planned_once_within_the_bound(
    plan: Any, lengths: list[int], max_tokens: int
) -> None:
    batches = plan(np.array(lengths, np.int32), range(len(lengths)), max_tokens)
    rows = sorted(row for batch in batches for sequence in batch for row in sequence)
    assert rows == list(range(len(lengths)))
    for batch in batches:
        width = max(sum(lengths[row] for row in sequence) for sequence in batch)
        assert len(batch) == 1 or len(batch) * width <= max_tokens


@given(lengths=LENGTHS, max_tokens=st.integers(1, 40), packing=st.booleans())
def test_every_token_but_the_first_of_a_row_is_predicted_by_the_one_before_it(
    lengths: list[int], max_tokens: int, packing: bool
) -> None:
    rows = [[100 * i + j for j in range(n)] for i, n in enumerate(lengths)]
    found = sorted(
        pair
        for batch in lay_out(rows, max_tokens=max_tokens, packing=packing)
        for pair in predictions(batch, rows)
    )
    assert found == [(t, t + 1) for row in rows for t in row[:-1]]


def test_packing_uses_fewer_slots_than_padding() -> None:
    lengths = np.array([32, 3, 5, 4, 9, 2, 2, 8], np.int32)
    assert [len(batch) for batch in plan_packed(lengths, range(8), 256)] == [3]
    assert [len(batch) for batch in plan_padded(lengths, range(8), 256)] == [8]


def test_plan_does_not_depend_on_the_order_in_which_rows_are_named() -> None:
    lengths = np.array([3, 5, 3, 5, 2], np.int32)
    for plan in (plan_padded, plan_packed):
        assert plan(lengths, [4, 2, 0, 1, 3], 10) == plan(lengths, range(5), 10)
