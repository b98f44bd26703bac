"""manifest.json of a publication: what was published, and what every tensor must hash to.

Written by the train service, read by the weight-sync controller and by engines. Numpy only, so
that any of them can check bytes without loading torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nexrl.errors import InvariantError
from nexrl.types import Array, PolicyVersion, TensorInfo, WeightManifest
from nexrl.wire import from_plain, to_plain

MANIFEST_FILE = "manifest.json"
_DIGEST_BYTES = 16


def tensor_checksum(data: bytes | memoryview | Array) -> str:
    """blake2b-128 of a tensor's little-endian, C-ordered bytes, in hex.

    The hash of a large tensor runs without the interpreter lock, so threads help.
    """
    if isinstance(data, np.ndarray):
        if data.dtype.byteorder == ">":
            data = data.astype(data.dtype.newbyteorder("<"))
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def make_manifest(
    version: PolicyVersion,
    folder: Path,
    tensors: Sequence[TensorInfo],
    *,
    num_bytes: int,
    unchanged: bool = False,
) -> WeightManifest:
    """A manifest with its tensors in name order."""
    return WeightManifest(
        version=version,
        path=str(folder),
        tensors=tuple(sorted(tensors, key=lambda t: t.name)),
        num_bytes=num_bytes,
        unchanged=unchanged,
    )


def write_manifest(manifest: WeightManifest, folder: Path) -> None:
    """Write manifest.json into a folder; the combined checksum stands beside the fields."""
    body = {**to_plain(manifest), "checksum": manifest.checksum}
    (folder / MANIFEST_FILE).write_text(json.dumps(body, indent=1), encoding="utf-8")


def read_manifest(path: str | Path) -> WeightManifest:
    """The manifest of a publication folder; its `path` is the folder as it lies now.

    Raises InvariantError when the file is missing, not readable or does not match its checksum.
    """
    file = Path(path) / MANIFEST_FILE
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        stated = body.pop("checksum")
        manifest = from_plain(WeightManifest, body)
        tensors = tuple(replace(t, shape=tuple(t.shape)) for t in manifest.tensors)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvariantError(f"{file}: not a readable weight manifest: {error!r}") from error
    manifest = replace(manifest, path=str(path), tensors=tensors)
    if manifest.checksum != stated:
        raise InvariantError(
            f"{file}: its tensors hash to {manifest.checksum}, but it states {stated}"
        )
    return manifest
