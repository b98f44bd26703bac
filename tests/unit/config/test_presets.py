"""Presets: published algorithms as settings below everything that is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nexrl.algorithms.corrections import CORRECTION_PRESETS
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from nexrl.algorithms.presets import PRESETS
from nexrl.config.fields import find_field
from nexrl.config.loader import LoadedConfig, load_run_config
from nexrl.errors import ConfigError

MakeRecipe = Callable[..., Path]

MINIMAL = """
data: {sources: [{path: train.jsonl}]}
rollout_worker: {reward: "reward.py:exact"}
service: {train_service: {model_path: model}}
"""
CUSTOM_WORKER = (
    "rollout_worker.type=custom",
    "rollout_worker.custom_rollout_worker_module_path=w.py",
    "rollout_worker.custom_rollout_worker_class_name=W",
)
TEACHER = ("trainer.algorithm.teacher.path=teacher",)
NEEDED = {
    "gigpo": CUSTOM_WORKER,
    "step_returns": CUSTOM_WORKER,
    "distill": TEACHER,
    "distill_top_k": TEACHER,
}
"""What a minimal recipe must write besides the preset's name."""


@pytest.fixture
def load(make_recipe: MakeRecipe) -> Callable[..., LoadedConfig]:
    """`load(preset, *overrides)`: a minimal recipe of that preset."""

    def loaded(name: str, *overrides: str) -> LoadedConfig:
        recipe = make_recipe(f"trainer: {{algorithm: {name}}}", base=MINIMAL)
        return load_run_config(recipe, [*NEEDED.get(name, ()), *overrides])

    return loaded


Load = Callable[..., LoadedConfig]


