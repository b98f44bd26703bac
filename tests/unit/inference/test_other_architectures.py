"""The builtin engine over other families than Llama: grouped heads, learned positions, windows."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.errors import ConfigError
from nexrl.services.inference.engines.builtin.service import BuiltinInference
from nexrl.types import Prompt, Sampling

SMALL = {"vocab_size": 16, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
LLAMA_LIKE = SMALL | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE | {"head_dim": 8},
    "gpt2": SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gpt_neox": LLAMA_LIKE,
    "mistral": LLAMA_LIKE | {"sliding_window": None},
}


MakeEngine = Callable[..., BuiltinInference]


def make_model(folder: Path, tokenizer_of: Path, family: str, **settings: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **settings})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def expected_tokens(folder: Path, prompt: Prompt, num: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.from_numpy(prompt.token_ids.astype(np.int64))[None]
    mask = torch.ones_like(ids)
    drawn = model.generate(ids, attention_mask=mask, max_new_tokens=num, do_sample=False)
    return [int(i) for i in drawn[0, ids.shape[1] :]]


@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "deterministic"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_draws_equal_those_of_transformers(
    micro_model: Path, tmp_path: Path, family: str, deterministic: bool, make_engine: MakeEngine
) -> None:
    folder = make_model(tmp_path / family, micro_model, family)
    rng = np.random.default_rng(0)
    prompts = [Prompt(token_ids=rng.integers(3, 16, n).astype(np.int32)) for n in (3, 8, 8, 20)]
    inference = make_engine(folder, deterministic=deterministic)
    sampling = Sampling(max_tokens=12, temperature=0.0)
    answers = await asyncio.gather(*(inference.generate(p, sampling=sampling) for p in prompts))
    for prompt, (completion,) in zip(prompts, answers, strict=True):
        assert completion.token_ids.tolist() == expected_tokens(folder, prompt, 12)


async def test_bfloat16_draws_and_scores(make_engine: MakeEngine) -> None:
    inference = make_engine(dtype="bfloat16")
    prompt = Prompt(token_ids=np.array([3, 4, 5], np.int32))
    completions = await inference.generate(prompt, sampling=Sampling(max_tokens=8, seed=1), n=4)
    assert all(c.logprobs is not None and np.isfinite(c.logprobs).all() for c in completions)


def test_a_window_that_would_be_left_is_refused(
    micro_model: Path, tmp_path: Path, make_engine: MakeEngine
) -> None:
    """The slot cache attends to everything; inside the window that is exact."""
    folder = make_model(tmp_path / "m", micro_model, "mistral", sliding_window=16)
    with pytest.raises(ConfigError, match=r"sliding_attention.*window 16.*max_context 64"):
        make_engine(folder)
    make_engine(folder, max_context=16)
