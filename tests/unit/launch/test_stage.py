"""What the modules of a stage are built with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.config.loader import StageConfig
from nexrl.config.schema import RunConfig
from nexrl.controller import Stage
from nexrl.launch.stage import StageSurroundings, build_stage
from nexrl.testing.char_renderer import CharRenderer
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.instant_train import InstantTrain
from nexrl.testing.makers import make_draw
from nexrl.types import PolicyVersion, RolloutRecord


@pytest.fixture
def inference() -> InstantInference:
    return InstantInference(text="4")


@pytest.fixture
async def stage(tmp_path: Path, inference: InstantInference) -> AsyncIterator[Stage]:
    """A stage with a greedy baseline, two training rollouts a group and one held-out item."""
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    (tmp_path / "reward.py").write_text("def score(completion): return float(completion == '4')\n")
    config = RunConfig.model_validate(
        {
            "data": {"sources": [{"path": "train.jsonl"}], "batch_size": 1, "rollout_repeat_n": 2},
            "rollout_worker": {"reward": "reward.py:score"},
            "trainer": {"algorithm": {"greedy_baseline": True}},
            "validate": {"enabled": True, "sources": [{"path": "held_out.jsonl"}]},
        }
    )
    around = StageSurroundings(
        recipe_dir=tmp_path,
        run_id="run",
        train=InstantTrain(),
        inference=inference,
        engine=await inference.info(),
        renderer=CharRenderer(),
        store=None,
        tracker=ActivityTracker(config.runtime_monitor),
        recorder=None,
        checkpoints=tmp_path / "checkpoints",
        version=PolicyVersion(),
    )
    built = build_stage(StageConfig(name="one", config=config, provenance={}), 0, around)
    yield built
    await built.runner.aclose()
    if built.validator is not None:
        await built.validator.aclose()


async def test_training_draws_the_greedy_baseline_once_for_each_group(
    stage: Stage, inference: InstantInference
) -> None:
    records: list[RolloutRecord] = []

    async def on_end(record: RolloutRecord) -> None:
        records.append(record)

    await stage.runner.run_group(make_draw(), on_end)
    assert inference.num_calls == 2 + 1
    assert [r.trajectories[0].extra for r in records] == [{"greedy_reward": 1.0}] * 2


async def test_validation_draws_no_greedy_baseline(
    stage: Stage, inference: InstantInference
) -> None:
    assert stage.validator is not None
    result = await stage.validator.validate(PolicyVersion())
    assert inference.num_calls == 1
    assert result.records[0].trajectories[0].extra == {}
