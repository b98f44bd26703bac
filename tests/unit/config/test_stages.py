"""Stages: the recipe with some sections changed, each checked as a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.config.loader import load_run_config
from nexrl.errors import ConfigError

MakeRecipe = Callable[..., Path]

TWO_STAGES = """
stages:
  - name: warmup
    rollout_worker: {type: supervised}
    data: {rollout_repeat_n: 1}
    trainer: {algorithm: sft, num_steps: 5}
  - name: rl
    trainer: {num_steps: 7}
"""


def refused(recipe: Path, *overrides: str) -> str:
    """The text of the error that a recipe must raise."""
    with pytest.raises(ConfigError) as caught:
        load_run_config(recipe, overrides)
    return str(caught.value)


def test_a_recipe_without_stages_has_one_named_main(make_recipe: MakeRecipe) -> None:
    loaded = load_run_config(make_recipe())
    (stage,) = loaded.stages
    assert (stage.name, stage.config) == ("main", loaded.config)


def test_each_stage_is_the_recipe_with_its_own_settings(make_recipe: MakeRecipe) -> None:
    warmup, rl = load_run_config(make_recipe(TWO_STAGES)).stages
    found = [(s.name, s.config.trainer.algorithm.preset) for s in (warmup, rl)]
    assert found == [("warmup", "sft"), ("rl", "grpo")]
    assert [s.config.trainer.num_steps for s in (warmup, rl)] == [5, 7]
    assert warmup.config.data.batch_size == rl.config.data.batch_size == 4
    assert str(rl.provenance["trainer.num_steps"]) == "rl_train.yaml:8"


def test_the_command_line_holds_for_every_stage_or_for_the_named_one(
    make_recipe: MakeRecipe,
) -> None:
    """Every setting is used or rejected: an override is not shadowed by a stage."""
    recipe = make_recipe(TWO_STAGES)
    both = load_run_config(recipe, ["trainer.num_steps=2"]).stages
    assert [stage.config.trainer.num_steps for stage in both] == [2, 2]
    one = load_run_config(recipe, ["stages.rl.trainer.num_steps=2"]).stages
    assert [stage.config.trainer.num_steps for stage in one] == [5, 2]


def test_references_are_resolved_within_the_stage(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(TWO_STAGES + "trajectory_pool: {batch_size: '${data.batch_size}'}\n")
    text = refused(recipe, "stages.rl.data.batch_size=6")
    assert "stage warmup" not in text
    assert "stage rl: trajectory_pool.batch_size must equal" in text
    assert "6 x 2 = 12, got 6" in text


def test_a_stage_may_not_change_services_launch_or_seed(make_recipe: MakeRecipe) -> None:
    text = refused(make_recipe("stages:\n  - name: a\n    seed: 2\n    launch: {}\n"))
    assert "stages.0.seed cannot be set in a stage" in text
    assert "(rl_train.yaml:4)" in text
    assert "stages.0.launch cannot be set in a stage" in text


def test_a_misspelt_section_of_a_stage_is_suggested(make_recipe: MakeRecipe) -> None:
    text = refused(make_recipe("stages: [{name: a, trainr: {num_steps: 1}}]"))
    assert "stages.0.trainr cannot be set in a stage; did you mean trainer?" in text
    text = refused(make_recipe("stages: [{name: a, algorithm: sft}, {name: b, service: {}}]"))
    assert "stages.0.algorithm cannot be set in a stage; did you mean trainer.algorithm?" in text
    assert "stages.1.service cannot be set in a stage; it may set data, rollout_worker" in text


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ("[{trainer: {num_steps: 1}}]", "stages.0 needs a `name`"),
        ("[{name: a/b}]", "stages.0 needs a `name` of letters, digits, `.`, `_` and `-`"),
        ("[{name: a}, {name: a}]", "stages.1.name 'a' is used twice"),
        ("[{name: a, trainer: {max_step: 1}}]", "stage a: trainer.max_step is not a key"),
        ("[{name: a, trainer: {num_steps: x}}]", "stage a: trainer.num_steps must be an integer"),
        ("[{name: a, data: {rollout_repeat_n: 1}}]", "stage a: data.rollout_repeat_n must be"),
    ],
)
def test_a_wrong_stage_is_refused_by_name(
    make_recipe: MakeRecipe, stages: str, sentence: str
) -> None:
    text = refused(make_recipe(f"stages: {stages}"))
    assert sentence in text
    assert "(rl_train.yaml:2)" in text


def test_only_the_stages_need_to_be_complete(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("rollout_worker: {reward: null}\n" + TWO_STAGES)
    text = refused(recipe)
    assert text.startswith("stage rl: rollout_worker.reward must be set")
    load_run_config(recipe, ["stages.rl.rollout_worker={reward: 'reward.py:exact'}"])
