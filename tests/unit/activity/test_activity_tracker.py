"""ActivityTracker: spans and shares, the reason to stop, what a step logs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.activity.memory import MemoryReading
from nexrl.config.schema import ExceptionHandlingConfig, RuntimeMonitorConfig
from nexrl.errors import DeadlineError, FailureClass, InvariantError, RunStoppedError
from nexrl.protocols import Tracker
from nexrl.testing.makers import (
    make_batch,
    make_failure,
    make_group,
    make_record,
    make_row,
    make_trajectory,
)
from nexrl.testing.virtual_time import virtual_time
from nexrl.types import Provenance, Segment


def make_activity_tracker(
    no_progress_s: float = 900.0,
    readings: Iterator[MemoryReading] | None = None,
    **handling: object,
) -> ActivityTracker:
    config = RuntimeMonitorConfig(
        no_progress_s=no_progress_s,
        exception_handling=ExceptionHandlingConfig.model_validate(handling),
    )
    return ActivityTracker(config, read_memory=lambda: next(readings) if readings else None)


def is_a_tracker(tracker: Tracker) -> Tracker:
    return tracker


@virtual_time
async def test_it_fulfils_the_tracker_protocol() -> None:
    tracker = make_activity_tracker()
    with is_a_tracker(tracker).activity("rollout", "i0/0/0"):
        assert [str(a) for a in tracker.spans.open_activities()] == ["rollout 'i0/0/0' for 0.0 s"]
    assert tracker.spans.open_activities() == []


@virtual_time
async def test_every_second_is_booked_on_one_share_and_training_hides_the_rollouts_under_it() -> (
    None
):
    tracker = make_activity_tracker()
    with tracker.activity("rollout", "a"):
        await asyncio.sleep(2)
        with tracker.activity("train", "batch 0"), tracker.activity("train", "chunk 0"):
            await asyncio.sleep(5)
    with tracker.activity("checkpoint", "step 1"):
        await asyncio.sleep(3)
    shares = tracker.time_share()
    assert shares == pytest.approx(
        {"train": 0.5, "sync": 0, "validation": 0, "rollout_wait": 0.2, "other": 0.3}
    )


@virtual_time
async def test_time_shares_of_a_stage_start_at_its_beginning() -> None:
    tracker = make_activity_tracker()
    with tracker.activity("train", "warm-up"):
        await asyncio.sleep(7)
    tracker.begin_stage()
    with tracker.activity("sync", "version 1"):
        await asyncio.sleep(1)
    assert tracker.stage_time_share()["sync"] == 1.0
    assert tracker.time_share()["sync"] == pytest.approx(1 / 8)


@virtual_time
async def test_waits_say_who_waits_for_whom_once_for_each_and_longest_first() -> None:
    tracker = make_activity_tracker()
    with tracker.activity("wait", "trainer waits for rollouts"):
        await asyncio.sleep(4)
        with (
            tracker.activity("wait", "a rollout waits for a slot"),
            tracker.activity("wait", "a rollout waits for a slot"),
        ):
            await asyncio.sleep(1)
            names = [(w.name, w.seconds) for w in tracker.spans.waits()]
    assert names == [("trainer waits for rollouts", 5.0), ("a rollout waits for a slot", 1.0)]


@virtual_time
async def test_the_slowest_work_is_remembered_longest_first_and_waits_are_no_work() -> None:
    tracker = make_activity_tracker()
    for seconds in range(1, 15):
        with tracker.activity("wait", "x"), tracker.activity("train", f"batch {seconds}"):
            await asyncio.sleep(seconds)
    slowest = tracker.spans.slowest()
    assert [a.name for a in slowest] == [f"batch {n}" for n in range(14, 4, -1)]


@virtual_time
async def test_a_standstill_stops_the_run_and_names_the_oldest_holders_and_who_waits() -> None:
    tracker = make_activity_tracker(no_progress_s=60)
    with (
        tracker.activity("train", "batch 7"),
        tracker.activity("rollout", "i3/0/1"),
        tracker.activity("wait", "trainer waits for rollouts"),
        pytest.raises(DeadlineError) as caught,
    ):
        await tracker.watch()
    assert asyncio.get_running_loop().time() == 60.0
    assert "nothing has ended well for 60 s (runtime_monitor.no_progress_s)" in str(caught.value)
    assert "held by train 'batch 7' for 60.0 s, rollout 'i3/0/1' for 60.0 s" in str(caught.value)
    assert "waiting: wait 'trainer waits for rollouts' for 60.0 s" in str(caught.value)


@virtual_time
async def test_finished_work_postpones_the_standstill_but_failing_work_and_waits_do_not() -> None:
    tracker = make_activity_tracker(no_progress_s=60)
    watch = asyncio.create_task(tracker.watch())
    await asyncio.sleep(50)
    with tracker.activity("train", "batch 0"):
        pass
    await asyncio.sleep(30)
    with tracker.activity("wait", "x"):
        pass
    with pytest.raises(KeyError), tracker.activity("rollout", "r"):
        raise KeyError
    with pytest.raises(DeadlineError):
        await watch
    assert asyncio.get_running_loop().time() == 110.0


@virtual_time
async def test_the_first_reason_to_stop_is_the_one_that_is_raised() -> None:
    tracker = make_activity_tracker()
    tracker.stop(InvariantError("first"))
    tracker.stop(InvariantError("second"))
    with pytest.raises(InvariantError, match="first"):
        await tracker.watch()


@virtual_time
async def test_a_failed_rollout_reaches_the_watcher() -> None:
    tracker = make_activity_tracker(policy="stop_on_error")
    watch = asyncio.create_task(tracker.watch())
    await asyncio.sleep(1)
    tracker.rollout_ended(make_record(status="failed", failure=make_failure("engine died")))
    with pytest.raises(RunStoppedError, match="engine died") as caught:
        await watch
    assert caught.value.failure_class is FailureClass.INFRASTRUCTURE


@virtual_time
async def test_observations_are_means_since_the_last_flush_and_counts_are_totals() -> None:
    tracker = make_activity_tracker()
    for value in (1.0, 2.0, 6.0):
        tracker.observe("staleness/mean", value)
        tracker.count("tool_error/json")
    first, second = tracker.flush(), tracker.flush()
    assert first["staleness/mean"] == 3.0
    assert first["tool_error/json"] == second["tool_error/json"] == 3.0
    assert "staleness/mean" not in second


@virtual_time
async def test_flush_books_the_seconds_of_the_step() -> None:
    tracker = make_activity_tracker()
    with tracker.activity("train", "batch 0"):
        await asyncio.sleep(3)
    tracker.flush()
    with tracker.activity("validation", "version 1"):
        await asyncio.sleep(2)
    metrics = tracker.flush()
    assert (metrics["time/step"], metrics["time/validation"], metrics["time/train"]) == (2, 2, 0)


@virtual_time
async def test_rollout_metrics_have_percentiles_timeouts_rates_and_the_workers_own_numbers() -> (
    None
):
    tracker = make_activity_tracker()
    await asyncio.sleep(2)
    for seconds in range(1, 101):
        tracker.rollout_ended(
            make_record(duration_s=float(seconds), reward=0.25, metrics={"turns": 3.0})
        )
    late = make_failure("too late", error_type="DeadlineError")
    tracker.rollout_ended(make_record(status="failed", failure=late, duration_s=100.0))
    tracker.rollout_ended(make_record(status="cancelled"))
    metrics = tracker.flush()
    assert metrics["rollout/latency_p50"] == 51.0
    assert metrics["rollout/latency_p99"] == 100.0
    assert metrics["rollout/timeout_rate"] == pytest.approx(1 / 101)
    assert metrics["rollout/tokens_per_s"] == 150.0
    assert metrics["rollout/trajectories_per_s"] == 50.0
    assert (metrics["reward/mean"], metrics["rollout/turns"]) == (0.25, 3.0)


@virtual_time
async def test_queue_delay_is_the_mean_over_calls_by_service() -> None:
    tracker = make_activity_tracker()
    segments = (
        Segment(kind="inference", queued_s=0.0, started_s=1.0, finished_s=4.0),
        Segment(kind="inference", queued_s=4.0, started_s=7.0, finished_s=8.0),
        Segment(kind="reward", queued_s=8.0, started_s=8.5, finished_s=10.5),
    )
    trajectory = make_trajectory(provenance=Provenance(segments=segments))
    tracker.rollout_ended(make_record(trajectories=[trajectory]))
    metrics = tracker.flush()
    assert (metrics["queue_delay/inference"], metrics["queue_delay/reward"]) == (2.0, 0.5)
    assert metrics["reward_service/latency"] == 2.0


@virtual_time
async def test_goodput_counts_trained_tokens_over_everything_generated() -> None:
    tracker = make_activity_tracker()
    group = make_group(rewards=(1.0, 0.0))
    for record in group.records:
        tracker.rollout_ended(record)
    untrained = make_trajectory(rows=(make_row(loss_mask=np.zeros(5, np.bool_)),))
    tracker.rollout_ended(make_record(trajectories=[untrained, untrained]))
    tracker.batch_trained(make_batch([group]))
    await asyncio.sleep(36)
    metrics = tracker.flush()
    assert metrics["goodput/trained_tokens_share"] == 0.5
    assert metrics["goodput/trajectories_per_hour"] == pytest.approx(200.0)


@virtual_time
async def test_failures_are_counted_by_innermost_type_and_warned_of_with_the_rollout_id() -> None:
    """FR-152: the wrapper's name hides the cause."""
    tracker = make_activity_tracker(policy="continue")
    heard: list[str] = []
    tracker.on_warn.append(heard.append)
    for member in range(3):
        failure = make_failure("x", error_type="ReadError", where="step")
        tracker.rollout_ended(make_record(None, member, status="failed", failure=failure))
    assert tracker.flush()["error/ReadError/count"] == 3.0
    assert heard == ["rollout i0/0/0 failed (infrastructure, step): ReadError: x"]


@virtual_time
async def test_the_same_warning_is_not_repeated_within_a_minute() -> None:
    tracker = make_activity_tracker()
    heard: list[str] = []
    tracker.on_warn.append(heard.append)
    for _ in range(7):
        tracker.warn("the canary is undecided")
        await asyncio.sleep(20)
    assert heard == ["the canary is undecided"] * 3


@virtual_time
async def test_low_memory_is_warned_of_with_the_trend_before_the_kill() -> None:
    """FR-167: after an out-of-memory kill nobody can say what happened."""
    gb = 10**9
    readings = iter(
        MemoryReading(resident=r * gb, available=a * gb, total=20 * gb)
        for r, a in ((2, 15), (17, 1))
    )
    tracker = make_activity_tracker(readings=readings)
    heard: list[str] = []
    tracker.on_warn.append(heard.append)
    assert tracker.flush()["memory/resident_gb"] == 17.0
    assert heard == [
        "memory is running out: 1.00 GB of 20.00 GB memory left; "
        "this process holds 17.00 GB (+15.00 GB since start)"
    ]
