"""Whole runs on offline rows: preferences, a reward model, and its use as a reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nexrl.testing.micro_recipe import Finished, Recipe

PROMPTS = [f"{i}+{i % 7}=" for i in range(40)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "dpo": [{"prompt": p, "chosen": "22", "rejected": "77"} for p in PROMPTS],
    "kto": [
        {"prompt": p, "answer": "22" if i % 2 else "77", "label": bool(i % 2)}
        for i, p in enumerate(PROMPTS)
    ],
    "process_reward_model": [
        {"prompt": p, "steps": ["2", "7"], "label": [True, False]} for p in PROMPTS
    ],
}
ROWS["reward_model"] = ROWS["dpo"]


def run_offline(recipe: Recipe, preset: str, *arguments: str, **trainer: Any) -> Finished:
    lines = [json.dumps(row) + "\n" for row in ROWS[preset]]
    (recipe.folder / "train.jsonl").write_text("".join(lines[:32]))
    (recipe.folder / "held_out.jsonl").write_text("".join(lines[32:]))
    recipe.write(
        data={
            "sources": [{"path": "train.jsonl"}],
            "rollout_repeat_n": 1,
            "batch_size": 8,
        },
        rollout_worker={"reward": None},
        trainer={"algorithm": preset, "optimizer": {"lr": 1e-2}, **trainer},
        validate={"enabled": True, "sources": [{"path": "held_out.jsonl"}]},
    )
    return recipe.launch(*arguments)


def validations(done: Finished) -> list[dict[str, float]]:
    assert done.run is not None
    records = [json.loads(x) for x in (done.run / "metrics.jsonl").read_text().splitlines()]
    return [r["metrics"] for r in records if "validation/accuracy" in r["metrics"]]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["dpo", "kto", "process_reward_model"])
def test_a_run_on_offline_rows_raises_held_out_accuracy_and_margin(
    recipe: Recipe, preset: str
) -> None:
    done = run_offline(recipe, preset)
    assert done.code == 0, done.err
    first, last = validations(done)
    assert last["validation/accuracy"] == 1.0
    assert last["validation/margin"] > max(0.0, first["validation/margin"])
    assert last["validation/loss"] < first["validation/loss"]
    assert done.summary["stages"][0]["accuracy_last"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["kto", "reward_model"])
def test_a_run_that_is_resumed_ends_with_the_weights_of_one_that_was_not(
    make_recipe: Any, preset: str
) -> None:
    """FR-137: the reference and the value head come from the checkpoint."""
    whole = run_offline(make_recipe("whole"), preset, "deterministic=true")
    halved = make_recipe("halved")
    checkpoint = {"every_steps": 2}
    first = run_offline(halved, preset, "deterministic=true", num_steps=3, checkpoint=checkpoint)
    assert first.run is not None
    for done in sorted((first.run / "checkpoints").glob("*3-*")):
        done.rename(first.run / done.name)  # as if the run had been killed before its end
    resumed = halved.launch("deterministic=true", "trainer.num_steps=4", f"resume={first.run}")
    assert resumed.code == 0, resumed.err
    assert resumed.final_checksums == whole.final_checksums


@pytest.mark.slow
def test_a_trained_reward_model_is_the_reward_of_another_run(
    make_recipe: Any, micro_model: Path
) -> None:
    judge = run_offline(make_recipe("judge"), "reward_model", num_steps=8)
    assert judge.run is not None
    assert validations(judge)[-1]["validation/accuracy"] == 1.0
    published = sorted((judge.run / "publications").glob("actor-*"))[-1]
    recipe = make_recipe("student")
    recipe.write(
        rollout_worker={
            "reward": "nexrl.services.reward.model:RewardModel",
            "reward_arguments": {"path": str(published)},
            "sampling": {"max_tokens": 3},
        },
        trainer={"num_steps": 8},
    )
    done = recipe.launch()
    assert done.code == 0, done.err
    rewards = [step["metrics"]["reward/mean"] for step in done.steps]
    assert rewards[-1] > rewards[0]
