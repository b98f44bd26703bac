"""Every wrong value is refused with its key, the value, what is accepted and its origin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.config.fields import all_fields
from nexrl.config.loader import load_run_config
from nexrl.errors import ConfigError

MakeRecipe = Callable[..., Path]


def refused(recipe: Path, *overrides: str) -> str:
    """The text of the error that a recipe must raise."""
    with pytest.raises(ConfigError) as caught:
        load_run_config(recipe, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            'data.batch_size="64"',
            'data.batch_size must be an integer of at least 1, got "64"; write it without quotes',
        ),
        ("trainer.num_steps=true", "trainer.num_steps must be an integer of at least 0, got true"),
        (
            "trainer.num_steps=1e3",
            "trainer.num_steps must be an integer of at least 0, got 1000.0; write 1000",
        ),
        (
            'trainer.optimizer.lr="1e-4"',
            'trainer.optimizer.lr must be a number of at least 0, got "1e-4"; write it without quotes',
        ),
        (
            "rollout_worker.sampling.top_p=1.5",
            "rollout_worker.sampling.top_p must be a number greater than 0 and at most 1, got 1.5",
        ),
        ("trainer.optimizer.lr=.nan", "must be a number of at least 0, got NaN"),
        ("rollout_worker.deadline_s=.inf", "must be a number greater than 0, got Infinity"),
        (
            "weight.mode=snyc",
            'weight.mode must be one of sync, batch-async, sample-async, got "snyc"; did you mean '
            "sync?",
        ),
        ("data.shuffle=yes", 'data.shuffle must be true or false, got "yes"'),
        ("logger=wandb", "logger must be a list, each entry one of tensorboard, wandb"),
        ("trainer.optimizer.betas=[0.9]", "must be a list of 2, each entry a number"),
        ("trainer.optimizer.betas=[0.9, 0.95, 1]", "must be a list of 2, each entry a number"),
        ("data.sources=x", "write [x]"),
        ("trainer=null", "trainer must be a mapping of settings, got null; leave the key out"),
        ("experiment_name=a/b", "experiment_name must be a text that matches"),
        ("stages=[3]", "stages.0 must be a mapping, got 3 (command line)"),
        ("logger=[wand]", 'logger.0 must be one of tensorboard, wandb, got "wand"'),
        (
            "trainer.algorithm=3",
            "a mapping of settings, or its preset as one word, got 3; its keys",
        ),
        ("trainer.algorithm.kl=0.1", "got 0.1; its keys are coefficient, estimator, placement"),
        ("trainer.algorithm.kl.estimator=K3", 'got "K3"; did you mean k3?'),
        (
            "trainer.algorithm.advantage.part_weights={a: x}",
            'part_weights.a must be a number, got "x" (command line)',
        ),
        (
            "trainer.algorithm.loss.settings={a: [1]}",
            "loss.settings.a must be a number or a text or true or false or null, got [1] (command",
        ),
        ("trainer.algorithm={preset:dapo}", "write `preset: dapo`, with a space after the colon"),
        ("trainer.algorithm={preset:", "an override with spaces is written in quotes"),
    ],
)
def test_a_wrong_value_says_what_is_accepted(
    make_recipe: MakeRecipe, override: str, sentence: str
) -> None:
    assert sentence in refused(make_recipe(), override)


@pytest.mark.parametrize(
    "key",
    sorted(
        field.key
        for field in all_fields().values()
        if field.kind == "integer" and "at least" in field.accepted and "*" not in field.key
    ),
)
def test_an_integer_below_its_range_names_key_and_range(make_recipe: MakeRecipe, key: str) -> None:
    """FR-158: zero and negative values are rejected at load with the allowed range."""
    field = all_fields()[tuple(key.split("."))]
    bound = int(field.accepted.split("at least ")[1].split(",")[0])
    text = refused(make_recipe(), f"{key}={bound - 1}")
    assert f"{key} must be an integer of at least {bound}" in text
    assert f"got {bound - 1}" in text


def test_zero_rollouts_are_rejected_with_the_line(make_recipe: MakeRecipe) -> None:
    """FR-158"""
    text = refused(make_recipe("data:\n  rollout_repeat_n: 0\n"))
    assert text == "data.rollout_repeat_n must be an integer of at least 1, got 0 (rl_train.yaml:3)"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.max_step", "trainer.num_steps"),
        ("data.batchsize", "data.batch_size"),
        ("data.path", "data.sources[].path"),
        ("data.factory", "data.sources[].factory"),
        ("service.inference.url", "service.inference_service"),
        ("trainer.lr", "trainer.optimizer.lr"),
        ("trainer.batch_size", "data.batch_size"),
        ("model_path", "service.train_service.model_path"),
        ("rollout_worker.temperature", "rollout_worker.sampling.temperature"),
        ("wieght", "weight"),
        ("data.sources.0.pth", "data.sources.0.path"),
        ("trainer.algorithm.kl.coef", "trainer.algorithm.kl.coefficient"),
        (
            "trainer.algorithm.loss.clip",
            "trainer.algorithm.loss.clip_low or trainer.algorithm.loss",
        ),
        ("trainer.algorithm.name", "trainer.algorithm.preset?"),
        ("trainer.algorithm.correction.name", "trainer.algorithm.correction.preset?"),
    ],
)
def test_an_unknown_key_suggests_the_nearest_or_the_right_section(
    make_recipe: MakeRecipe, key: str, meant: str
) -> None:
    """FR-161: a misspelt key never passes, and the error names the key that exists."""
    text = refused(make_recipe(), f"{key}=1")
    assert f"{key.removesuffix('.url')} is not a key; did you mean " in text
    assert meant in text
    assert text.endswith("(command line)")


def test_an_unknown_key_like_nothing_lists_the_keys_there_are(make_recipe: MakeRecipe) -> None:
    text = refused(make_recipe("launch:\n  zzzz: 1\n"))
    assert text == (
        "launch.zzzz is not a key; launch accepts mode, run_root, shutdown_deadline_s "
        "(rl_train.yaml:3)"
    )


def test_all_problems_are_reported_at_once_with_their_origins(make_recipe: MakeRecipe) -> None:
    text = refused(make_recipe("data:\n  batch_size: 0\ntrainer:\n  max_step: 1\n"), "seed=-1")
    assert text.startswith("3 problems in the configuration of rl_train.yaml:")
    for part in ("data.batch_size", "(rl_train.yaml:3)", "(rl_train.yaml:5)", "seed must be"):
        assert part in text


def test_a_refused_secret_is_not_shown(make_recipe: MakeRecipe) -> None:
    text = refused(make_recipe(), "service.inference_service.api_key=[hunter2]")
    assert "service.inference_service.api_key must be a text, or null, got ***" in text
    assert "hunter2" not in text


def test_no_setting_is_ignored(make_recipe: MakeRecipe) -> None:
    """Each key of the schema is either a section or takes a value; all others are refused."""
    for field in all_fields().values():
        if field.section and field.kind == "section":
            assert "is not a key" in refused(make_recipe(), f"{field.key}.no_such_setting=1")
