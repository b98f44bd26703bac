"""RolloutRunner: every rollout ends exactly once, with a status and a reason."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import numpy as np
import pytest

from nexrl.errors import (
    ContextOverflowError,
    PolicyError,
    ServiceError,
    StoreError,
)
from nexrl.rollout.rollout_worker import RolloutWorker
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.makers import make_draw, make_failure, make_trajectory
from nexrl.testing.virtual_time import virtual_time
from nexrl.types import Trajectory, TrajectoryStatus


async def good(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
    return make_trajectory()


def fails_once(error: BaseException) -> Any:
    attempts: list[int] = []

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        attempts.append(1)
        if len(attempts) == 1:
            raise error
        return make_trajectory()

    return step


async def test_a_good_rollout_ends_completed_with_its_identity(make_rollouts: Any) -> None:
    records = await make_rollouts(good, num_rollouts=2).run(make_draw(3, draw=1))
    assert [r.status for r in records] == ["completed", "completed"]
    trajectory = records[1].trajectories[0]
    assert trajectory.rollout_id == records[1].rollout_id == "run-i3-1-1"
    assert (trajectory.group_id, trajectory.item_id, trajectory.draw, trajectory.member) == (
        "i3/1",
        "i3",
        1,
        1,
    )
    assert trajectory.provenance.attempts == 1


async def test_one_exception_among_64_costs_one_rollout(make_rollouts: Any) -> None:
    """FR-142."""

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        if not started:
            started.append(1)
            raise ValueError("boom")
        return make_trajectory()

    started: list[int] = []
    records = await make_rollouts(step, num_rollouts=64).run()
    assert sorted(r.status for r in records) == ["completed"] * 63 + ["failed"]


async def test_user_code_error_is_recorded_with_file_line_item_and_traceback(
    make_rollouts: Any,
) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        raise KeyError("no such column")

    (record,) = await make_rollouts(step).run()
    assert record.reason == "user_code/KeyError"
    assert record.failure is not None
    assert "test_runner.py:" in record.failure.message
    assert "item i0" in record.failure.message
    assert "raise KeyError" in record.failure.traceback
    assert record.attempts == 1


async def test_innermost_cause_of_an_exception_group_is_the_reason(make_rollouts: Any) -> None:
    """FR-152."""

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [ServiceError("ReadError x")])

    (record,) = await make_rollouts(step, retry_member=False).run()
    assert record.reason == "infrastructure/ServiceError"
    assert record.failure is not None
    assert "ReadError x" in record.failure.message


@pytest.mark.parametrize("error", [ServiceError("engine 500", status=500), ConnectionError("lost")])
async def test_infrastructure_failure_is_retried(make_rollouts: Any, error: Exception) -> None:
    """FR-143: only the lost member runs again."""
    rollouts = make_rollouts(fails_once(error))
    (record,) = await rollouts.run()
    assert (record.status, record.attempts) == ("completed", 2)
    assert rollouts.tracker.counts["rollout/retries"] == 1


async def test_user_code_failure_is_not_retried(make_rollouts: Any) -> None:
    (record,) = await make_rollouts(fails_once(ValueError("a bug"))).run()
    assert (record.status, record.attempts) == ("failed", 1)


async def test_exhausted_retries_end_failed_without_reward_or_trainable_rows(
    make_rollouts: Any,
) -> None:
    """FR-140, FR-023: two good calls, then the connection is lost."""

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        worker.put_trajectory(make_trajectory(reward=None))
        raise ConnectionError("reset by peer")

    (record,) = await make_rollouts(step, max_attempts=2).run()
    assert (record.status, record.reason, record.attempts) == (
        "failed",
        "infrastructure/ConnectionError",
        2,
    )
    assert [t.trainable for t in record.trajectories] == [False]
    assert record.trajectories[0].reward is None


async def test_a_retry_starts_with_nothing_put(make_rollouts: Any) -> None:
    """FR-139: one accepted attempt, no double rows."""
    attempts: list[int] = []

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> None:
        attempts.append(1)
        worker.put_trajectory(make_trajectory())
        if len(attempts) == 1:
            raise ServiceError("engine 500")

    (record,) = await make_rollouts(step).run()
    assert len(record.trajectories) == 1


@virtual_time
async def test_retries_wait_twice_as_long_each_time_and_stop_before_the_deadline(
    make_rollouts: Any,
) -> None:
    times: list[float] = []

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        times.append(asyncio.get_running_loop().time())
        raise ServiceError("engine 500")

    (record,) = await make_rollouts(step, max_attempts=9, deadline_s=0.1).run()
    assert np.diff(times) == pytest.approx([0.01, 0.02, 0.04])
    assert record.reason == "infrastructure/ServiceError"


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (None, "returned None"),
        ("done", "returned a str ('done')"),
        (1.0, "returned a float"),
        ([], "an empty list"),
        ([make_trajectory(), 3], "entry 1 is a int"),
        (Trajectory(prompt="p", response="r"), "without tokens"),
        (Trajectory(tokens=[], loss_mask=[]), "without tokens"),  # type: ignore[arg-type]
    ],
)
async def test_nonsense_from_step_fails_and_names_what_was_returned(
    make_rollouts: Any, result: Any, named: str
) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Any:
        return result

    (record,) = await make_rollouts(step).run()
    assert record.reason == "user_code/StepResultError"
    assert record.failure is not None
    assert named in record.failure.message


async def test_put_and_returned_trajectories_are_all_kept_once(make_rollouts: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> list[Trajectory]:
        first = make_trajectory(reward=1.0)
        worker._put_trajectory(first)
        return [first, make_trajectory(reward=0.5)]

    (record,) = await make_rollouts(step).run()
    assert [t.reward for t in record.trajectories] == [1.0, 0.5]
    assert len({t.trajectory_id for t in record.trajectories}) == 2


async def test_group_id_is_the_draw_and_the_role(make_rollouts: Any) -> None:
    """FR-046: explicit, never from display names; a worker's own key stays within its draw."""

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> list[Trajectory]:
        return [
            make_trajectory(role="solver"),
            make_trajectory(role="judge"),
            make_trajectory(group_id="turn3"),
        ]

    (record,) = await make_rollouts(step).run(make_draw("t1"))
    assert [t.group_id for t in record.trajectories] == ["t1/0/solver", "t1/0/judge", "t1/0/turn3"]


