"""Validator: one version on held-out items, outside the ledger, failures counted and never scored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nexrl.config.schema import ValidateConfig
from nexrl.errors import ConfigError, InvariantError, RunStoppedError
from nexrl.rollout.rollout_worker import RolloutWorker, WorkerContext
from nexrl.rollout.validator import ValidationResult, Validator
from nexrl.testing.makers import RecordingTracker, make_draw, make_trajectory, make_version
from nexrl.testing.virtual_time import virtual_time
from nexrl.types import Trajectory


def rewarded(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
    """The item says its own reward, or fails."""
    if item["reward"] == "fail":
        raise ValueError("broken item")
    return make_trajectory(reward=item["reward"], reward_parts=item.get("parts", {}))


async def validate(
    context: WorkerContext,
    rewards: list[Any],
    step: Callable[..., Any] | None = None,
    *,
    version: int = 0,
    tracker: RecordingTracker | None = None,
    evaluator: Any = None,
    **config: Any,
) -> ValidationResult:
    async def plain(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        return rewarded(worker, item)

    cls = type("Worker", (RolloutWorker,), {"step": step or plain})
    draws = [
        make_draw(i, row=r if isinstance(r, dict) else {"reward": r}) for i, r in enumerate(rewards)
    ]
    validator = Validator(
        cls(context),
        draws,
        config=ValidateConfig(**config),
        run_id="run",
        seed=7,
        tracker=tracker or RecordingTracker(),
        evaluator=evaluator,
    )
    try:
        return await validator.validate(make_version(version))
    finally:
        await validator.aclose()


async def test_accuracy_is_over_scored_rollouts_and_failures_are_counted(make_context: Any) -> None:
    """FR-023, FR-059: a failure is no 0 and is not hidden either."""
    result = await validate(make_context(), [1.0, 0.0, "fail", None, 1.0])
    assert result.metrics == {
        "validation/accuracy": pytest.approx(2 / 3),
        "validation/reward": pytest.approx(2 / 3),
        "validation/response_length": 3.0,
        "validation/truncated": 0.0,
        "validation/failed": 1.0,
        "validation/unscored": 1.0,
        "validation/num_rollouts": 5.0,
    }
    assert result.version == make_version(0)


async def test_records_come_in_order_of_items_and_members(make_context: Any) -> None:
    result = await validate(make_context(), [1.0, 0.0], num_rollouts=2)
    assert [r.rollout_id for r in result.records] == [
        f"run-validation-i{item}-0-{member}" for item in (0, 1) for member in (0, 1)
    ]


async def test_success_is_a_threshold_and_may_be_a_named_part(make_context: Any) -> None:
    rows = [
        {"reward": 0.9, "parts": {"correct": 1.0}},
        {"reward": 1.2, "parts": {"correct": 0.0}},
    ]
    by_reward = await validate(make_context(), rows)
    by_part = await validate(make_context(), rows[:1], success_part="correct")
    assert by_reward.metrics["validation/accuracy"] == 0.5
    assert by_part.metrics["validation/accuracy"] == 1.0


async def test_a_success_part_that_no_trajectory_has_is_refused(make_context: Any) -> None:
    rows = [{"reward": 1.0, "parts": {"correct": 1.0}}]
    with pytest.raises(ConfigError, match=r"success_part.*'corect'.*there are: correct"):
        await validate(make_context(), rows, success_part="corect")


async def test_forks_of_one_rollout_do_not_weigh_more(make_context: Any) -> None:
    """FR-079."""

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> list[Trajectory]:
        return [make_trajectory(reward=item["reward"])] * 1 + [
            make_trajectory(reward=item["reward"]) for _ in range(int(item["reward"]) * 2)
        ]

    result = await validate(make_context(), [1.0, 0.0], step)
    assert result.metrics["validation/reward"] == 0.5


async def test_all_failed_stops_the_run_with_the_first_cause(make_context: Any) -> None:
    with pytest.raises(
        RunStoppedError, match=r"all 2 validation rollouts.*ValueError: broken item"
    ):
        await validate(make_context(), ["fail", "fail"])


async def test_no_more_items_than_configured(make_context: Any) -> None:
    result = await validate(make_context(), [1.0, 1.0, 0.0], max_items=2)
    assert result.metrics["validation/num_rollouts"] == 2.0


async def test_tokens_of_another_version_are_refused(make_context: Any) -> None:
    with pytest.raises(InvariantError, match=r"validation of actor@0.3 drew tokens of actor@0.0"):
        await validate(make_context(), [1.0], version=3)


async def test_the_training_statistics_and_failure_rate_see_nothing(make_context: Any) -> None:
    tracker = RecordingTracker()
    await validate(make_context(), [1.0, "fail"], tracker=tracker)
    assert tracker.records == []
    assert {kind for kind, _ in tracker.past_activities} == {"validation"}


async def test_it_draws_from_another_seed_domain_than_training(
    make_context: Any, make_rollouts: Any
) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        return (await worker.generate("2+2="))[0].to_trajectory(reward=1.0)

    (trained,) = await make_rollouts(step).run(make_draw(0))
    validated = await validate(make_context(), [1.0], step)
    again = await validate(make_context(), [1.0], step)
    seed = validated.records[0].trajectories[0].provenance.seed
    assert seed != trained.trajectories[0].provenance.seed
    assert seed == again.records[0].trajectories[0].provenance.seed


@virtual_time
async def test_past_its_deadline_what_still_runs_counts_as_failed(make_context: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        await asyncio.sleep(item["reward"])
        return make_trajectory(reward=1.0)

    tracker = RecordingTracker()
    result = await validate(
        make_context(), [1.0, 2.0, 500.0], step, deadline_s=100.0, tracker=tracker
    )
    assert result.metrics["validation/failed"] == 1.0
    assert result.metrics["validation/accuracy"] == 1.0


@virtual_time
async def test_a_validation_that_reaches_its_deadline_warns(make_context: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        await asyncio.sleep(item["reward"])
        return make_trajectory(reward=1.0)

    tracker = RecordingTracker()
    context = make_context(config={"max_concurrent": 1})
    await validate(context, [60.0, 60.0, 60.0], step, deadline_s=100.0, tracker=tracker)
    assert "reached its deadline of 100 s" in tracker.warnings[0]


async def test_an_evaluator_judges_what_ended_well_in_place_of_rewards(make_context: Any) -> None:
    class Counter:
        async def evaluate(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
            return {"accuracy": 0.25, "rows": float(len(trajectories))}

    result = await validate(make_context(), [None, "fail", None], evaluator=Counter())
    assert result.metrics["validation/accuracy"] == 0.25
    assert result.metrics["validation/rows"] == 2.0
    assert result.metrics["validation/unscored"] == 0.0
    assert result.metrics["validation/failed"] == 1.0
