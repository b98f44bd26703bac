"""Tiny language models in Hugging Face folders: real files, random weights, no download.

Recipes start from them and tests run real engines and trainers on them. The weights are drawn
with numpy and written with safetensors, so making a folder needs no torch and takes milliseconds;
`AutoModelForCausalLM` and `AutoTokenizer` load it like any other checkpoint.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nexrl.errors import ConfigError
from nexrl.types import FloatArray, derive_seed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Vocab = Literal["arithmetic", "chat"]

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CHARACTERS: Mapping[str, str] = {
    "arithmetic": string.digits + "+-=",
    "chat": "\n " + string.digits + string.ascii_letters + string.punctuation,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(
    folder: Path | str,
    *,
    seed: int = 0,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    intermediate: int = 384,
    vocab: Vocab = "arithmetic",
    chat_template: bool = False,
    max_positions: int = 64,
) -> Path:
    """Write a LlamaForCausalLM folder of random float32 weights and return it.

    The same arguments give the same bytes on every machine. `chat_template` needs the `chat`
    vocabulary, adds a ChatML template and makes `<|im_end|>` the end-of-sequence token; the
    default is the 0.86M-parameter model of `recipe/arithmetic`.
    """
    if hidden % heads or (hidden // heads) % 2:
        raise ConfigError(
            f"hidden must be an even multiple of heads (rotary positions), got {hidden} and {heads}"
        )
    if chat_template and vocab != "chat":
        raise ConfigError(f"chat_template needs vocab='chat', got {vocab!r}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_char_tokenizer(vocab)
    eos = IM_END if chat_template else EOS
    _write_tokenizer(folder, tokenizer, eos=eos, chat_template=chat_template)
    special_ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(eos),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
        **special_ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special_ids)
    _write_weights(folder, config, seed)
    return folder


def make_micro_model(folder: Path | str, *, seed: int = 0, **settings: Any) -> Path:
    """The smallest useful model (2 layers, hidden 32): for tests that need some model at all.

    `settings` are those of `make_tiny_model`.
    """
    small = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 64}
    return make_tiny_model(folder, seed=seed, **{**small, **settings})


def make_char_tokenizer(vocab: Vocab = "arithmetic") -> Tokenizer:
    """One token for each character; ids 0, 1, 2 are pad, eos and unk.

    The `chat` vocabulary has printable ASCII, newline and the two ChatML markers. Characters
    outside the vocabulary become `<unk>`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    if vocab not in CHARACTERS:
        raise ConfigError(f"vocab must be one of {sorted(CHARACTERS)}, got {vocab!r}")
    specials = [PAD, EOS, UNK] + ([IM_START, IM_END] if vocab == "chat" else [])
    ids = {token: i for i, token in enumerate([*specials, *CHARACTERS[vocab]])}
    # Byte-pair encoding without any merge is a character tokenizer.
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    return tokenizer


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, *, eos: str, chat_template: bool) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": eos,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    if chat_template:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", config)


def _write_weights(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    from safetensors.numpy import save_file

    tensors = {
        name: _initial_tensor(name, shape, seed) for name, shape in _tensor_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face parameter names and shapes of a Llama with untied embeddings."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    intermediate = config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}self_attn.{projection}.weight"] = (hidden, hidden)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, intermediate)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _initial_tensor(name: str, shape: tuple[int, ...], seed: int) -> FloatArray:
    """PyTorch's own defaults: ones for norms, a unit normal for embeddings, else uniform within
    1 / sqrt(fan-in). A small model learns far faster from these than from one small deviation for
    all. Each tensor has a stream of its own, named after it.
    """
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    generator = np.random.default_rng(derive_seed(seed, "initial weights", name))
    if name == "model.embed_tokens.weight":
        return generator.standard_normal(shape, dtype=np.float32)
    bound = shape[1] ** -0.5
    return generator.uniform(-bound, bound, shape).astype(np.float32)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
