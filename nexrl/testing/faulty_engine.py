"""An inference engine for weight-sync tests: the bigram table of ToyTrainService, and its faults.

Without a fault it keeps the EngineControl contract. With one it does what broken engines do in the
field: answers 500, hangs, acknowledges a load that did nothing, loads wrong tensors, names another
version, or serves logprobs from a cache that outlived the weights.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Literal

import numpy as np

from nexrl.errors import InvariantError, ServiceError
from nexrl.testing.fake_train import Table
from nexrl.testing.toy_train_service import bigram_logprobs
from nexrl.types import (
    DEFAULT_POLICY,
    EngineInfo,
    FloatArray,
    LoadAck,
    PauseMode,
    PolicyVersion,
    RowChunk,
    WeightManifest,
)
from nexrl.weight_manifest import tensor_checksum


class Fault(StrEnum):
    """What goes wrong."""

    ERROR = "error"
    """The phase answers 500."""
    HANG = "hang"
    """The phase never answers."""
    LOAD_NOTHING = "load_nothing"
    """A load is acknowledged and the old weights stay."""
    WRONG_TENSORS = "wrong_tensors"
    """The right bytes land in the wrong rows."""
    WRONG_VERSION = "wrong_version"
    """A load is acknowledged under another version."""
    NOT_IDEMPOTENT = "not_idempotent"
    """Loading adds to what is there, as a loader does that processes processed weights."""
    STALE_CACHE = "stale_cache"
    """Logprobs come from a cache by tokens alone, filled under older weights."""


Phase = Literal["info", "pause", "load", "score", "activate", "resume"]
Echo = Literal["truth", "parrot", "none"]


class FaultyEngine:
    """One replica of one policy; set `fault` (and `phase` for ERROR and HANG) at any time.

    Invariant without a fault: a version is active only after it was loaded, and tokens are drawn
    only while not paused.
    """

    def __init__(self, name: str = "toy", *, echo: Echo = "truth") -> None:
        self.name = name
        self.echo = echo
        self.fault: Fault | None = None
        self.phase: Phase = "load"
        self.table: Table | None = None
        self.active: PolicyVersion | None = None
        self.paused = False
        self.loads: list[PolicyVersion] = []
        self.calls: list[str] = []
        self._loaded: PolicyVersion | None = None
        self._cache: dict[bytes, FloatArray] = {}

    async def info(self) -> EngineInfo:
        """Name and active version."""
        await self._enter("info")
        versions = {self.active.policy: self.active} if self.active else {}
        return EngineInfo(name=self.name, build="1", model="toy", versions=versions)

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing."""
        await self._enter("pause")
        self.paused = True

    async def resume(self) -> None:
        """Draw again."""
        await self._enter("resume")
        self.paused = False

    async def load_weights(self, manifest: WeightManifest) -> LoadAck:
        """Read the published table; hash what is held, as far as the engine is honest."""
        await self._enter("load")
        self.loads.append(manifest.version)
        self._loaded = manifest.version
        if self.fault is not Fault.LOAD_NOTHING or self.table is None:
            self._take(_read_table(Path(manifest.path)))
        version = manifest.version
        if self.fault is Fault.WRONG_VERSION:
            version = PolicyVersion(policy=version.policy, number=version.number + 7)
        return LoadAck(version=version, checksum=self._checksum(manifest))

    async def activate(self, version: PolicyVersion) -> None:
        """Serve under this version; refused unless it was loaded last."""
        await self._enter("activate")
        if version != self._loaded:
            raise InvariantError(f"{version} was not loaded last, {self._loaded} was")
        self.active = version

    async def score(self, chunk: RowChunk, *, policy: str = DEFAULT_POLICY) -> FloatArray:
        """Logprobs of the table held, or of the cache."""
        await self._enter("score")
        assert self.table is not None
        key = chunk.token_ids.tobytes()
        if self.fault is Fault.STALE_CACHE and key in self._cache:
            return self._cache[key]
        self._cache[key] = bigram_logprobs(self.table, chunk)
        return self._cache[key]

    async def _enter(self, phase: Phase) -> None:
        self.calls.append(phase)
        if phase != self.phase:
            return
        if self.fault is Fault.ERROR:
            raise ServiceError(f"CUDA out of memory during {phase}", status=500)
        if self.fault is Fault.HANG:
            await asyncio.Event().wait()

    def _take(self, table: Table) -> None:
        if self.fault is Fault.WRONG_TENSORS:
            table = np.roll(table, 1, axis=0)
        if self.fault is Fault.NOT_IDEMPOTENT and self.table is not None:
            table = table + 0.5 * self.table
        self.table = table

    def _checksum(self, manifest: WeightManifest) -> str:
        if self.echo == "none":
            return ""
        assert self.table is not None
        held = tensor_checksum(self.table.astype(np.float32))
        if self.echo == "parrot" or held == manifest.tensors[0].checksum:
            return manifest.checksum
        return f"of {held}"


def _read_table(folder: Path) -> Table:
    from safetensors.numpy import load_file

    table: Table = load_file(folder / "model.safetensors")["table"].astype(np.float64)
    return table
