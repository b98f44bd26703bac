"""Any Hugging Face causal LM: scored, trained, packed, published and loaded again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.config.schema import TrainServiceConfig
from nexrl.errors import ConfigError, InvariantError
from nexrl.services.train.backends.hf_model import (
    LoadedModel,
    check_packing,
    export_side_files,
    export_tensors,
    load_model,
    load_value_model,
    row_values,
)
from nexrl.services.train.backends.torch_policy import TorchPolicy
from nexrl.services.train.publication import write_model_files
from nexrl.testing.contracts.train_subject import contract_chunk
from nexrl.testing.tiny_models import make_micro_model
from nexrl.types import LossSpec, RowChunk

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "tie_word_embeddings": True},
    "qwen3": {**SMALL, "head_dim": 8, "tie_word_embeddings": False},
    # Logits are capped after the head, and half of the layers see a window.
    "gemma2": {**SMALL, "head_dim": 8, "sliding_window": 3, "final_logit_softcapping": 2.0},
    # Experts are fused in memory and apart on disk.
    "mixtral": {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2},
    # Learned positions, tied head, dropout of 0.1 in its configuration.
    "gpt2": {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
}


def make_folder(folder: Path, kind: str) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **ARCHITECTURES[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> LoadedModel:
    return load_model(str(folder), setting="test", device=CPU)


def make_policy(model: LoadedModel, **changes: Any) -> TorchPolicy:
    config = TrainServiceConfig(micro_batch_tokens=64, **changes)
    return TorchPolicy("actor", model, config, trainable=True, stop=threading.Event())


def logprobs(model: LoadedModel, **changes: Any) -> np.ndarray[Any, Any]:
    chunk = contract_chunk((9, 4, 6, 2, 3))
    return make_policy(model, **changes).forward(chunk, ("logprobs",)).outputs["logprobs"]


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp(request.param), request.param)


def test_logprobs_equal_the_plain_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chunk = contract_chunk((9, 4, 6, 2, 3))
    found = logprobs(load(folder))
    for start, end in zip(chunk.offsets[:-1], chunk.offsets[1:], strict=True):
        ids = torch.from_numpy(chunk.token_ids[start:end].astype(np.int64))
        with torch.no_grad():
            log_p = torch.log_softmax(plain(ids[None]).logits[0, :-1], -1)
        expected = log_p.gather(1, ids[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(found[start + 1 : end], expected, atol=1e-5)


def test_packed_equals_padded(folder: Path) -> None:
    """FR-092"""
    model = load(folder)
    check_packing(model)
    np.testing.assert_allclose(logprobs(model, packing=True), logprobs(model), atol=1e-5)


def test_publication_loads_and_gives_the_same_logprobs(folder: Path, tmp_path: Path) -> None:
    """FR-137: compare numbers, not files; tied and fused tensors included."""
    from safetensors import safe_open

    model = load(folder)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.5)
    tensors = export_tensors(model, torch.float32)
    write_model_files(tmp_path, tensors, export_side_files(model, torch.float32))
    np.testing.assert_array_equal(logprobs(load(tmp_path)), logprobs(model))
    with (
        safe_open(tmp_path / "model.safetensors", "numpy") as ours,
        safe_open(folder / "model.safetensors", "numpy") as original,
    ):
        assert sorted(ours.keys()) == sorted(original.keys())


def test_dropout_of_the_configuration_is_off_in_training_mode(folder: Path) -> None:
    """The policy that is trained is the one that sampled."""
    model = load(folder)
    policy = make_policy(model, gradient_checkpointing=True)
    chunk = contract_chunk()
    loss = LossSpec(name="cross_entropy")
    trained = policy.forward_backward(chunk, loss, ("logprobs",)).outputs["logprobs"]
    scored = policy.forward(chunk, ("logprobs",)).outputs["logprobs"]
    np.testing.assert_allclose(trained, scored, atol=1e-6)


def test_bfloat16_export_says_so_in_the_config(tmp_path: Path) -> None:
    from transformers import AutoConfig

    model = load(make_micro_model(tmp_path / "model"))
    tensors = export_tensors(model, torch.bfloat16)
    write_model_files(tmp_path / "out", tensors, export_side_files(model, torch.bfloat16))
    assert {t.dtype for t in tensors} == {"BF16"}
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert np.abs(logprobs(load(tmp_path / "out")) - logprobs(model)).max() < 0.02


def test_model_that_ignores_positions_refuses_packing(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    small = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    config = AutoConfig.for_model("mamba", **small)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert np.isfinite(logprobs(model)).all()
    with pytest.raises(ConfigError, match="packing=false"):
        check_packing(model)


# --- value heads ----------------------------------------------------------------------------------


def make_value_model(folder: Path) -> LoadedModel:
    """With a head that is not 0."""
    model = load_model(str(folder), setting="test", device=CPU, head="value")
    assert model.value_head is not None
    with torch.no_grad():
        model.value_head.weight.copy_(torch.linspace(-3, 3, 16))
    return model


def write(model: LoadedModel, folder: Path) -> Path:
    tensors = export_tensors(model, torch.float32)
    write_model_files(folder, tensors, export_side_files(model, torch.float32))
    return folder


def values(model: LoadedModel, **changes: Any) -> np.ndarray[Any, Any]:
    chunk = contract_chunk((9, 4, 6, 2, 3))
    return make_policy(model, **changes).forward(chunk, ("values",)).outputs["values"]


def test_values_are_read_from_the_states_that_the_output_head_sees(folder: Path) -> None:
    """Soft caps and scales of logits do not touch them."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    plain.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    chunk = contract_chunk((9, 4, 6, 2, 3))
    found = values(make_value_model(folder))
    for start, end in zip(chunk.offsets[:-1], chunk.offsets[1:], strict=True):
        plain(torch.from_numpy(chunk.token_ids[start:end].astype(np.int64))[None])
        expected = (seen[-1][0, :-1] @ torch.linspace(-3, 3, 16)).detach().numpy()
        np.testing.assert_allclose(found[start + 1 : end], expected, atol=1e-5)
    assert np.abs(found).max() > 2.0  # where gemma2's cap of logits would end


