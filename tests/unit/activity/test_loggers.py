"""TensorBoard and wandb: what they are given arrives, offline, with secrets redacted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nexrl.activity.loggers import TensorBoardLogger, WandbLogger
from nexrl.errors import ConfigError


def make_wandb(folder: Path) -> WandbLogger:
    config = {"seed": 3, "service": {"api_key": "sk-very-secret"}}
    return WandbLogger(folder, project="p", name="run", config=config)


def test_scalars_reach_the_event_file(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log("step", 3, {"reward/mean": 0.5})
    logger.close()
    [file] = tmp_path.glob("events.out.tfevents.*")
    assert b"reward/mean" in file.read_bytes()


def test_a_resumed_event_file_purges_what_came_after(tmp_path: Path) -> None:
    TensorBoardLogger(tmp_path).close()
    logger = TensorBoardLogger(tmp_path, resumed_step=100)
    logger.log("step", 101, {"x": 1.0})
    logger.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) >= 1


@pytest.mark.parametrize(
    ("package", "make"),
    [("tensorboardX", TensorBoardLogger), ("wandb", make_wandb)],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    package: str, make: type[TensorBoardLogger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}, which is not installed.*nexrl\[loggers\]"):
        make(tmp_path)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path / "wandb"


def test_an_offline_wandb_run_holds_the_metrics_and_no_secret(offline: Path) -> None:
    logger = make_wandb(offline)
    logger.log("step", 8073, {"reward/mean": 0.5})
    logger.log("validation", 2, {"validation/accuracy": 0.75})
    logger.close()
    logger.close()
    [file] = offline.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"axis/validation" in content
    assert b"validation/accuracy" in content
    everything = b"".join(f.read_bytes() for f in offline.rglob("*") if f.is_file())
    assert b"sk-very-secret" not in everything


def test_a_resumed_run_keeps_its_wandb_id(offline: Path) -> None:
    make_wandb(offline).close()
    first = (offline / "wandb_run_id.txt").read_text()
    make_wandb(offline).close()
    assert (offline / "wandb_run_id.txt").read_text() == first
    assert len({f.name for f in offline.rglob("*.wandb")}) == 1
