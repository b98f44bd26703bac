"""One word in place of a section of `trainer.algorithm`, wherever configuration is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.config.loader import StageConfig, load_run_config
from nexrl.config.schema import AlgorithmConfig
from nexrl.errors import ConfigError

MakeRecipe = Callable[..., Path]


def algorithm_of(recipe: Path, *overrides: str) -> AlgorithmConfig:
    """`trainer.algorithm` of the only stage."""
    (stage,) = load_run_config(recipe, overrides).stages
    return stage.config.trainer.algorithm


def refused(recipe: Path, *overrides: str) -> str:
    """The text of the error that a recipe must raise."""
    with pytest.raises(ConfigError) as caught:
        load_run_config(recipe, overrides)
    return str(caught.value)


WORDS = {
    "trainer.algorithm": ("dapo", "preset"),
    "trainer.algorithm.advantage": ("rloo", "name"),
    "trainer.algorithm.loss": ("cispo", "name"),
    "trainer.algorithm.correction": ("tis", "preset"),
}


@pytest.mark.parametrize("key", WORDS)
def test_a_word_is_the_name_of_its_section_in_a_file_and_on_the_command_line(
    make_recipe: MakeRecipe, key: str
) -> None:
    word, name = WORDS[key]
    recipe = make_recipe()
    written = load_run_config(recipe, [f"{key}.{name}={word}"]).config
    assert load_run_config(recipe, [f"{key}={word}"]).config == written
    parts = key.split(".")
    nested = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(parts))
    assert load_run_config(make_recipe(f"{nested.rstrip()} {word}\n")).config == written


def test_a_word_keeps_its_line(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("trainer:\n  algorithm:\n    loss: cispo\n")
    origins = load_run_config(recipe).provenance
    assert str(origins["trainer.algorithm.loss.name"]) == "rl_train.yaml:4"
    assert "(rl_train.yaml:4)" in refused(make_recipe("trainer:\n  algorithm:\n    loss: csipo\n"))


def test_a_word_over_a_mapping_changes_the_name_only(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(
        "trainer: {algorithm: {preset: gspo, advantage: {std: none}, loss: {clip_high: 0.5}}}"
    )
    changed = algorithm_of(recipe, "trainer.algorithm=dapo")
    assert (changed.preset, changed.advantage.std) == ("dapo", "none")
    assert (changed.loss.name, changed.loss.clip_high) == ("ppo", 0.5)


def test_a_mapping_over_a_word_of_inherited_defaults_adds_to_it(make_recipe: MakeRecipe) -> None:
    folder = make_recipe(files={"base.yaml": "trainer: {algorithm: dapo}\n"})
    (folder / "rl_train.yaml").write_text(
        "defaults: [valid.yaml, base.yaml]\ntrainer: {algorithm: {loss: {clip_high: 0.3}}}\n"
    )
    algorithm = algorithm_of(folder)
    assert (algorithm.preset, algorithm.loss.clip_high) == ("dapo", 0.3)


def stages_of(recipe: Path, *overrides: str) -> list[tuple[str, str]]:
    def words(stage: StageConfig) -> tuple[str, str]:
        algorithm = stage.config.trainer.algorithm
        return algorithm.preset, algorithm.loss.name

    return [words(stage) for stage in load_run_config(recipe, overrides).stages]


def test_a_stage_and_an_override_of_a_stage_take_words(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(
        """
        stages:
          - {name: a, trainer: {algorithm: sft}}
          - {name: b, trainer: {algorithm: {loss: cispo}}}
        """
    )
    assert stages_of(recipe) == [("sft", "cross_entropy"), ("grpo", "cispo")]
    changed = stages_of(recipe, "stages.b.trainer.algorithm=dapo", "stages.0.trainer.algorithm=dpo")
    assert changed == [("dpo", "dpo"), ("dapo", "cispo")]


def test_words_may_come_from_the_environment_or_from_another_key(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXRL_TEST_ALGORITHM", "gspo")
    recipe = make_recipe(
        """
        experiment_name: rloo
        trainer: {algorithm: "${oc.env:NEXRL_TEST_ALGORITHM}"}
        """
    )
    assert algorithm_of(recipe, "trainer.algorithm.entropy.coefficient=0.5").loss.name == "gspo"
    other = algorithm_of(recipe, "trainer.algorithm.advantage=${experiment_name}")
    assert other.advantage.name == "rloo"


def test_what_is_no_word_is_refused_with_both_spellings(make_recipe: MakeRecipe) -> None:
    text = refused(make_recipe(), "trainer.algorithm=3")
    assert "must be a mapping of settings, or its preset as one word, got 3" in text
    assert "its name as one word" in refused(make_recipe(), "trainer.algorithm.loss=[ppo]")


@pytest.mark.parametrize("old", ["sft", "grpo"])
def test_the_algorithm_is_no_longer_a_type_of_trainer(make_recipe: MakeRecipe, old: str) -> None:
    text = refused(make_recipe(f"trainer: {{type: {old}}}"))
    assert text == (
        f'trainer.type must be one of built_in, custom, got "{old}"; write trainer.algorithm: '
        f"{old} (rl_train.yaml:2)"
    )
