"""A publication into the live model, and the checksum of what the model then really holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nexrl.errors import WeightSyncError
from nexrl.types import WeightManifest
from nexrl.weight_manifest import tensor_checksum

_MOST_NAMED = 8
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}


def plan_load(model: Any, manifest: WeightManifest) -> Mapping[str, Path]:
    """The file of each tensor of a publication, once every tensor is mapped.

    Missing and unexpected names and other shapes are refused with lists of them, before anything
    is written (FR-109). A tied tensor may come under any of its names, and under all of them only
    if they agree.
    """
    held: Mapping[str, torch.Tensor] = model.state_dict()
    files = _tensor_files(Path(manifest.path))
    published = {t.name: t for t in manifest.tensors}
    aliases: dict[int, list[str]] = {}
    for name, tensor in held.items():
        aliases.setdefault(tensor.data_ptr(), []).append(name)
    problems = {
        "missing": [names[0] for names in aliases.values() if published.keys().isdisjoint(names)],
        "unexpected": [name for name in published if name not in held],
        "of another shape": [
            f"{name} {list(t.shape)} (engine {list(held[name].shape)})"
            for name, t in published.items()
            if name in held and tuple(t.shape) != tuple(held[name].shape)
        ],
        "tied in the engine but different in the publication": [
            " and ".join(names)
            for names in aliases.values()
            if len({published[n].checksum for n in names if n in published}) > 1
        ],
        "in the manifest but in no file": [name for name in published if name not in files],
        "in a file but not in the manifest": [name for name in files if name not in published],
    }
    text = "; ".join(
        f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names
    )
    if text:
        raise WeightSyncError(
            f"publication {manifest.version} does not fit the engine's model: {text}"
        )
    return files


def load(model: Any, files: Mapping[str, Path]) -> None:
    """Copy every tensor of the plan into the model; tied tensors change together."""
    from safetensors import safe_open

    held: dict[str, torch.Tensor] = model.state_dict()
    with torch.no_grad():
        for path in sorted(set(files.values())):
            with safe_open(path, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - a reader is not a mapping
                    held[name].copy_(reader.get_tensor(name))


def held_checksum(model: Any, manifest: WeightManifest) -> str:
    """The manifest's checksum recomputed from the model's own tensors.

    Empty when the model computes in another dtype than was published: then the bytes differ.
    """
    held: dict[str, torch.Tensor] = model.state_dict()
    tensors = []
    for info in manifest.tensors:
        tensor = held[info.name].detach()
        if _DTYPE_NAMES.get(tensor.dtype) != info.dtype:
            return ""
        raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        tensors.append(replace(info, shape=tuple(tensor.shape), checksum=tensor_checksum(raw)))
    return replace(manifest, tensors=tuple(tensors)).checksum


def _tensor_files(folder: Path) -> Mapping[str, Path]:
    """Which safetensors file of the folder holds each tensor."""
    from safetensors import SafetensorError, safe_open

    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as reader:
                files.update(dict.fromkeys(reader.keys(), path))
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"publication {path}: cannot be read: {error}") from error
    if not files:
        raise WeightSyncError(f"publication {folder}: no safetensors file with tensors in it")
    return files


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown}, ..."
