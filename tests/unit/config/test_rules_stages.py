"""Rules over all stages: settings that nothing reads are refused, one that some stage reads is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.config.loader import load_run_config
from nexrl.errors import ConfigError

MakeRecipe = Callable[..., Path]
A = "trainer.algorithm"


def refused(recipe: Path, *overrides: str) -> str:
    """The text of the error that a recipe must raise."""
    with pytest.raises(ConfigError) as caught:
        load_run_config(recipe, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "written", "sentence"),
    [
        ("sft", "advantage=gae", f'{A}.advantage.name is "gae", and {A}: sft does not read it'),
        ("dpo", "kl.coefficient=0.1", f"{A}.kl.coefficient is 0.1, and {A}: dpo does not read it"),
        ("dpo", "loss.clip_low=0.1", "it reads preference.beta, preference.label_smoothing, pre"),
        ("simpo", "preference.label_smoothing=0.1", "simpo does not read it (it reads preference"),
        ("process_reward_model", "preference.beta=1", "does not read it (it reads no settings)"),
        ("grpo", "preference.beta=1", "grpo does not read it: only losses on preferences do"),
        ("grpo", "critic.lr=1", f"used only with {A}.advantage gae, not with grpo"),
        ("rloo", "advantage.std=none", f"{A}.advantage rloo does not read it (read by grpo, gigpo"),
        ("rloo", "kl.estimator=k2", f"used only with {A}.kl.coefficient, which is 0"),
        ("rloo", "kl.placement=reward", f"used only with {A}.kl.coefficient, which is 0"),
        ("rloo", "entropy.rate=0.1", f"used only with {A}.entropy.target, which is null"),
        (
            "rloo",
            "shaping.overlong_penalty=2",
            f"only with {A}.shaping.overlong_cache, which is nu",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_refused_with_what_is_read(
    make_recipe: MakeRecipe, algorithm: str, written: str, sentence: str
) -> None:
    text = refused(make_recipe(), f"{A}={algorithm}", f"{A}.{written}", "rollout_worker.reward=r:f")
    assert sentence in text
    assert text.endswith("(command line)")


def test_a_setting_turned_off_again_is_accepted(make_recipe: MakeRecipe) -> None:
    """A recipe's own settings do not bar another preset, where an override resets them."""
    recipe = make_recipe("trainer: {algorithm: {preset: grpo, advantage: {std: none}}}\n")
    assert "std" in refused(recipe, f"{A}=rloo")
    load_run_config(recipe, [f"{A}=rloo", f"{A}.advantage.std=sample"])


def test_an_ablation_may_turn_off_what_other_settings_belong_to(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("trainer: {algorithm: {kl: {coefficient: 0.1, estimator: k2}}}\n")
    load_run_config(recipe, [f"{A}=rloo", f"{A}.kl.coefficient=0"])
    load_run_config(make_recipe(), [f"{A}=decoupled_ppo", f"{A}.correction.action=none"])
    load_run_config(make_recipe(), [f"{A}=rloo", f"{A}.shaping.overlong_penalty=0"])


def test_a_penalty_that_reaches_no_gradient_is_refused(make_recipe: MakeRecipe) -> None:
    taught = ("trainer.algorithm.teacher.path=t", f"{A}.shaping.length_penalty=0.1")
    text = refused(make_recipe(), f"{A}=distill", *taught)
    assert "advantage distill reads no reward with task_coefficient 0" in text
    text = refused(make_recipe(), f"{A}.loss=reverse_kl", *taught)
    assert f"{A}.loss reverse_kl has no advantage, so no reward reaches it" in text
    load_run_config(make_recipe(), [f"{A}=distill", f"{A}.advantage.task_coefficient=1", *taught])


TWO_STAGES = """
trainer:
  algorithm: {kl: {coefficient: 0.1}}
stages:
  - {name: warm_up, trainer: {algorithm: sft}}
  - {name: learn, trainer: {algorithm: %s}}
"""


def test_a_setting_for_all_stages_may_be_meant_for_one(make_recipe: MakeRecipe) -> None:
    load_run_config(make_recipe(TWO_STAGES % "grpo"))
    text = refused(make_recipe(TWO_STAGES % "sft"))
    assert text.startswith(f"stage warm_up: {A}.kl.coefficient is 0.1")
    assert text.endswith("(rl_train.yaml:3)")


def test_a_stages_own_setting_is_not_excused_by_another_stage(make_recipe: MakeRecipe) -> None:
    stages = """
    stages:
      - {name: warm_up, trainer: {algorithm: {preset: sft, kl: {coefficient: 0.1}}}}
      - {name: learn, trainer: {algorithm: {preset: grpo, kl: {coefficient: 0.1}}}}
    """
    assert refused(make_recipe(stages)).startswith(f"stage warm_up: {A}.kl.coefficient")


def test_a_custom_trainer_may_read_anything(make_recipe: MakeRecipe) -> None:
    prefix = "trainer.custom_trainer"
    custom = ("trainer.type=custom", f"{prefix}_module_path=t.py", f"{prefix}_class_name=T")
    load_run_config(make_recipe(), [*custom, f"{A}.preference.beta=1", f"{A}.critic.lr=1"])


def test_a_reward_model_and_a_language_model_are_no_stages_of_one_run(
    make_recipe: MakeRecipe,
) -> None:
    stages = "stages: [{name: rm, trainer: {algorithm: reward_model}}, {name: rl}]\n"
    text = refused(make_recipe(stages))
    assert "stages: 'rm' trains a reward model, which has a value head, and 'rl' a language" in text
