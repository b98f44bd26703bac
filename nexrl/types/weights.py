"""Published weights, and what engines say of themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nexrl.types.versions import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a publication."""

    name: str
    """Hugging Face parameter name."""
    shape: tuple[int, ...]
    """Shape."""
    dtype: str
    """safetensors dtype name, for example F32 or BF16."""
    checksum: str
    """blake2b-128 of the little-endian bytes, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """A publication: where the weights of one version lie and what they must hash to."""

    version: PolicyVersion
    """What was published."""
    path: str
    """Folder with the safetensors files and manifest.json; a Hugging Face model folder."""
    tensors: tuple[TensorInfo, ...]
    """Every tensor, sorted by name."""
    num_bytes: int
    """Sum of tensor sizes."""
    unchanged: bool = False
    """True when the batch's optimizer steps were all skipped."""

    @property
    def checksum(self) -> str:
        """blake2b-128 over names, dtypes, shapes and checksums; equal exactly for equal weights."""
        digest = hashlib.blake2b(digest_size=16)
        for t in self.tensors:
            digest.update(f"{t.name}|{t.dtype}|{t.shape}|{t.checksum}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAck:
    """An engine's acknowledgement of a load."""

    version: PolicyVersion
    """Version it loaded."""
    checksum: str
    """Manifest checksum recomputed from what the engine really holds; "" when it cannot."""


PauseMode = Literal["keep", "recompute", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an inference engine says of itself."""

    name: str
    """builtin, vllm, sglang ..."""
    build: str
    """Version of the engine."""
    model: str
    """Served model name."""
    versions: Mapping[str, PolicyVersion]
    """Active version by policy."""
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    """token_ids, logprobs, version_stamps, checksum_echo, pause, deterministic ..."""
    max_context: int = 0
    """Longest prompt plus completion in tokens; 0 when unknown."""
    healthy: bool = True
    """False when it must not get traffic."""
