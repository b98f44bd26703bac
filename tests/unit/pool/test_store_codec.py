"""Trajectories as bytes: an exact round trip, also across layouts."""

import copy
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexrl.errors import InvariantError
from nexrl.pool.store_codec import (
    LAYOUT,
    decode_failure,
    decode_trajectory,
    encode,
)
from nexrl.testing.makers import make_failure, make_row, make_trajectory, make_version
from nexrl.types import (
    Column,
    MediaSpan,
    Provenance,
    Sampling,
    Segment,
    TokenRow,
    Trajectory,
    TrajectoryStatus,
    Turn,
    VersionSpan,
)
from nexrl.wire import to_plain


def full_trajectory() -> Trajectory:
    """Every field away from its default."""
    row = make_row(
        version=3,
        policy="solver",
        incarnation=2,
        temperature=0.7,
        version_source="pinned",
        media=(MediaSpan(blob_hash="ab", start=0, end=1, processor="p1"),),
        columns={"teacher": Column(values=np.ones((5, 2), np.float16), pad_value=-1.0)},
    )
    masked = make_row(
        loss_mask=np.array([0, 0, 0, 1, 1], np.bool_),
        turns=(Turn(start=2, end=5, finish_reason="length", reward=-0.5, anchor="hall"),),
    )
    return make_trajectory(
        rows=(row, masked),
        policy="solver",
        reward=0.25,
        reward_parts={"exact": 0.25},
        status=TrajectoryStatus.TRUNCATED,
        truncation_cause="length",
        trajectory_id="t",
        rollout_id="r",
        group_id="g",
        item_id="i",
        draw=1,
        member=2,
        role="judge",
        run_id="run",
        metrics={"turns": 2.0},
        extra={"difficulty": 3, "ids": np.arange(3)},
        provenance=Provenance(
            sampling=Sampling(seed=4, stop=("x",), top_k=5),
            seed=9,
            engine="builtin 1",
            capabilities={"logprobs": True},
            segments=(Segment(kind="inference", queued_s=0.0, started_s=0.5, finished_s=1.0),),
            attempts=2,
        ),
    )


def assert_equal(left: Trajectory, right: Trajectory) -> None:
    assert to_plain(left) == to_plain(right)


@pytest.mark.parametrize(
    "trajectory",
    [
        full_trajectory(),
        Trajectory(prompt="p", tokens=np.array([1, 2], np.int32), reward=0.0),
        Trajectory(status=TrajectoryStatus.FAILED, failure=make_failure("größer", retryable=True)),
        make_trajectory(reward=None),
        make_trajectory(response="half an emoji \ud83d"),
    ],
)
def test_a_trajectory_survives_unchanged(trajectory: Trajectory) -> None:
    assert_equal(decode_trajectory(encode(trajectory)), trajectory)


@given(st.lists(st.booleans(), max_size=40), st.booleans())
def test_masks_of_any_length_survive(mask: list[bool], with_logprobs: bool) -> None:
    sampled = np.ones(len(mask), np.bool_)
    logprobs = np.linspace(-3, 0, len(mask)).astype(np.float32) if with_logprobs else None
    spans = (VersionSpan(start=0, end=len(mask), version=make_version()),) if mask else ()
    row = TokenRow(
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=np.array(mask, np.bool_),
        sampled=sampled,
        behavior_logprobs=logprobs,
        versions=spans,
    )
    trajectory = Trajectory(rows=(row,))
    assert_equal(decode_trajectory(encode(trajectory)), trajectory)


def test_a_failure_survives_unchanged() -> None:
    failure = make_failure(traceback="File ...")
    assert decode_failure(encode(failure)) == failure


def test_a_value_that_is_no_plain_data_is_kept_as_its_repr() -> None:
    trajectory = make_trajectory(extra={"path": object, "set": {2, 1}, "float": np.float32(0.5)})
    decoded = decode_trajectory(encode(trajectory))
    assert decoded.extra == {"path": {"__repr__": "<class 'object'>"}, "set": [1, 2], "float": 0.5}


def other_layout(change: str) -> tuple[dict[str, list[str]], bytes]:
    """A layout with one field more or less in Trajectory, and data written in it."""
    layout = copy.deepcopy(dict(LAYOUT))
    values: list[Any] = msgpack.unpackb(encode(make_trajectory(role="judge")))
    if change == "added":
        layout["Trajectory"].append("mood")
        values.append("good")
    else:
        place = layout["Trajectory"].index("role")
        del layout["Trajectory"][place], values[1 + place]
    return layout, msgpack.packb(values)


def test_a_field_of_another_version_survives_in_extra() -> None:
    layout, data = other_layout("added")
    decoded = decode_trajectory(data, layout)
    assert decoded.extra == {"mood": "good"}
    assert decode_trajectory(encode(decoded)).extra == {"mood": "good"}


def test_a_field_that_an_older_version_did_not_write_reads_as_its_default() -> None:
    layout, data = other_layout("removed")
    assert decode_trajectory(data, layout).role == ""


def test_turns_of_schema_1_have_neither_reward_nor_anchor() -> None:
    """As stores of the first version hold them: three places behind the mark."""
    layout = {**LAYOUT, "Turn": ["start", "end", "finish_reason"]}
    values: list[Any] = msgpack.unpackb(encode(make_trajectory()))
    row = values[1 + LAYOUT["Trajectory"].index("rows")][0]
    (turn,) = row[1 + LAYOUT["TokenRow"].index("turns")]
    del turn[4:]
    decoded = decode_trajectory(msgpack.packb(values), layout)
    assert decoded.rows[0].turns == (Turn(start=2, end=5, finish_reason="eos"),)


def test_damaged_bytes_are_named() -> None:
    data = encode(make_trajectory())
    with pytest.raises(InvariantError, match="is damaged"):
        decode_trajectory(data[: len(data) // 2])


def test_a_short_trajectory_takes_few_bytes() -> None:
    """Storage is bounded: this one has five tokens."""
    assert len(encode(make_trajectory())) < 256
