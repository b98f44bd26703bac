"""RunFolder: unique, held by one process, found again, without secrets."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from nexrl.errors import ConfigError
from nexrl.report.run_folder import RunFolder, find_latest

NOON = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)


@pytest.fixture
def make_folder(tmp_path: Path) -> Iterator[Callable[..., RunFolder]]:
    """New run folders of experiment `exp`, closed at the end."""
    with ExitStack() as opened:
        yield lambda now=NOON: opened.enter_context(
            closing(RunFolder.create(tmp_path, "exp", now=now))
        )


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(
    make_folder: Callable[..., RunFolder],
) -> None:
    names = [make_folder().path.name for _ in range(3)]
    assert names == ["20260504-120000", "20260504-120000-2", "20260504-120000-3"]


def test_latest_is_the_newest_by_name_and_number(
    tmp_path: Path, make_folder: Callable[..., RunFolder]
) -> None:
    assert find_latest(tmp_path, "exp") is None
    folders = [make_folder() for _ in range(11)]
    (tmp_path / "exp" / "notes").mkdir()
    assert find_latest(tmp_path, "exp") == folders[-1].path
    newer = make_folder(now=NOON.replace(second=1))
    assert find_latest(tmp_path, "exp") == newer.path


def test_a_second_holder_is_refused_and_told_who_has_it(
    make_folder: Callable[..., RunFolder],
) -> None:
    folder = make_folder()
    folder.write_origin({})
    with pytest.raises(ConfigError, match=r"is in use by process \d+; only one can write it"):
        RunFolder.open(folder.path)
    folder.close()
    RunFolder.open(folder.path).close()


def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    code = (
        "import os, sys; from nexrl.report.run_folder import RunFolder;"
        "f = RunFolder.create(sys.argv[1], 'exp'); f.config.touch(); print(f.path, flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9
    RunFolder.open(done.stdout.strip()).close()


def test_resuming_a_folder_that_is_absent_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume: .*nowhere is not a run folder"):
        RunFolder.open(tmp_path / "nowhere")


def test_a_root_that_cannot_be_written_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"launch\.run_root .*file/runs.*Not a directory"):
        RunFolder.create(tmp_path / "file" / "runs", "exp")


def test_the_configuration_is_written_without_secrets_and_the_code_version_beside(
    make_folder: Callable[..., RunFolder],
) -> None:
    folder = make_folder()
    folder.write_origin(
        {"seed": 1, "api_key": "sk-1234", "note": "uses qq77zz"}, secrets=["qq77zz"]
    )
    written = yaml.safe_load(folder.config.read_text())
    assert written == {"seed": 1, "api_key": "***", "note": "uses ***"}
    version = json.loads((folder.path / "code_version.json").read_text())
    assert set(version) == {"git_commit", "git_dirty", "packages", "python", "platform"}
    assert version["packages"]["numpy"]


def test_a_resume_keeps_the_first_configuration(make_folder: Callable[..., RunFolder]) -> None:
    folder = make_folder()
    folder.write_origin({"seed": 1})
    folder.write_origin({"seed": 2})
    assert yaml.safe_load(folder.config.read_text()) == {"seed": 1}
    assert yaml.safe_load((folder.path / "config.1.yaml").read_text()) == {"seed": 2}
    assert (folder.path / "code_version.1.json").exists()


def test_the_log_goes_to_the_folder_until_it_is_closed(
    make_folder: Callable[..., RunFolder],
) -> None:
    folder = make_folder()
    path = folder.open_log()
    logging.getLogger("nexrl").info("first")
    folder.close()
    logging.getLogger("nexrl").info("second")
    assert path == folder.logs / "controller.log"
    assert path.read_text().endswith("INFO nexrl first\n")
    assert logging.getLogger("nexrl").propagate
