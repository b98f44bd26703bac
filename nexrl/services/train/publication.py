"""Writes a publication: safetensors files, side files and manifest.json in one atomic folder.

Consumes named tensors as raw bytes (no torch here, so that fakes can publish too) and leaves a
Hugging Face model folder that `AutoModelForCausalLM` and any engine load.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nexrl.atomic import atomic_folder
from nexrl.types import PolicyVersion, TensorInfo, WeightManifest
from nexrl.weight_manifest import make_manifest, tensor_checksum, write_manifest

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_FILE_BYTES = 4 << 30
_HASH_THREADS = 4
_THREADS_FROM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """One tensor on its way to a file."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """safetensors dtype name, for example F32 or BF16."""
    shape: tuple[int, ...]
    """Shape."""
    data: npt.NDArray[np.uint8]
    """[bytes] little-endian, C order."""
    file: str = ""
    """A safetensors file of its own; empty: among the model's weights."""

    @classmethod
    def from_array(cls, name: str, values: npt.NDArray[np.float32]) -> NamedTensor:
        """A float32 tensor."""
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        return cls(name=name, dtype="F32", shape=values.shape, data=flat.view(np.uint8))


def publish(
    path: str | Path,
    version: PolicyVersion,
    tensors: Sequence[NamedTensor],
    side_files: Mapping[str, bytes],
    *,
    unchanged: bool = False,
) -> WeightManifest:
    """Write the folder and return its manifest.

    Not flushed to the disk: a publication is for running engines, and a resumed run makes its own.
    """
    infos = hash_tensors(tensors)
    num_bytes = sum(len(t.data) for t in tensors)
    manifest = make_manifest(version, Path(path), infos, num_bytes=num_bytes, unchanged=unchanged)
    with atomic_folder(path, durable=False) as folder:
        write_model_files(folder, tensors, side_files)
        write_manifest(manifest, folder)
    return manifest


def hash_tensors(tensors: Sequence[NamedTensor]) -> list[TensorInfo]:
    """Name, shape, dtype and checksum of each tensor; large sets are hashed in threads."""
    if sum(len(t.data) for t in tensors) < _THREADS_FROM_BYTES:
        return [_info(t) for t in tensors]
    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        return list(threads.map(_info, tensors))


def _info(tensor: NamedTensor) -> TensorInfo:
    return TensorInfo(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        checksum=tensor_checksum(tensor.data),
    )


def write_model_files(
    folder: Path,
    tensors: Sequence[NamedTensor],
    side_files: Mapping[str, bytes],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """A Hugging Face folder: config, tokenizer ... and one safetensors file, or shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in side_files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    shards = _split([t for t in tensors if not t.file], max_file_bytes)
    files = {f"model-{i:05d}-of-{len(shards):05d}.safetensors": s for i, s in enumerate(shards, 1)}
    if len(shards) == 1:
        files = {WEIGHTS_FILE: shards[0]}
    else:
        total = sum(len(t.data) for shard in shards for t in shard)
        weight_map = {t.name: name for name, shard in files.items() for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
    for tensor in tensors:
        if tensor.file:
            files.setdefault(tensor.file, []).append(tensor)
    for name, held in files.items():
        write_safetensors(folder / name, held)


def _split(tensors: Sequence[NamedTensor], max_file_bytes: int) -> list[list[NamedTensor]]:
    shards: list[list[NamedTensor]] = [[]]
    size = 0
    for tensor in sorted(tensors, key=lambda t: t.name):
        if shards[-1] and size + len(tensor.data) > max_file_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += len(tensor.data)
    return shards


def write_safetensors(file: Path, tensors: Sequence[NamedTensor]) -> None:
    """The safetensors format: length of the header, JSON header, then the bytes of all tensors.

    Written straight from the tensors' memory; the library's own writer copies everything first.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in tensors:
        end = offset + len(t.data)
        header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)))
        stream.write(encoded)
        for t in tensors:
            stream.write(t.data.data)