async def test_every_field_of_the_workers_trajectory_survives(make_rollouts: Any) -> None:
    """FR-047: rows of one rollout stay in one trajectory."""
    row = make_trajectory().rows[0]
    left = Trajectory(
        prompt="p",
        response="r",
        reward=0.25,
        reward_parts={"a": 0.25},
        rows=(row, row),
        metrics={"turns": 2.0},
        extra={"column": "x"},
        policy="other",
    )

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        return left

    (record,) = await make_rollouts(step).run()
    kept = record.trajectories[0]
    for name in (
        "prompt",
        "response",
        "reward",
        "reward_parts",
        "rows",
        "metrics",
        "extra",
        "policy",
    ):
        assert getattr(kept, name) == getattr(left, name)


async def test_a_failure_reported_by_the_worker_is_a_failed_rollout(make_rollouts: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        return Trajectory(status=TrajectoryStatus.FAILED, failure=make_failure("sandbox gone"))

    (record,) = await make_rollouts(step).run()
    assert record.reason == "infrastructure/ServiceError"
    assert record.failure is not None
    assert record.failure.message == "sandbox gone"


async def test_context_overflow_truncates_what_was_put(make_rollouts: Any) -> None:
    """FR-076: the trajectory ends as truncated with the last good state."""

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        worker.put_trajectory(make_trajectory(reward=0.5))
        raise ContextOverflowError("5000 tokens do not fit into 4096")

    (record,) = await make_rollouts(step).run()
    assert (record.status, record.reason) == ("truncated", "")
    assert record.trajectories[0].truncation_cause == "context"
    assert record.trajectories[0].reward == 0.5


@pytest.mark.parametrize("error", [ContextOverflowError("too long"), PolicyError("bad tool call")])
async def test_policy_error_with_nothing_put_is_failed(
    make_rollouts: Any, error: Exception
) -> None:
    (record,) = await make_rollouts(fails_once(error)).run()
    assert record.reason == f"policy/{type(error).__name__}"
    assert record.attempts == 1


async def test_unequal_lengths_in_a_custom_worker_are_its_own_fault(make_rollouts: Any) -> None:
    """FR-004 at the door: an invariant that user code breaks is recorded and stops no run."""

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        return Trajectory(tokens=[1, 2, 3], loss_mask=[1, 1])  # type: ignore[arg-type]

    (record,) = await make_rollouts(step).run()
    assert record.reason == "user_code/InvariantError"


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), StopAsyncIteration()])
async def test_even_odd_exceptions_end_only_their_rollout(
    make_rollouts: Any, error: BaseException
) -> None:
    (record,) = await make_rollouts(fails_once(error)).run()
    assert record.reason == f"user_code/{type(error).__name__}"


async def test_each_call_gets_its_own_copy_of_the_item(make_rollouts: Any) -> None:
    draw = make_draw(row={"messages": [{"role": "user", "content": "hi"}]})

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        assert len(item["messages"]) == 1
        item["messages"].append("mine")
        item["messages"][0]["content"] = "changed"
        return make_trajectory()

    records = await make_rollouts(step, num_rollouts=3).run(draw)
    assert {r.status for r in records} == {"completed"}
    assert draw.row["messages"] == [{"role": "user", "content": "hi"}]


