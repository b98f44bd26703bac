"""Recipe `arithmetic`: its data, its reward, its model and its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from nexrl.config.loader import load_run_config
from nexrl.config.user_code import load_user_object
from nexrl.data.data_loader import DataLoader, create_validation_draws
from nexrl.rendering.renderer import load_renderer

RECIPE = Path(__file__).parents[3] / "recipe" / "arithmetic"


def load(reference: str) -> Callable[..., Any]:
    function: Callable[..., Any] = load_user_object(
        f"agent_workspace/{reference}", recipe_dir=RECIPE, key="test"
    )
    return function


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_pairs_are_never_in_training(seed: int) -> None:
    train = {row["prompt"] for row in load("data.py:train_pairs")(seed)}
    held_out = {row["prompt"] for row in load("data.py:held_out_pairs")(seed)}
    assert (len(train), len(held_out), len(train | held_out)) == (9500, 500, 10_000)


def test_answers_are_sums_with_reversed_digits() -> None:
    for row in load("data.py:held_out_pairs")():
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(row["answer"][::-1]) == int(a) + int(b)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("1", 1.0), ("21", 0.0), ("12", 0.0), ("1=", 0.0), (" 1", 0.0), ("", 0.0), ("1+1=1", 0.0)],
)
def test_only_the_answer_and_nothing_else_is_rewarded(completion: str, reward: float) -> None:
    """FR-064, FR-065: neither a list that contains it nor a longer number with its digits."""
    got = load("reward.py:exact_match")(completion, answer="1", prompt="0+1=")
    assert got == reward


def test_model_is_small_and_knows_every_character_of_the_data(tmp_path: Path) -> None:
    load("model.py:make_model")(tmp_path, 0)
    assert sum(t.size for t in load_file(tmp_path / "model.safetensors").values()) < 1_000_000
    renderer = load_renderer(tmp_path)
    rows = load("data.py:train_pairs")()
    text = "".join(sorted({c for row in rows for c in row["prompt"] + row["answer"]}))
    assert renderer.decode(renderer.encode(text)) == text


def test_plan_gets_a_tokenizer_before_the_model_is_made(tmp_path: Path) -> None:
    load("model.py:make_model").tokenizer(tmp_path)  # type: ignore[attr-defined]
    assert load_renderer(tmp_path).vocab_size == 16


def test_longest_answer_and_its_end_fit_into_a_completion(tmp_path: Path) -> None:
    load("model.py:make_model")(tmp_path, 0)
    renderer = load_renderer(tmp_path)
    longest = max(len(renderer.encode(row["answer"])) for row in load("data.py:train_pairs")())
    for stage in load_run_config(RECIPE).stages:
        assert stage.config.rollout_worker.sampling.max_tokens == longest + 1


def test_configuration_opens_its_own_data() -> None:
    warm_up, grpo = (stage.config for stage in load_run_config(RECIPE).stages)
    presets = (warm_up.trainer.algorithm.preset, grpo.trainer.algorithm.preset)
    assert presets == ("sft", "dapo")
    assert (warm_up.rollout_worker.type, grpo.rollout_worker.type) == ("supervised", "single_turn")
    assert DataLoader.open(grpo.data, recipe_dir=RECIPE, seed=0).num_items == 9500
    draws = create_validation_draws(
        grpo.validate_.sources, data=grpo.data, recipe_dir=RECIPE, max_items=None
    )
    assert len(draws) == 500
