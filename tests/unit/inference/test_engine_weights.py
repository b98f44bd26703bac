"""Publications into the live engine: every tensor mapped, tied heads, honest checksums."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nexrl.errors import WeightSyncError
from nexrl.services.inference.engines.builtin.service import BuiltinInference
from nexrl.testing.contracts.inference import V1, publish_model
from nexrl.testing.tiny_models import make_micro_model
from nexrl.types import PolicyVersion, RowChunk, WeightManifest

MakeEngine = Callable[..., BuiltinInference]
Edit = Callable[[dict[str, Any]], dict[str, Any]]
CHUNK = RowChunk.from_rows([np.array([3, 4, 5, 6, 7], np.int32)])


def publish(tmp_path: Path, *, edit: Edit = dict, seed: int = 5) -> WeightManifest:
    model = make_micro_model(tmp_path / f"source{seed}", seed=seed)
    path = model / "model.safetensors"
    save_file(edit(load_file(path)), path)
    return publish_model(model, tmp_path / f"publication{seed}", V1)


async def load(inference: BuiltinInference, manifest: WeightManifest) -> str:
    await inference.pause("keep")
    return (await inference.load_weights(manifest)).checksum


async def test_the_checksum_is_of_what_the_engine_really_holds(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    inference = make_engine()
    manifest = publish(tmp_path)
    assert await load(inference, manifest) == manifest.checksum


async def test_a_tensor_that_differs_from_its_manifest_shows_in_the_checksum(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """A wrong file under a right manifest is caught by the echo."""
    inference = make_engine()
    right, wrong = publish(tmp_path, seed=5), publish(tmp_path, seed=6)
    assert await load(inference, replace(right, path=wrong.path)) == wrong.checksum


async def test_loaded_weights_answer_like_a_fresh_engine(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """FR-106, FR-110: nothing of the old weights is left, nothing is processed twice."""
    manifest = publish(tmp_path)
    inference = make_engine()
    await load(inference, manifest)
    fresh = make_engine(tmp_path / "source5")
    assert np.array_equal(await inference.score(CHUNK), await fresh.score(CHUNK))


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            lambda t: {f"model.{name}": v for name, v in t.items()},
            r"21 missing: .*21 unexpected: .*model\.model\.",
        ),
        (
            lambda t: {n: v for n, v in t.items() if "norm" not in n},
            r"5 missing: model\.layers\.0\.input_layernorm",
        ),
        (
            lambda t: t | {"model.norm.weight": np.ones(31, np.float32)},
            r"1 of another shape: model\.norm\.weight \[31\] \(engine \[32\]\)",
        ),
    ],
    ids=["wrapper_prefix", "missing", "shape"],
)
async def test_a_publication_that_does_not_fit_is_refused_with_lists_and_writes_nothing(
    make_engine: MakeEngine, tmp_path: Path, edit: Edit, text: str
) -> None:
    """FR-109"""
    inference = make_engine()
    before = await inference.score(CHUNK)
    with pytest.raises(WeightSyncError, match=text):
        await load(inference, publish(tmp_path, edit=edit))
    assert np.array_equal(await inference.score(CHUNK), before)
    await inference.resume()


async def test_files_and_manifest_must_list_the_same_tensors(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    inference = make_engine()
    manifest = publish(tmp_path)
    path = Path(manifest.path) / "model.safetensors"
    tensors = load_file(path)
    tensors["surplus"] = tensors.pop("lm_head.weight")
    save_file(tensors, path)
    with pytest.raises(WeightSyncError, match=r"in no file: lm_head.*not in the manifest: surplus"):
        await load(inference, manifest)


async def test_a_publication_that_is_not_there_or_damaged_is_named(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    inference = make_engine()
    manifest = publish(tmp_path)
    with pytest.raises(WeightSyncError, match="nowhere"):
        await load(inference, replace(manifest, path=str(tmp_path / "nowhere")))
    (Path(manifest.path) / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(WeightSyncError, match=r"model\.safetensors"):
        await load(inference, manifest)


async def test_a_tied_head_follows_its_embedding(
    micro_model: Path, tmp_path: Path, make_engine: MakeEngine
) -> None:
    """An engine that keeps the old head after a reload is the classic silent fault."""
    model = make_micro_model(tmp_path / "tied", seed=1)
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    path = model / "model.safetensors"
    save_file({n: v for n, v in load_file(path).items() if n != "lm_head.weight"}, path)
    without_head = publish(
        tmp_path, edit=lambda t: {n: v for n, v in t.items() if n != "lm_head.weight"}
    )
    inference = make_engine(model)
    assert await load(inference, without_head) == without_head.checksum
    held = inference._runner.model
    expected = load_file(Path(without_head.path) / "model.safetensors")["model.embed_tokens.weight"]
    assert np.array_equal(held.lm_head.weight.numpy(), expected)
    with pytest.raises(WeightSyncError, match=r"tied.*lm_head"):
        await load(inference, publish(tmp_path, seed=8))


async def test_an_engine_of_another_dtype_gives_no_checksum_and_says_so(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    inference = make_engine(dtype="bfloat16")
    assert (await inference.info()).capabilities["checksum_echo"] is False
    assert await load(inference, publish(tmp_path)) == ""


async def test_a_load_into_a_running_engine_is_refused(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    inference = make_engine()
    with pytest.raises(WeightSyncError, match="pause the engine first"):
        await inference.load_weights(publish(tmp_path))


async def test_weights_of_another_policy_are_refused(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    inference = make_engine()
    foreign = replace(publish(tmp_path), version=PolicyVersion(policy="critic", number=1))
    with pytest.raises(WeightSyncError, match="hosts policy 'actor'"):
        await load(inference, foreign)
