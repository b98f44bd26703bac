"""The durable record: acknowledged means committed, facts once, annotations appended."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nexrl.errors import StoreError
from nexrl.pool.store_reader import StoredRecord, StoreReader, annotated
from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.testing.makers import (
    RecordingTracker,
    make_draw,
    make_pool,
    make_record,
)
from nexrl.types import SCHEMA_VERSION, Annotation, Trajectory
from nexrl.wire import to_plain

UNWRITABLE = "\ud800"
"""An id that SQLite cannot hold: a lone surrogate."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[TrajectoryStore]:
    store = TrajectoryStore(path, run_id="run")
    yield store
    await store.aclose()


def read(path: Path, **filters: Any) -> list[StoredRecord]:
    with StoreReader(path) as reader:
        return list(reader.read(**filters))


async def test_an_acknowledged_record_reads_back_as_it_was(
    store: TrajectoryStore, path: Path
) -> None:
    draw = make_draw(3, draw=1, source="sums", order=17)
    record = make_record(draw, 2, attempts=2, duration_s=1.5)
    await store.append(record, draw=draw, policy="solver", admitted_version=4)
    (found,) = read(path)
    assert to_plain(found.record) == to_plain(record)
    assert (found.item_id, found.draw, found.source) == ("i3", 1, "sums")
    assert (found.policy, found.admitted_version, found.outcome) == ("solver", 4, "open")


async def test_failed_and_filtered_rollouts_are_kept_with_their_reasons(
    store: TrajectoryStore, path: Path
) -> None:
    failed = store.append(make_record(status="failed"), policy="actor")
    kept = store.append(make_record(member=1), policy="actor")
    store.append_outcomes([failed.rollout], "failed", "infrastructure/ServiceError", version=0)
    store.append_outcomes([kept.rollout], "filtered", "group_incomplete", version=0)
    await store.flush()
    found = read(path)
    assert found[0].record.failure is not None
    assert found[0].record.failure.message == "engine answered 500"
    assert [s.outcome_reason for s in found] == ["infrastructure/ServiceError", "group_incomplete"]


async def test_a_reader_sees_nothing_that_is_not_acknowledged(path: Path) -> None:
    store = TrajectoryStore(path, commit_every_s=3600)
    stored = store.append(make_record(), policy="actor")
    assert read(path) == []
    await store.flush()
    await stored
    assert len(read(path)) == 1
    await store.aclose()


async def test_records_that_arrive_during_a_commit_share_the_next_one(
    store: TrajectoryStore, path: Path
) -> None:
    acknowledgements = [store.append(make_record(member=m), policy="actor") for m in range(500)]
    await asyncio.gather(*(asyncio.ensure_future(_wait(a)) for a in acknowledgements))
    assert [s.record.member for s in read(path)] == list(range(500))


async def _wait(acknowledgement: Any) -> None:
    await acknowledgement


async def test_a_cancelled_waiter_does_not_cancel_the_commit_of_others(
    store: TrajectoryStore, path: Path
) -> None:
    first = asyncio.create_task(_wait(store.append(make_record(), policy="actor")))
    second = store.append(make_record(member=1), policy="actor")
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert len(read(path)) == 2


async def test_a_full_queue_makes_the_caller_wait_for_room(path: Path) -> None:
    store = TrajectoryStore(path, commit_every_s=3600, max_queued_records=10)
    fullness = [store.is_full]
    for member in range(10):
        store.append(make_record(member=member), policy="actor")
    fullness.append(store.is_full)
    await store.room()
    fullness.append(store.is_full)
    await store.aclose()
    assert fullness == [False, True, False]


async def test_records_can_be_filtered(store: TrajectoryStore, path: Path) -> None:
    for item, status in enumerate(["completed", "truncated", "failed"]):
        draw = make_draw(item)
        stored = store.append(make_record(draw, status=status), draw=draw, policy=f"p{item}")
        store.append_outcomes(
            [stored.rollout], "trained" if item < 2 else "failed", "", version=item
        )
    await store.flush()
    assert [s.item_id for s in read(path, status="truncated")] == ["i1"]
    assert [s.item_id for s in read(path, outcome="trained", version=0)] == ["i0"]
    assert [s.item_id for s in read(path, policy="p2")] == ["i2"]
    assert [s.item_id for s in read(path, item_id="i1", outcome="failed")] == []
    assert [s.item_id for s in read(path, trajectory_id="i1/0/0/t0")] == ["i1"]


async def test_annotations_are_appended_and_facts_stay(store: TrajectoryStore, path: Path) -> None:
    await store.append(make_record(reward=0.0), policy="actor")
    for version in ("1", "2"):
        value = {"reward": float(version), "reward_parts": {}}
        await store.annotate(
            [
                Annotation(
                    trajectory_id="i0/0/0/t0",
                    kind="reward",
                    producer="judge",
                    version=version,
                    value=value,
                )
            ]
        )
    (found,) = read(path)
    assert found.record.trajectories[0].reward == 0.0
    assert [a.version for a in found.annotations] == ["1", "2"]
    assert annotated(found)[0].reward == 2.0


@pytest.mark.parametrize("trajectory_id", ["unknown", "i0/0/0/t0"])
async def test_an_annotation_of_nothing_or_made_twice_is_refused(
    path: Path, trajectory_id: str
) -> None:
    store = TrajectoryStore(path)
    await store.append(make_record(), policy="actor")
    annotation = Annotation(
        trajectory_id=trajectory_id, kind="reward", producer="judge", version="1", value=1.0
    )
    with pytest.raises(StoreError, match="constraint failed"):
        await store.annotate([annotation, annotation])
    await store.aclose()
    assert read(path)[0].annotations == ()