async def test_cancelling_a_group_ends_every_member_as_cancelled(make_rollouts: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        worker.put_trajectory(make_trajectory())
        await asyncio.Event().wait()
        raise AssertionError

    rollouts = make_rollouts(step, num_rollouts=4, max_concurrent=2)
    task = asyncio.create_task(rollouts.runner.run_group(make_draw(), rollouts.on_end))
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rollouts.runner.aclose()
    assert [(r.status, r.reason) for r in rollouts.records] == [("cancelled", "shutdown")] * 4
    assert not any(t.trainable for r in rollouts.records for t in r.trajectories)


async def test_members_cancelled_before_their_first_step_end_too(make_rollouts: Any) -> None:
    rollouts = make_rollouts(good, num_rollouts=3)
    await rollouts.runner.start()
    task = asyncio.create_task(rollouts.runner.run_group(make_draw(), rollouts.on_end))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rollouts.runner.aclose()
    assert sorted(r.member for r in rollouts.records) == [0, 1, 2]


async def test_an_error_of_on_end_reaches_the_caller_after_all_members_ended(
    make_rollouts: Any,
) -> None:
    ended: list[str] = []

    async def on_end(record: Any) -> None:
        ended.append(record.rollout_id)
        raise StoreError("disk full")

    rollouts = make_rollouts(good, num_rollouts=3)
    with pytest.raises(StoreError, match="disk full"):
        await rollouts.runner.run_group(make_draw(), on_end)
    await rollouts.runner.aclose()
    assert sorted(ended) == ["run-i0-0-0", "run-i0-0-1", "run-i0-0-2"]


async def test_no_more_rollouts_run_at_once_than_allowed(make_rollouts: Any) -> None:
    running: list[int] = []
    most: list[int] = []

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0)
        running.pop()
        return make_trajectory()

    await make_rollouts(step, num_rollouts=8, max_concurrent=3).run()
    assert max(most) == 3


async def test_tracker_learns_of_each_end_and_sees_running_rollouts(make_rollouts: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        assert ("rollout", "run-i0-0-0") in rollouts.tracker.open_activities
        return make_trajectory()

    rollouts = make_rollouts(step)
    records = await rollouts.run()
    assert rollouts.tracker.records == records
    assert rollouts.tracker.open_activities == []


async def test_setup_runs_once_and_aclose_after_the_last(make_rollouts: Any) -> None:
    log: list[str] = []

    class Worker(RolloutWorker):
        async def setup(self) -> None:
            log.append("setup")

        async def step(self, data_item: dict[str, Any]) -> Trajectory:
            log.append("step")
            return make_trajectory()

        def aclose(self) -> None:
            log.append("aclose")

    await make_rollouts(Worker).run(make_draw(0), make_draw(1))
    assert log == ["setup", "step", "step", "aclose"]


async def test_failing_setup_names_class_file_and_line(make_rollouts: Any) -> None:
    class Worker(RolloutWorker):
        def setup(self) -> None:
            raise OSError("no such index")

        async def step(self, data_item: dict[str, Any]) -> Trajectory:
            return make_trajectory()

    with pytest.raises(
        Exception, match=r"setup\(\) of Worker raised OSError: no such index at .*test_runner.py:"
    ):
        await make_rollouts(Worker).run()


async def test_instant_engine_failures_never_become_rewards(
    make_rollouts: Any, make_context: Any
) -> None:
    """FR-149: counts are the same for any failure pattern: each rollout ends once."""

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        completion = (await worker.generate("2+2="))[0]
        return completion.to_trajectory(reward=1.0)

    context = make_context(inference=InstantInference(failure_rate=0.5, seed=3))
    records = await make_rollouts(step, context=context, num_rollouts=32, retry_member=False).run()
    failed = [r for r in records if r.status == "failed"]
    assert 0 < len(failed) < 32
    assert {r.reason for r in failed} == {"infrastructure/ServiceError"}
    assert {r.failure.where for r in failed} == {"inference"}
    assert all(t.reward == 1.0 for r in records for t in r.trajectories)


_MARK: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="")


async def test_a_rollout_that_waited_sees_no_context_of_the_one_before(make_rollouts: Any) -> None:
    """The end of one member starts the next, which is not its child."""
    seen: list[str] = []

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        seen.append(_MARK.get())
        _MARK.set("left behind")
        return make_trajectory()

    await make_rollouts(step, num_rollouts=4, max_concurrent=1).run()
    assert seen == [""] * 4


async def test_cancelled_groups_start_none_of_their_waiting_rollouts(make_rollouts: Any) -> None:
    started: list[int] = []
    running = asyncio.Event()

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        started.append(1)
        running.set()
        await asyncio.Event().wait()
        raise AssertionError

    rollouts = make_rollouts(step, num_rollouts=2, max_concurrent=1)
    groups = [
        asyncio.create_task(rollouts.runner.run_group(make_draw(name), rollouts.on_end))
        for name in ("a", "b")
    ]
    await running.wait()
    for group in groups:
        group.cancel()
    await asyncio.wait(groups)
    await rollouts.runner.aclose()
    assert len(started) == 1
    assert [r.reason for r in rollouts.records] == ["shutdown"] * 4
