"""What crosses a process border comes back equal, and damage is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.errors import InvariantError
from nexrl.testing.makers import make_trajectory
from nexrl.types import PolicyVersion, RowChunk, Trajectory
from nexrl.wire import from_plain, pack, to_plain, unpack


def same(a: object, b: object) -> bool:
    return pack(a) == pack(b)


def test_a_trajectory_comes_back_equal() -> None:
    trajectory = make_trajectory(reward=0.5, group_id="g3")
    back = from_plain(Trajectory, unpack(pack(trajectory)))
    assert same(trajectory, back)
    assert back.rows[0].token_ids.dtype == np.int32
    assert back.status is trajectory.status


def test_fields_of_a_newer_schema_survive_in_extra() -> None:
    plain = {**to_plain(make_trajectory()), "colour": "blue"}
    back = from_plain(Trajectory, unpack(pack(plain)))
    assert back.extra["colour"] == "blue"


def test_an_unknown_field_of_a_class_without_extra_is_refused() -> None:
    with pytest.raises(InvariantError, match=r"no field \['colour'\]"):
        from_plain(PolicyVersion, {"number": 1, "colour": "blue"})


@given(st.lists(st.integers(1, 5), max_size=4))
def test_chunks_of_any_shape_come_back(lengths: list[int]) -> None:
    rows = [np.arange(n, dtype=np.int32) for n in lengths]
    chunk = RowChunk.from_rows(rows, {"weight": [np.ones(n, np.float32) for n in lengths]})
    assert same(chunk, from_plain(RowChunk, unpack(pack(chunk))))


def test_objects_are_never_sent() -> None:
    with pytest.raises(InvariantError, match="cannot be sent"):
        pack({"f": print})
    with pytest.raises(InvariantError, match="dtype"):
        pack(np.array([object()]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack({"a": 1})[:-1],
        pack({"__nd__": ["|O", [1]], "data": b"12345678"}),
        pack({"__nd__": ["<f4", [3]], "data": b"1234"}),
    ],
)
def test_damaged_or_hostile_bytes_are_named(data: bytes) -> None:
    with pytest.raises(InvariantError, match="not a readable message"):
        unpack(data)
