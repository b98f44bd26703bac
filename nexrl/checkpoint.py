"""Checkpoints: one folder holds everything a run needs to go on, and appears only when complete.

    checkpoints/step-00000120/
        train/<policy>/     weights, optimizer, RNG (written by the train service)
        state.msgpack       loader cursor, pool, trainer, counters
        manifest.json       stage, step, version, configuration, data fingerprint, code version

The folder is written under a temporary name and renamed last, so what is visible is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nexrl.atomic import atomic_folder
from nexrl.errors import ConfigError, InvariantError
from nexrl.services.train.protocol import TrainService
from nexrl.types import ModelSpec, PolicyVersion
from nexrl.wire import pack, unpack

CHECKPOINT_SCHEMA = 1
_PREFIX = "step-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """What a checkpoint is of; readable without loading anything heavy."""

    schema: int
    """Layout of the folder."""
    stage: str
    """Name of the stage."""
    stage_index: int
    """Position of the stage, from 0."""
    stage_step: int
    """Batches trained in this stage."""
    global_step: int
    """Batches trained in the run."""
    stage_done: bool
    """The stage has reached its end; a resume starts the next one."""
    version: str
    """Policy version after that batch, `policy@incarnation.number`."""
    fingerprint: str
    """Identity of the stage's data set."""
    config: Mapping[str, Any]
    """Resolved configuration, secrets redacted."""
    code_version: Mapping[str, Any]
    """Commit and package versions."""

    @property
    def policy_version(self) -> PolicyVersion:
        """`version`, parsed."""
        return PolicyVersion.parse(self.version)


class CheckpointStore:
    """The checkpoints of one run. Invariant: every visible folder is complete."""

    def __init__(self, folder: Path, *, keep_last: int) -> None:
        self.folder = folder
        self._keep_last = keep_last

    async def save(
        self,
        manifest: CheckpointManifest,
        state: Mapping[str, Any],
        train: TrainService,
        *,
        further_policies: Sequence[ModelSpec] = (),
    ) -> Path:
        """Write a checkpoint and drop the oldest beyond `keep_last`; returns its folder."""
        target = self.folder / f"{_PREFIX}{manifest.global_step:08d}-{manifest.stage_index}"
        with atomic_folder(target, durable=True) as draft:
            further = (spec.policy for spec in further_policies)
            for policy in (manifest.policy_version.policy, *further):
                await train.save_state(policy, train_folder(draft, policy))
            (draft / "state.msgpack").write_bytes(pack(state))
            (draft / "manifest.json").write_text(json.dumps(asdict(manifest), indent=1))
        for old in self.list()[: -self._keep_last]:
            shutil.rmtree(old)
        return target

    def list(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p.parent for p in self.folder.glob(f"{_PREFIX}*/manifest.json"))

    def latest(self) -> tuple[Path, CheckpointManifest] | None:
        """The newest complete checkpoint, or None."""
        folders = self.list()
        if not folders:
            return None
        return folders[-1], read_manifest(folders[-1])


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint folder; refuses a newer layout."""
    raw = json.loads((folder / "manifest.json").read_text())
    if raw.get("schema") != CHECKPOINT_SCHEMA:
        raise InvariantError(
            f"{folder}: checkpoint schema {raw.get('schema')!r}, this version reads {CHECKPOINT_SCHEMA}"
        )
    return CheckpointManifest(**raw)


def read_state(folder: Path) -> dict[str, Any]:
    """Loader, pool, trainer and counter state of a checkpoint folder."""
    state: dict[str, Any] = unpack((folder / "state.msgpack").read_bytes())
    return state


def train_folder(folder: Path, policy: str) -> str:
    """What the train service wrote for one policy."""
    return str((folder / "train" / policy).absolute())


async def load_policies(folder: Path, train: TrainService, specs: Sequence[ModelSpec]) -> None:
    """Host policies as the checkpoint holds them; those that are trained with their optimizers.

    ConfigError when it does not hold one, which this configuration asks for and the one before the
    resume did not.
    """
    for spec in specs:
        _require_policy(folder, spec.policy)
        await train.create(spec)
        path = train_folder(folder, spec.policy)
        await train.load_state(spec.policy, path, with_optimizer=spec.trainable)


def _require_policy(folder: Path, policy: str) -> None:
    held = sorted(p.name for p in (folder / "train").iterdir())
    if policy not in held:
        raise ConfigError(
            f"resume: the checkpoint {folder} holds no policy {policy!r} (it holds: "
            f"{', '.join(held)}): a reference or a critic that was not there cannot be added on the "
            "way (accepted: trainer.algorithm as it was, or a new run)"
        )


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """`key: old -> new` for every setting that differs; a resume lists them."""
    differences: list[str] = []
    for key in sorted({*old, *new}):
        where = f"{path}.{key}" if path else key
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            differences += config_differences(a, b, where)
        elif a != b:
            differences.append(f"{where}: {a!r} -> {b!r}")
    return differences