def leaves(settings: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every setting."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*path, key))
        else:
            yield ".".join((*path, key)), value


def value_at(loaded: LoadedConfig, key: str) -> Any:
    value: Any = loaded.config.model_dump(by_alias=True)
    for part in key.split("."):
        value = value[part]
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", PRESETS)
def test_a_minimal_recipe_of_each_preset_has_the_presets_settings(load: Load, name: str) -> None:
    loaded = load(name)
    for key, value in leaves(PRESETS[name].settings):
        assert value_at(loaded, key) == value, key


@pytest.mark.parametrize("name", PRESETS)
def test_every_setting_of_a_preset_is_a_setting_there_is(name: str) -> None:
    keys = [key for key, _ in leaves(PRESETS[name].settings)] + list(PRESETS[name].shares)
    assert [key for key in keys if find_field(tuple(key.split("."))) is None] == []


OTHER_WORDS = {
    "std": "none",
    "baseline": "moving",
    "aggregation": "trajectory_mean",
    "level": "geometric",
    "on_exhausted": "skip",
    "filters": ["all_truncated"],
}
"""Another value of settings that are no numbers."""
FIXED = ("name", "type", "action", "placement", "greedy_baseline", "recompute_proximal")
"""Settings that others depend on; tests below change them together."""


def another(key: str, value: Any) -> Any:
    """Another value that the same rules accept."""
    leaf = key.rpartition(".")[2]
    if leaf == "estimator":
        return "k3" if value == "k2" else "k2"
    if leaf in OTHER_WORDS:
        return OTHER_WORDS[leaf]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else (value or 1.0) / 2


@pytest.mark.parametrize("name", PRESETS)
def test_every_setting_of_a_preset_yields_to_what_is_written(load: Load, name: str) -> None:
    settings = dict(leaves(PRESETS[name].settings))
    loss = LOSSES.get(settings["trainer.algorithm.loss.name"])
    for key, value in settings.items():
        fixed = key.endswith("aggregation") and loss is not None and loss.aggregation
        if fixed or key.rpartition(".")[2] in FIXED:
            continue
        changed = load(name, f"{key}={json.dumps(another(key, value))}")
        assert value_at(changed, key) == another(key, value) != value, key


def test_what_a_preset_brings_says_so(load: Load) -> None:
    loaded = load("dapo", "trainer.algorithm.loss.clip_high=0.3")
    origins = {key: str(origin) for key, origin in loaded.provenance.items()}
    assert origins["trainer.algorithm.preset"] == "rl_train.yaml:2"
    assert origins["trainer.algorithm.loss.clip_low"] == "preset dapo"
    assert origins["trainer.algorithm.loss.clip_high"] == "command line"
    assert origins["trajectory_pool.dynamic_sampling.refill_factor"] == "preset dapo"
    assert origins["trainer.algorithm.loss.dual_clip"] == "default"


def test_a_recipe_without_algorithm_is_grpo_as_published(make_recipe: MakeRecipe) -> None:
    algorithm = load_run_config(make_recipe(base=MINIMAL)).config.trainer.algorithm
    assert (algorithm.preset, algorithm.kl.coefficient) == ("grpo", 0.04)
    assert algorithm.loss.aggregation == "sequence_mean_token_mean"


def test_the_overlong_penalty_of_dapo_is_a_fifth_of_the_longest_response(load: Load) -> None:
    key = "rollout_worker.sampling.max_tokens"
    found = [
        load("dapo", f"{key}={n}").config.trainer.algorithm.shaping.overlong_cache
        for n in (20480, 4)
    ]
    assert found == [4096, None]


def test_an_unknown_preset_names_the_nearest_and_all_there_are(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load("dapoo")
    text = str(caught.value)
    assert "no preset is named 'dapoo'; did you mean dapo? (accepted: grpo, dr_grpo, " in text
    assert text.endswith("(rl_train.yaml:2)")


def test_another_loss_drops_the_presets_loss_settings_but_not_its_aggregation(load: Load) -> None:
    loss = load("dapo", "trainer.algorithm.loss=cispo").config.trainer.algorithm.loss
    assert (loss.name, loss.clip_low, loss.clip_high) == ("cispo", None, None)
    assert loss.aggregation == "token_mean"
    same = load("dapo", "trainer.algorithm.loss=ppo").config.trainer.algorithm.loss
    assert same.clip_high == 0.28


def test_a_loss_with_one_aggregation_brings_it(load: Load) -> None:
    loaded = load("dapo", "trainer.algorithm.loss=gspo")
    key = "trainer.algorithm.loss.aggregation"
    assert loaded.config.trainer.algorithm.loss.aggregation == LOSSES["gspo"].aggregation
    assert str(loaded.provenance[key]) == "loss gspo"


def test_an_estimator_that_needs_a_greedy_completion_brings_it(load: Load) -> None:
    loaded = load("reinforce", "trainer.algorithm.advantage=remax")
    assert loaded.config.trainer.algorithm.greedy_baseline
    assert str(loaded.provenance["trainer.algorithm.greedy_baseline"]) == "advantage remax"


@pytest.mark.parametrize("name", [name for name in CORRECTION_PRESETS if name != "none"])
def test_a_correction_brings_its_parts_and_recomputed_logprobs(load: Load, name: str) -> None:
    loaded = load("grpo", f"trainer.algorithm.correction={name}")
    algorithm, expected = loaded.config.trainer.algorithm, CORRECTION_PRESETS[name]
    found = algorithm.correction
    assert (found.level, found.action) == (expected.level, expected.action)
    assert (found.low, found.high) == (expected.low, expected.high)
    assert algorithm.recompute_proximal
    assert str(loaded.provenance["trainer.algorithm.correction.high"]) == f"correction {name}"


def test_the_schema_accepts_every_correction_there_is() -> None:
    field = find_field(("trainer", "algorithm", "correction", "preset"))
    assert field is not None
    assert field.accepted == f"one of {', '.join(CORRECTION_PRESETS)}"


def test_a_written_correction_replaces_the_presets_and_its_bounds_can_be_changed(
    load: Load,
) -> None:
    key = "trainer.algorithm.correction"
    changed = load("decoupled_ppo", f"{key}=tis", f"{key}.high=3").config.trainer.algorithm
    found = changed.correction
    assert (found.action, found.low, found.high) == ("truncate", None, 3.0)
    off = load("decoupled_ppo", f"{key}=none").config.trainer.algorithm
    assert (off.correction.action, off.correction.high) == ("none", None)


def test_a_reference_sees_what_a_preset_brings(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(
        """
        trainer:
          algorithm: {preset: dapo, loss: {clip_low: "${trainer.algorithm.loss.clip_high}"}}
        """,
        base=MINIMAL,
    )
    assert load_run_config(recipe).config.trainer.algorithm.loss.clip_low == 0.28


def test_each_stage_has_the_settings_of_its_own_preset(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(
        "stages: [{name: a, trainer: {algorithm: sft}}, {name: b, trainer: {algorithm: dapo}}]",
        base=MINIMAL,
    )
    first, second = (stage.config for stage in load_run_config(recipe).stages)
    assert (first.rollout_worker.type, first.data.rollout_repeat_n) == ("supervised", 1)
    assert (second.rollout_worker.type, second.data.rollout_repeat_n) == ("single_turn", 8)
    assert first.trajectory_pool.dynamic_sampling.filters == ()


def test_every_offline_loss_has_a_preset_with_its_rows(load: Load) -> None:
    workers = {"pair": "preference", "labelled": "labelled", "process": "process"}
    for name, loss in PREFERENCE_LOSSES.items():
        config = load(name).config
        assert config.trainer.algorithm.loss.name == name
        assert config.rollout_worker.type == workers[loss.rows]
        assert (PRESETS[name].family == "reward_model") is loss.needs_scores


def test_a_preset_of_an_experimental_loss_is_marked_so() -> None:
    for preset in PRESETS.values():
        loss = LOSSES.get(preset.settings["trainer"]["algorithm"]["loss"]["name"])
        assert preset.experimental is (loss is not None and loss.experimental), preset.name


def test_texts_of_presets_are_complete_and_fit_on_a_screen() -> None:
    for preset in PRESETS.values():
        assert preset.summary
        assert preset.source
        assert preset.formula.startswith("L = 1/")
        assert max(map(len, [preset.summary, *preset.formula.splitlines()])) <= 98
