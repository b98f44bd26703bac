"""What works and is probably not meant is said before a run begins, and kept in its log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.cli.main import main
from nexrl.config.cautions import run_cautions
from nexrl.config.loader import load_run_config
from nexrl.config.redact import REDACTED

MakeRecipe = Callable[..., Path]
WARM_UP = "trainer.optimizer.warmup_steps 10 is longer than the stage's 3 optimizer steps"


def test_a_good_recipe_has_nothing_to_be_warned_of(make_recipe: MakeRecipe) -> None:
    assert run_cautions(load_run_config(make_recipe())) == []


def test_a_caution_names_its_stage_and_its_line(make_recipe: MakeRecipe) -> None:
    stages = """
    stages:
      - {name: short, trainer: {optimizer: {warmup_steps: 10}}}
      - {name: long, trainer: {num_steps: 20, optimizer: {warmup_steps: 10}}}
    """
    assert run_cautions(load_run_config(make_recipe(stages))) == [
        f"stage short: {WARM_UP} (rl_train.yaml:3)"
    ]


def test_a_caution_shows_no_secret(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    overrides = ["trainer.algorithm=sft", "rollout_worker.reward=${oc.env:MY_TOKEN}.py:f"]
    text = str(run_cautions(load_run_config(make_recipe(), overrides)))
    assert f"rollout_worker.reward is {REDACTED}.py:f, and rows" in text
    assert "hunter2" not in text


def test_a_launch_prints_cautions_before_it_begins_and_keeps_them_in_its_log(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, runs = make_recipe(), tmp_path / "runs"
    settings = ("trainer.optimizer.warmup_steps=10", f"launch.run_root={runs}", "logger=[]")
    assert main(["launch", str(recipe), *settings]) == 1  # there is no model
    err = capsys.readouterr().err
    assert err.startswith(f"warning: {WARM_UP} (command line)\n")
    [log] = runs.glob("demo/*/logs/controller.log")
    assert f"WARNING nexrl.launch.run {WARM_UP} (command line)\n" in log.read_text()


def test_a_critic_that_warms_up_to_the_end_is_warned_of(make_recipe: MakeRecipe) -> None:
    """vapo's 50 batches are longer than many a first run, and its policy would never change."""
    settings = ["trainer.algorithm=vapo", "rollout_worker.sampling.max_tokens=4000"]
    recipe = make_recipe()
    [text] = run_cautions(load_run_config(recipe, [*settings, "trainer.num_steps=50"]))
    assert text.startswith(
        "trainer.algorithm.critic.warmup_batches is 50, and trainer.num_steps 50"
    )
    assert run_cautions(load_run_config(recipe, [*settings, "trainer.num_steps=51"])) == []


def test_an_advantage_beside_a_loss_without_one_is_warned_of(make_recipe: MakeRecipe) -> None:
    settings = ["trainer.algorithm.loss=reverse_kl", "trainer.algorithm.teacher.path=t"]
    assert run_cautions(load_run_config(make_recipe(), settings)) == []
    written = [*settings, "trainer.algorithm.advantage=rloo"]
    [text] = run_cautions(load_run_config(make_recipe(), written))
    assert "advantage.name is rloo, and trainer.algorithm.loss reverse_kl has no advantage" in text
