"""Publications and atomic folders: whole or absent, and what the manifest says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nexrl.atomic import atomic_folder
from nexrl.errors import InvariantError
from nexrl.services.train.publication import NamedTensor, publish, write_model_files
from nexrl.testing.makers import make_version
from nexrl.weight_manifest import MANIFEST_FILE, read_manifest, tensor_checksum

SIDE_FILES = {"config.json": b"{}", "additional_chat_templates/tool.jinja": b"x"}


def make_tensors(scale: float = 1.0) -> list[NamedTensor]:
    rng = np.random.default_rng(0)
    shapes = {"b.weight": (3, 4), "a.bias": (5,), "scalar": ()}
    return [
        NamedTensor.from_array(name, (scale * rng.normal(size=shape)).astype(np.float32))
        for name, shape in shapes.items()
    ]


def test_published_tensors_are_read_by_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    publish(tmp_path / "v1", make_version(1), make_tensors(), SIDE_FILES)
    found = load_file(tmp_path / "v1" / "model.safetensors")
    for tensor in make_tensors():
        assert found[tensor.name].shape == tensor.shape
        assert found[tensor.name].tobytes() == tensor.data.tobytes()
    assert (tmp_path / "v1" / "additional_chat_templates" / "tool.jinja").read_bytes() == b"x"


def test_manifest_is_read_from_where_the_folder_lies_now(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "v1", make_version(1), make_tensors(), SIDE_FILES)
    (tmp_path / "v1").rename(tmp_path / "moved")
    moved = read_manifest(tmp_path / "moved")
    assert moved.path == str(tmp_path / "moved")
    assert (moved.checksum, moved.version) == (manifest.checksum, make_version(1))


def test_checksum_sees_one_changed_bit_of_one_tensor(tmp_path: Path) -> None:
    first = publish(tmp_path / "a", make_version(1), make_tensors(), {})
    tensors = make_tensors()
    tensors[0].data[0] ^= 1
    second = publish(tmp_path / "b", make_version(1), tensors, {})
    different = [a.name for a, b in zip(first.tensors, second.tensors, strict=True) if a != b]
    assert different == ["b.weight"]
    assert first.checksum != second.checksum


def test_checksum_of_an_array_is_that_of_its_little_endian_bytes() -> None:
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    assert tensor_checksum(values) == tensor_checksum(values.tobytes())
    assert tensor_checksum(values.astype(">f4")) == tensor_checksum(values)
    assert tensor_checksum(np.asfortranarray(values)) == tensor_checksum(values)


@pytest.mark.parametrize("damage", ["missing", "cut", "another checksum"])
def test_damaged_manifest_is_named(damage: str, tmp_path: Path) -> None:
    publish(tmp_path, make_version(1), make_tensors(), {})
    file = tmp_path / MANIFEST_FILE
    text = file.read_text()
    body = json.loads(text)
    body["tensors"][0]["checksum"] = "00"
    file.write_text({"missing": "", "cut": text[:50], "another checksum": json.dumps(body)}[damage])
    with pytest.raises(InvariantError, match=MANIFEST_FILE):
        read_manifest(tmp_path)


def test_large_models_are_split_into_indexed_files(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    write_model_files(tmp_path, make_tensors(), {}, max_file_bytes=52)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (12 + 5 + 1)
    assert len(set(index["weight_map"].values())) == 2
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)


def test_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"), atomic_folder(tmp_path / "x", durable=False):
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_killed_writer_leaves_the_previous_folder_and_the_next_one_cleans_up(
    tmp_path: Path,
) -> None:
    with atomic_folder(tmp_path / "x", durable=True) as folder:
        (folder / "a").write_text("old")
    code = (
        "import os, sys; from nexrl.atomic import atomic_folder\n"
        f"with atomic_folder({str(tmp_path / 'x')!r}, durable=True) as folder:\n"
        "    (folder / 'a').write_text('half'); os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "x" / "a").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
    with atomic_folder(tmp_path / "x", durable=True) as folder:
        (folder / "a").write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "a").read_text() == "new"