def test_packed_values_equal_padded_ones(folder: Path) -> None:
    """FR-092, FR-094"""
    model = make_value_model(folder)
    check_packing(model)
    np.testing.assert_allclose(values(model, packing=True), values(model), atol=1e-5)


def test_value_folder_loads_bit_by_bit_and_its_backbone_with_transformers(
    folder: Path, tmp_path: Path
) -> None:
    """FR-137: the head is in a file of its own, so nothing is missing or unexpected."""
    from transformers import AutoModel

    model = make_value_model(folder)
    write(model, tmp_path)
    again = load_model(str(tmp_path), setting="test", device=CPU, head="value")
    np.testing.assert_array_equal(values(again), values(model))
    _, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    write(again, tmp_path / "again")
    for name in ("config.json", "value_head.safetensors", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_score_of_a_row_is_the_value_at_a_token_appended_to_it(
    folder: Path, tmp_path: Path
) -> None:
    model = load_value_model(str(write(make_value_model(folder), tmp_path)))
    rows = [np.array(ids, np.int32) for ids in ([3, 4, 5], [6], [7, 3, 3, 4, 5, 6, 7], [4, 4])]
    chunk = RowChunk.from_rows([np.append(row, 0).astype(np.int32) for row in rows])
    expected = make_policy(model).forward(chunk, ("values",)).outputs["values"]
    for max_tokens in (1, 8, 100):
        found = row_values(model, rows, max_tokens=max_tokens)
        np.testing.assert_allclose(found, expected[chunk.offsets[1:] - 1], atol=1e-5)
    assert row_values(model, []).shape == (0,)


def test_rows_that_cannot_be_scored_are_refused(tmp_path: Path) -> None:
    model = make_value_model(make_folder(tmp_path, "llama"))
    for row in (np.zeros(0, np.int32), np.zeros(33, np.int32)):
        with pytest.raises(InvariantError, match=f"1 to 32 tokens, got {len(row)} to {len(row)}"):
            row_values(model, [row])
    assert len(row_values(model, [np.zeros(32, np.int32)])) == 1


def test_folder_of_the_other_head_is_named(tmp_path: Path) -> None:
    plain = make_folder(tmp_path / "plain", "llama")
    value = write(make_value_model(plain), tmp_path / "value")
    with pytest.raises(ConfigError, match=r"value policy.*output head"):
        load(value)
    with pytest.raises(ConfigError, match=r"no value head.*nexrl_head"):
        load_value_model(str(plain))
    (value / "value_head.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"value_head\.safetensors"):
        load_value_model(str(value))


def test_bfloat16_export_keeps_the_value_head_in_float32(tmp_path: Path) -> None:
    model = make_value_model(make_folder(tmp_path, "qwen3"))
    dtypes = {t.name: t.dtype for t in export_tensors(model, torch.bfloat16)}
    assert dtypes.pop("value_head.weight") == "F32"
    assert set(dtypes.values()) == {"BF16"}


# --- what is refused ------------------------------------------------------------------------------


def test_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(tmp_path / "nothing")


@pytest.mark.parametrize("damage", ["missing tensor", "wrong shape", "cut file"])
def test_weights_that_do_not_fit_are_refused(damage: str, tmp_path: Path) -> None:
    """transformers itself would go on with random numbers."""
    from safetensors.numpy import load_file, save_file

    folder = make_micro_model(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if damage == "missing tensor":
        del tensors["model.norm.weight"]
    if damage == "wrong shape":
        tensors["model.norm.weight"] = np.ones(7, np.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    if damage == "cut file":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="test: "):
        load(folder)
