"""A checkpoint appears only when it is whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nexrl.checkpoint import (
    CHECKPOINT_SCHEMA,
    CheckpointManifest,
    CheckpointStore,
    config_differences,
    read_manifest,
    read_state,
)
from nexrl.errors import InvariantError, ServiceError
from nexrl.testing.instant_train import InstantTrain
from nexrl.types import ModelSpec


def make_manifest(step: int = 1, **changes: object) -> CheckpointManifest:
    manifest = CheckpointManifest(
        schema=CHECKPOINT_SCHEMA,
        stage="main",
        stage_index=0,
        stage_step=step,
        global_step=step,
        stage_done=False,
        version=f"actor@0.{step}",
        fingerprint="f",
        config={},
        code_version={},
    )
    return dataclasses.replace(manifest, **changes)  # type: ignore[arg-type]


async def make_train() -> InstantTrain:
    train = InstantTrain()
    await train.create(ModelSpec(path="any"))
    return train


class RefusingTrain(InstantTrain):
    """A train service whose disk is full."""

    async def save_state(self, policy: str, path: str) -> None:
        raise ServiceError("no space left on device")


async def test_state_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    folder = await store.save(make_manifest(7), {"loader": {"next": 3}}, await make_train())
    assert read_manifest(folder) == make_manifest(7)
    assert read_state(folder)["loader"] == {"next": 3}


async def test_a_save_that_fails_leaves_nothing_visible(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    train = RefusingTrain()
    with pytest.raises(ServiceError, match="no space"):
        await store.save(make_manifest(), {}, train)
    assert store.latest() is None


async def test_only_the_newest_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    train = await make_train()
    for step in (5, 9, 10, 11):
        await store.save(make_manifest(step), {}, train)
    assert [read_manifest(p).global_step for p in store.list()] == [10, 11]
    latest = store.latest()
    assert latest is not None
    assert latest[1].global_step == 11


async def test_a_newer_layout_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    folder = await store.save(make_manifest(schema=99), {}, await make_train())
    with pytest.raises(InvariantError, match="schema 99"):
        read_manifest(folder)


def test_changed_settings_are_listed_by_key() -> None:
    old = {"a": {"b": 1, "c": 2}, "d": 3}
    assert config_differences(old, {"a": {"b": 1, "c": 5}}) == ["a.c: 2 -> 5", "d: 3 -> None"]
