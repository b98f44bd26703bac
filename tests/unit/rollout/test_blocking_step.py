"""A plain `def step` runs in a thread and reaches inference, reward and put_trajectory from there."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from nexrl.errors import UserCodeError
from nexrl.rollout.rollout_worker import RolloutWorker
from nexrl.services.reward.local import make_reward_service
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.makers import make_draw, make_trajectory
from nexrl.types import Trajectory


async def test_blocking_steps_run_at_the_same_time_off_the_event_loop(make_rollouts: Any) -> None:
    together = threading.Barrier(4, timeout=10.0)

    def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        together.wait()
        assert threading.current_thread() is not threading.main_thread()
        return make_trajectory()

    records = await make_rollouts(step, num_rollouts=4).run()
    assert {r.status for r in records} == {"completed"}


async def test_blocking_step_draws_and_scores_through_the_loop(
    make_rollouts: Any, make_context: Any
) -> None:
    def step(worker: RolloutWorker, item: dict[str, Any]) -> None:
        first, second = worker.generate_blocking(item["prompt"], n=2, max_tokens=3)
        result = worker.score_blocking(first, item)
        worker._put_trajectory(second.to_trajectory(reward=result.value))

    async def length(completion: str) -> float:
        return float(len(completion.split()))

    reward = make_reward_service(length, contract="c", arguments={})
    (record,) = await make_rollouts(step, context=make_context(reward=reward)).run()
    (trajectory,) = record.trajectories
    assert (record.status, trajectory.reward) == ("truncated", 3.0)
    assert [s.kind for s in trajectory.provenance.segments] == ["inference", "reward"]


async def test_blocking_and_async_steps_draw_the_same_tokens(make_rollouts: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        return (await worker.generate(item["prompt"]))[0].to_trajectory()

    def blocking(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        return worker.generate_blocking(item["prompt"])[0].to_trajectory()

    (one,) = await make_rollouts(step).run()
    (other,) = await make_rollouts(blocking).run()
    assert one.trajectories[0].tokens.tolist() == other.trajectories[0].tokens.tolist()


async def test_generate_blocking_on_the_loop_says_what_to_write_instead(make_rollouts: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        worker.generate_blocking("2+2=")
        raise AssertionError

    (record,) = await make_rollouts(step).run()
    assert "await self.generate" in record.failure.message


async def test_put_trajectory_outside_a_rollout_is_refused(make_context: Any) -> None:
    with pytest.raises(UserCodeError, match="only inside step"):
        RolloutWorker(make_context()).put_trajectory(make_trajectory())


async def test_put_trajectory_refuses_anything_else(make_rollouts: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> None:
        worker.put_trajectory({"tokens": [1]})  # type: ignore[arg-type]

    (record,) = await make_rollouts(step).run()
    assert "accepts a Trajectory, got dict" in record.failure.message


async def test_an_exception_in_a_thread_keeps_its_place(make_rollouts: Any) -> None:
    def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        raise ZeroDivisionError("in a thread")

    (record,) = await make_rollouts(step).run()
    assert record.reason == "user_code/ZeroDivisionError"
    assert "test_blocking_step.py:" in record.failure.message


async def test_stop_iteration_from_a_thread_does_not_hang(make_rollouts: Any) -> None:
    def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        return next(iter([]))

    (record,) = await make_rollouts(step).run()
    assert record.reason == "user_code/StopIteration"


async def test_a_hung_step_fails_at_its_deadline_names_its_line_and_leaves_siblings(
    make_rollouts: Any,
) -> None:
    release = threading.Event()
    late: list[str] = []

    def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        if item["prompt"] == "hang":
            release.wait(timeout=30.0)
            try:
                worker.put_trajectory(make_trajectory())
            except UserCodeError as error:
                late.append(str(error))
        return make_trajectory()

    rollouts = make_rollouts(step, max_concurrent=1, deadline_s=0.2)
    hanging = make_draw("h", row={"prompt": "hang"})
    await rollouts.runner.run_group(hanging, rollouts.on_end)
    await rollouts.runner.run_group(make_draw(1), rollouts.on_end)
    release.set()
    await rollouts.runner.aclose()
    assert [r.status for r in rollouts.records] == ["failed", "completed"]
    failure = rollouts.records[0].failure
    assert failure.error_type == "DeadlineError"
    assert "blocking code is at" in failure.message
    assert "test_blocking_step.py" in failure.message


async def test_a_blocking_draw_is_given_up_at_the_deadline(
    make_rollouts: Any, make_context: Any
) -> None:
    engine = InstantInference()
    await engine.pause("keep")
    woken = threading.Event()

    def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        try:
            return worker.generate_blocking("2+2=")[0].to_trajectory()
        finally:
            woken.set()

    rollouts = make_rollouts(step, context=make_context(inference=engine), deadline_s=0.1)
    (record,) = await rollouts.run()
    assert record.reason == "policy/DeadlineError"
    assert await asyncio.to_thread(woken.wait, 10.0)


async def test_a_sync_function_that_returns_an_awaitable_is_awaited(make_rollouts: Any) -> None:
    async def inner() -> Trajectory:
        return make_trajectory()

    def step(worker: RolloutWorker, item: dict[str, Any]) -> Any:
        return inner()

    (record,) = await make_rollouts(step).run()
    assert record.status == "completed"
