"""Deadlines of rollouts: who is blamed, what is kept, and that nothing hangs. All in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nexrl.errors import ServiceError
from nexrl.rollout.rollout_worker import RolloutWorker
from nexrl.services.reward.local import make_reward_service
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.makers import make_draw, make_trajectory
from nexrl.testing.virtual_time import virtual_time
from nexrl.types import Trajectory


async def never(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
    worker.put_trajectory(make_trajectory(reward=0.6))
    await asyncio.sleep(1e9)
    raise AssertionError


async def draws(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
    worker.put_trajectory(make_trajectory(reward=0.6))
    return (await worker.generate("2+2="))[0].to_trajectory()


@virtual_time
async def test_one_straggler_fails_at_its_deadline_and_seven_siblings_end(
    make_rollouts: Any,
) -> None:
    """FR-121: the straggler is named; the group is complete after its deadline."""
    seen: list[int] = []

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        seen.append(1)
        await asyncio.sleep(1e9 if len(seen) == 8 else 10.0)
        return make_trajectory()

    records = await make_rollouts(step, num_rollouts=8, deadline_s=60.0).run(make_draw("p9"))
    assert [r.status for r in records] == ["completed"] * 7 + ["failed"]
    assert records[-1].reason == "user_code/DeadlineError"
    assert records[-1].duration_s == pytest.approx(60.0)
    assert records[-1].failure.message.startswith("rollout reached its deadline of 60 s")
    assert "item p9" in records[-1].failure.message


@virtual_time
async def test_deadline_fails_the_rollout_by_default_and_keeps_no_trainable_rows(
    make_rollouts: Any,
) -> None:
    """FR-074: dropped, never a silent 0."""
    (record,) = await make_rollouts(never).run()
    assert record.status == "failed"
    assert [(t.status, t.reward) for t in record.trajectories] == [("failed", 0.6)]


@virtual_time
async def test_deadline_truncates_what_was_put_when_configured(make_rollouts: Any) -> None:
    """FR-074: the partial grade is kept."""
    (record,) = await make_rollouts(never, on_deadline="truncate").run()
    assert record.status == "truncated"
    assert record.trajectories[0].truncation_cause == "deadline"
    assert record.trajectories[0].reward == 0.6


@virtual_time
async def test_deadline_with_nothing_put_fails_even_when_truncation_is_configured(
    make_rollouts: Any,
) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        await asyncio.sleep(1e9)
        raise AssertionError

    (record,) = await make_rollouts(step, on_deadline="truncate").run()
    assert record.status == "failed"


@virtual_time
async def test_deadline_during_a_draw_is_the_policys(make_rollouts: Any, make_context: Any) -> None:
    context = make_context(inference=InstantInference(latency_s=1e6))
    (record,) = await make_rollouts(draws, context=context).run()
    assert record.reason == "policy/DeadlineError"
    assert record.failure.where == "inference"
    assert "while waiting for inference" in record.failure.message


@virtual_time
async def test_deadline_during_scoring_is_infrastructure_and_never_truncated(
    make_rollouts: Any, make_context: Any
) -> None:
    async def hangs(completion: str) -> float:
        await asyncio.sleep(1e9)
        return 1.0

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        worker.put_trajectory(make_trajectory())
        completion = (await worker.generate("2+2="))[0]
        await worker.score(completion, item)
        return completion.to_trajectory()

    reward = make_reward_service(hangs, contract="c", arguments={}, deadline_s=1e6)
    rollouts = make_rollouts(step, context=make_context(reward=reward), on_deadline="truncate")
    (record,) = await rollouts.run()
    assert record.reason == "infrastructure/DeadlineError"
    assert record.failure.where == "reward"


@virtual_time
async def test_deadline_while_retrying_names_the_failure_before(make_rollouts: Any) -> None:
    attempts: list[int] = []

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        attempts.append(1)
        if len(attempts) == 1:
            raise ServiceError("engine 503")
        await asyncio.sleep(1e9)
        raise AssertionError

    (record,) = await make_rollouts(step).run()
    assert record.reason == "infrastructure/DeadlineError"
    assert "after ServiceError: engine 503" in record.failure.message
    assert record.attempts == 2


@virtual_time
async def test_a_step_that_grades_itself_when_cancelled_keeps_its_result(
    make_rollouts: Any,
) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            return make_trajectory(reward=0.3)
        raise AssertionError

    (record,) = await make_rollouts(step).run()
    assert (record.status, record.trajectories[0].reward) == ("completed", 0.3)


@virtual_time
async def test_a_step_that_swallows_its_cancellation_is_ended_on_its_behalf(
    make_rollouts: Any,
) -> None:
    release = asyncio.Event()

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        while not release.is_set():
            try:
                await asyncio.sleep(1e9)
            except asyncio.CancelledError:
                await release.wait()
        return make_trajectory()

    rollouts = make_rollouts(step, num_rollouts=2, max_concurrent=1)
    await rollouts.runner.run_group(make_draw(), rollouts.on_end)
    assert [r.reason for r in rollouts.records] == ["user_code/DeadlineError"] * 2
    assert "swallows asyncio.CancelledError" in rollouts.records[0].failure.message
    release.set()
    for _ in range(5):
        await asyncio.sleep(0)
    await rollouts.runner.aclose()
    assert len(rollouts.records) == 2
    assert rollouts.tracker.counts["rollout/late_results"] == 2


@virtual_time
async def test_waiting_for_a_slot_does_not_use_up_the_deadline(make_rollouts: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        await asyncio.sleep(50.0)
        return make_trajectory()

    records = await make_rollouts(step, num_rollouts=4, max_concurrent=1, deadline_s=60.0).run()
    assert {r.status for r in records} == {"completed"}


@virtual_time
async def test_shutdown_wins_over_a_deadline_at_the_same_time(make_rollouts: Any) -> None:
    rollouts = make_rollouts(never, deadline_s=10.0)
    task = asyncio.create_task(rollouts.runner.run_group(make_draw(), rollouts.on_end))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_at(10.0, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    await rollouts.runner.aclose()
    assert len(rollouts.records) == 1