async def test_what_an_annotator_adds_in_the_pool_is_an_annotation(path: Path) -> None:
    class Judge:
        provides = "reward"
        deadline_s = 1.0

        async def annotate(self, trajectory: Trajectory) -> Trajectory:
            return replace(trajectory, reward=0.5, reward_parts={"style": 0.5})

    store = TrajectoryStore(path)
    pool = make_pool(rollout_repeat_n=1, store=store, annotators=[Judge()])
    await pool.admit(make_draw())
    await pool.end_rollout(make_record(reward=None))
    await pool.aclose()
    await store.aclose()
    (found,) = read(path)
    assert found.record.trajectories[0].reward is None
    assert found.annotations[0].value == {"reward": 0.5, "reward_parts": {"style": 0.5}}
    assert annotated(found)[0].reward_parts == {"style": 0.5}


async def test_a_store_is_continued_by_a_resumed_run(path: Path) -> None:
    for incarnation in range(2):
        store = TrajectoryStore(path, run_id="run", incarnation=incarnation)
        await store.append(make_record(), policy="actor")
        await store.aclose()
    assert [s.incarnation for s in read(path)] == [0, 1]


async def test_closing_commits_what_is_queued_and_refuses_more(path: Path) -> None:
    store = TrajectoryStore(path, commit_every_s=3600)
    store.append(make_record(), policy="actor")
    await store.aclose()
    await store.aclose()
    assert len(read(path)) == 1
    with pytest.raises(StoreError, match="is closed"):
        store.append(make_record(), policy="actor")


async def test_a_trajectory_that_cannot_be_written_stops_with_the_file_named(path: Path) -> None:
    store = TrajectoryStore(path)
    with pytest.raises(StoreError, match=r"store\.sqlite: UnicodeEncodeError"):
        await store.append(make_record(rollout_id=UNWRITABLE), policy="actor")
    with pytest.raises(StoreError):
        await store.flush()
    await store.aclose()


@pytest.mark.parametrize("on_error", ["stop", "continue"])
async def test_a_store_that_fails_stops_the_run_or_is_left_out(path: Path, on_error: str) -> None:
    tracker = RecordingTracker()
    store = TrajectoryStore(path)
    pool = make_pool(rollout_repeat_n=1, store=store, store_on_error=on_error, tracker=tracker)
    await pool.admit(make_draw())
    await pool.end_rollout(make_record(rollout_id=UNWRITABLE))
    if on_error == "stop":
        with pytest.raises(StoreError):
            await pool.flush()
    else:
        await pool.flush()
        assert await pool.take(version=0) is not None
        assert tracker.counts["store/write_failures"] == 1
        assert "no longer stored" in tracker.warnings[0]
    await store.aclose()


class NeverCommits(TrajectoryStore):
    """A store of somebody's own that fails in `flush`."""

    async def flush(self) -> None:
        raise StoreError("the bucket is gone")


async def test_the_pool_asks_the_store_that_it_was_given(path: Path) -> None:
    store = NeverCommits(path)
    with pytest.raises(StoreError, match="the bucket is gone"):
        await make_pool(store=store).flush()
    with pytest.raises(StoreError, match="the bucket is gone"):
        await store.aclose()


# --- schema and damage ------------------------------------------------------------------------


async def written_store(path: Path, count: int = 20) -> None:
    store = TrajectoryStore(path)
    for member in range(count):
        store.append(make_record(member=member), policy="actor")
    await store.aclose()


def change(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


async def test_a_newer_schema_is_refused_with_both_versions(path: Path) -> None:
    await written_store(path)
    change(path, "UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    for open_store in (StoreReader, TrajectoryStore):
        with pytest.raises(
            StoreError, match=f"schema version 99; this NexRL reads versions up to {SCHEMA_VERSION}"
        ):
            open_store(path)


async def test_an_older_schema_is_read_and_continued(path: Path) -> None:
    await written_store(path, 2)
    change(
        path,
        "ALTER TABLE rollouts DROP COLUMN source",
        "UPDATE meta SET value = '0' WHERE key = 'schema_version'",
    )
    assert [s.source for s in read(path)] == ["", ""]
    store = TrajectoryStore(path)
    await store.append(make_record(), draw=make_draw(source="new"), policy="actor")
    await store.aclose()
    assert [s.source for s in read(path)] == ["", "", "new"]


def test_a_file_that_is_no_store_is_named(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 100)
    for open_store in (StoreReader, TrajectoryStore):
        with pytest.raises(StoreError, match=r"store\.sqlite is damaged\. Move it aside"):
            open_store(path)


def test_another_sqlite_file_is_not_taken_for_a_store(path: Path) -> None:
    change(path, "CREATE TABLE x (y)")
    with pytest.raises(StoreError, match="not a trajectory store"):
        TrajectoryStore(path)


def test_a_missing_store_is_named(path: Path) -> None:
    with pytest.raises(StoreError, match="there is no trajectory store at"):
        StoreReader(path)


def damage_a_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096] = b"\xff" * 4096
    path.write_bytes(data)


async def test_a_damaged_page_of_the_main_file_is_named_before_anything_is_written(
    path: Path,
) -> None:
    await written_store(path, 500)
    damage_a_page(path)
    with pytest.raises(StoreError, match=r"store\.sqlite is damaged"):
        TrajectoryStore(path)
    with pytest.raises(StoreError, match=r"store\.sqlite is damaged"):
        read(path)
