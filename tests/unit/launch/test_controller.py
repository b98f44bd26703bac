"""Controller: when a stage validates, when it ends, and what it leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.activity.metric_sink import MetricSink
from nexrl.checkpoint import CheckpointManifest
from nexrl.config.loader import StageConfig
from nexrl.config.schema import RunConfig
from nexrl.controller import Controller, StageResult
from nexrl.errors import ConfigError
from nexrl.launch.stage import StageSurroundings, build_stage
from nexrl.testing.char_renderer import CharRenderer
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.instant_train import InstantTrain
from nexrl.types import ModelSpec, PolicyVersion
from nexrl.weight_sync.controller import WeightSyncController

NO_KL: dict[str, Any] = {"kl": {"coefficient": 0.0}}
WITH_KL: dict[str, Any] = {"kl": {"coefficient": 0.1}}


def make_config(folder: Path, **settings: Any) -> RunConfig:
    """One batch of a question whose every answer is right."""
    for name in ("train", "held_out"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    validate = settings.pop("validate", {"enabled": False})
    return RunConfig.model_validate(
        {
            "data": {"sources": [{"path": "train.jsonl"}], "batch_size": 1, "rollout_repeat_n": 2},
            "rollout_worker": {"reward": "nexrl.services.reward.scorers:exact_match"},
            "trainer": {"num_steps": 1, "algorithm": NO_KL, **settings},
            "validate": {"enabled": True, "sources": [{"path": "held_out.jsonl"}], **validate},
            "weight": {"verify": "off"},
        }
    )


async def run_stages(
    folder: Path, *stages: tuple[RunConfig, StageResult], train: InstantTrain | None = None
) -> CheckpointManifest:
    """One stage after another on the same services, each from where its result is; the newest
    checkpoint."""
    train, inference = train or InstantTrain(), InstantInference(text="4")
    tracker = ActivityTracker(RunConfig().runtime_monitor)
    sink = MetricSink(folder / "metrics.jsonl", clock=asyncio.get_running_loop().time)
    await train.create(ModelSpec(path="any"))
    weight_sync = WeightSyncController(
        train=train,
        engines=[inference],
        config=stages[0][0].weight,
        folder=folder / "publications",
        tracker=tracker,
    )
    controller = Controller(
        train=train, weight_sync=weight_sync, tracker=tracker, sink=sink, version=PolicyVersion()
    )
    await controller.start()
    around = StageSurroundings(
        recipe_dir=folder,
        run_id="run",
        train=train,
        inference=inference,
        engine=await inference.info(),
        renderer=CharRenderer(),
        store=None,
        tracker=tracker,
        recorder=None,
        checkpoints=folder / "checkpoints",
    )
    for index, (config, result) in enumerate(stages):
        named = StageConfig(name=result.name, config=config, provenance={})
        stage = await asyncio.to_thread(build_stage, named, index, around, controller.version)
        await controller.run_stage(stage, result)
    sink.close()
    newest = stage.checkpoints.latest()
    assert newest is not None
    return newest[1]


async def test_a_stage_that_reached_its_goal_before_training_still_ends_in_a_checkpoint(
    tmp_path: Path,
) -> None:
    result = StageResult(name="one")
    config = make_config(tmp_path, stop_at_accuracy=0.5, validate={"at_start": True})
    manifest = await run_stages(tmp_path, (config, result))
    assert (result.steps, len(result.validations)) == (0, 1)
    assert "reached trainer.stop_at_accuracy" in result.stopped_early
    assert manifest.stage_done


async def test_a_goal_of_zero_is_reached_where_nothing_is_scored(tmp_path: Path) -> None:
    """Such a validation has no accuracy to name."""
    config = make_config(tmp_path, stop_at_accuracy=0.0, validate={"at_start": True})
    unscored = config.rollout_worker.model_copy(update={"reward": None})
    result = StageResult(name="one")
    await run_stages(tmp_path, (config.model_copy(update={"rollout_worker": unscored}), result))
    assert "validation/accuracy" not in result.validations[0]
    assert result.stopped_early == "validation/accuracy 0.000 reached trainer.stop_at_accuracy"


@pytest.mark.parametrize("every_versions", [0, 1])
async def test_a_goal_reached_with_the_last_batch_ends_nothing_early(
    tmp_path: Path, every_versions: int
) -> None:
    result = StageResult(name="one")
    validate = {"at_start": False, "every_versions": every_versions}
    config = make_config(tmp_path, stop_at_accuracy=0.5, validate=validate)
    await run_stages(tmp_path, (config, result))
    assert (result.steps, len(result.validations)) == (1, 1)
    assert not result.stopped_early


@pytest.mark.parametrize(("every_versions", "expected"), [(0, 2), (1, 1)])
async def test_the_end_of_a_stage_is_validated_though_the_run_was_resumed_right_before_it(
    tmp_path: Path, every_versions: int, expected: int
) -> None:
    """Whether a version was validated is a matter of its number, not of the start of the process."""
    result = StageResult(name="one", steps=1, validations=[{"validation/accuracy": 0.0}])
    config = make_config(tmp_path, validate={"every_versions": every_versions})
    await run_stages(tmp_path, (config, result))
    assert len(result.validations) == expected


async def test_policies_of_a_stage_are_dropped_at_its_end_and_the_trained_one_stays(
    tmp_path: Path,
) -> None:
    train, result = InstantTrain(), StageResult(name="one")
    await run_stages(tmp_path, (make_config(tmp_path, algorithm=WITH_KL), result), train=train)
    assert ("create", "reference") in train.calls
    with pytest.raises(ConfigError, match="no policy is named 'reference'"):
        await train.info("reference")
    assert (await train.info("actor")).policy == "actor"


async def test_a_teacher_is_dropped_at_the_end_of_its_stage(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    train = InstantTrain()
    algorithm = {"advantage": {"name": "distill"}, "teacher": {"path": str(tmp_path)}, **NO_KL}
    config = make_config(tmp_path, algorithm=algorithm)
    await run_stages(tmp_path, (config, StageResult(name="one")), train=train)
    of_teacher = [verb for verb, policy in train.calls if policy == "teacher"]
    assert (of_teacher[0], of_teacher[-1]) == ("create", "drop")


async def test_each_stage_makes_its_own_reference_after_the_last_one_is_gone(
    tmp_path: Path,
) -> None:
    train, config = InstantTrain(), make_config(tmp_path, algorithm=WITH_KL)
    stages = [(config, StageResult(name=name)) for name in ("one", "two")]
    await run_stages(tmp_path, *stages, train=train)
    made = [verb for verb, policy in train.calls if policy == "reference" and verb != "forward"]
    assert made == ["create", "drop"] * 2
