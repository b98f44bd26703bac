"""Tiny models: Hugging Face folders that load anywhere and are the same everywhere."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from nexrl.errors import ConfigError
from nexrl.testing.tiny_models import make_char_tokenizer, make_micro_model, make_tiny_model


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.blake2b(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def count_parameters(folder: Path) -> int:
    return sum(tensor.size for tensor in load_file(folder / "model.safetensors").values())


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights_only(
    tmp_path: Path,
) -> None:
    first, again, other = (
        digest(make_micro_model(tmp_path / name, seed=seed))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_default_has_less_than_a_million_parameters(tmp_path: Path) -> None:
    assert count_parameters(make_tiny_model(tmp_path)) == 857_216


@pytest.mark.parametrize("settings", [{}, {"vocab": "chat", "chat_template": True}])
def test_transformers_loads_every_tensor_and_agrees_on_special_ids(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_micro_model(tmp_path, **settings)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0
    assert model.config.vocab_size == len(tokenizer)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(folder)
    text = "12+3=-" if not settings else "Hi, it's  1+2=\n<3"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_characters_outside_the_vocabulary_become_unknown_one_by_one() -> None:
    tokenizer = make_char_tokenizer("arithmetic")
    assert tokenizer.encode("1xy2").tokens == ["1", "<unk>", "<unk>", "2"]


def test_weights_are_marked_for_torch(tmp_path: Path) -> None:
    """transformers refuses a safetensors file without this mark."""
    with safe_open(make_micro_model(tmp_path) / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_making_a_model_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from nexrl.testing.tiny_models import make_micro_model;"
        f"make_micro_model({str(tmp_path)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hidden": 30, "heads": 4}, "hidden must be an even multiple of heads"),
        ({"chat_template": True}, "chat_template needs vocab='chat'"),
        ({"vocab": "words"}, r"one of \['arithmetic', 'chat'\], got 'words'"),
    ],
)
def test_impossible_settings_are_refused(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make_tiny_model(tmp_path, **settings)
