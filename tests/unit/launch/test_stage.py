"""What the modules of a stage are built with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.config.loader import StageConfig
from nexrl.config.schema import RunConfig
from nexrl.controller import Controller, Stage
from nexrl.launch.stage import StageSurroundings, build_stage
from nexrl.rollout.single_turn import SingleTurnWorker
from nexrl.testing.char_renderer import CharRenderer
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.instant_train import InstantTrain
from nexrl.testing.makers import make_draw
from nexrl.types import PolicyVersion, RolloutRecord

JUDGE = """
class Judge:
    contract = "judge"

    def __init__(self, recipe_dir):
        self.log = recipe_dir / "log"
        self.note("opened")

    def note(self, event):
        with self.log.open("a") as log:
            log.write(event + " ")

    async def score(self, completion_text, row, completion):
        return float(completion_text == row["answer"])

    async def aclose(self):
        self.note("closed")
"""
"""A reward service that leaves a word when it is opened and closed."""


@pytest.fixture
def inference() -> InstantInference:
    return InstantInference(text="4")


@pytest.fixture
async def stage(tmp_path: Path, inference: InstantInference) -> AsyncIterator[Stage]:
    """A stage with a greedy baseline, two training rollouts a group and one held-out item."""
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    (tmp_path / "judge.py").write_text(JUDGE)
    config = RunConfig.model_validate(
        {
            "data": {"sources": [{"path": "train.jsonl"}], "batch_size": 1, "rollout_repeat_n": 2},
            "rollout_worker": {"reward": "judge.py:Judge"},
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
    )
    one = StageConfig(name="one", config=config, provenance={})
    built = build_stage(one, 0, around, PolicyVersion())
    yield built
    await Controller._close(built)


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


async def test_training_and_validation_share_one_reward_service(
    stage: Stage, tmp_path: Path
) -> None:
    """A reward model is as large as the policy."""
    assert (tmp_path / "log").read_text() == "opened "
    await Controller._close(stage)
    assert (tmp_path / "log").read_text() == "opened closed "


async def test_closing_ends_the_reward_service_even_when_the_worker_fails_to_close(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(worker: object) -> None:
        raise OSError("cannot flush")

    monkeypatch.setattr(SingleTurnWorker, "aclose", fail)
    with pytest.raises(OSError, match="cannot flush"):
        await Controller._close(stage)
    assert (tmp_path / "log").read_text() == "opened closed "
