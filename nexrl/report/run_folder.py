"""RunFolder: where everything of a run lies, and the lock that gives it to one process.

<root>/<experiment>/<YYYYmmdd-HHMMSS[-n]>/
    config.yaml        the resolved configuration, secrets redacted
    code_version.json  commit, packages, Python, platform
    metrics.jsonl, tensorboard/, wandb/, store.sqlite, checkpoints/, publications/, dumps/, logs/
    summary.json, report.html, curve.png
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import yaml

from nexrl.atomic import write_json
from nexrl.config.redact import redact
from nexrl.errors import ConfigError

PACKAGES = (
    *("nexrl", "aiohttp", "msgpack", "numpy", "pydantic"),
    *("safetensors", "tokenizers", "torch", "transformers"),
)
"""Packages whose versions decide what a run computes."""
_GIT_DEADLINE_S = 5.0
_NAME = re.compile(r"^(\d{8}-\d{6})(?:-(\d+))?$")


def find_latest(root: str | Path, experiment: str) -> Path | None:
    """The newest run folder of an experiment, or None."""
    parent = Path(root) / experiment
    if not parent.is_dir():
        return None
    runs = [
        ((match[1], int(match[2] or 1)), path)
        for path in parent.iterdir()
        if path.is_dir() and (match := _NAME.match(path.name))
    ]
    return max(runs)[1] if runs else None


class RunFolder:
    """A run folder that this process holds.

    Invariant: between `create` or `open` and `close` no other process holds the same folder; the
    system frees the lock when the process dies, however it dies.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb"
        self.store = path / "store.sqlite"
        self.checkpoints = path / "checkpoints"
        self.publications = path / "publications"
        self.dumps = path / "dumps"
        self.logs = path / "logs"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self._log_handler: logging.Handler | None = None
        self._lock = _take_lock(path)
        for folder in (self.logs, self.checkpoints, self.publications):
            folder.mkdir(exist_ok=True)

    @classmethod
    def create(cls, root: str | Path, experiment: str, *, now: datetime | None = None) -> RunFolder:
        """A new folder named by the time of day; `-2`, `-3` ... when that second is taken."""
        stamp = (now or datetime.now().astimezone()).strftime("%Y%m%d-%H%M%S")
        parent = Path(root).resolve() / experiment
        number = 1
        try:
            parent.mkdir(parents=True, exist_ok=True)
            while True:
                path = parent / (stamp if number == 1 else f"{stamp}-{number}")
                try:
                    path.mkdir()
                except FileExistsError:
                    number += 1
                else:
                    return cls(path)
        except OSError as error:
            raise ConfigError(
                f"launch.run_root {str(root)!r}: cannot make a run folder in {parent}: "
                f"{error.strerror} (accepted: a folder that can be written)"
            ) from error

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing folder, to resume it; ConfigError when it is absent or in use."""
        folder = Path(path).resolve()
        if not (folder / "config.yaml").is_file():
            raise ConfigError(
                f"resume: {folder} is not a run folder, it has no config.yaml (accepted: the folder "
                "of a run, latest)"
            )
        return cls(folder)

    @property
    def name(self) -> str:
        """`<experiment>/<time>`, the run's id."""
        return f"{self.path.parent.name}/{self.path.name}"

    def write_origin(
        self, config: Mapping[str, Any], *, secrets: Collection[str] = ()
    ) -> dict[str, Any]:
        """Write config.yaml (redacted) and code_version.json; returns the latter.

        A resume keeps the first ones and writes `config.1.yaml`, `code_version.1.json` ... beside.
        """
        number = 0
        while self._numbered(self.config, number).exists():
            number += 1
        text = yaml.safe_dump(redact(config, secrets=secrets), sort_keys=False, allow_unicode=True)
        self._numbered(self.config, number).write_text(text, encoding="utf-8")
        version = code_version()
        write_json(self._numbered(self.path / "code_version.json", number), version)
        return version

    @staticmethod
    def _numbered(path: Path, number: int) -> Path:
        return path.with_suffix(f".{number}{path.suffix}") if number else path

    def open_log(self) -> Path:
        """Send the `nexrl` logger to logs/controller.log until `close`; the terminal stays free."""
        path = self.logs / "controller.log"
        self._log_handler = logging.FileHandler(path, encoding="utf-8")
        self._log_handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
        )
        logger = logging.getLogger("nexrl")
        logger.addHandler(self._log_handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        return path

    def close(self) -> None:
        """Release log and lock; idempotent."""
        if self._log_handler is not None:
            logger = logging.getLogger("nexrl")
            logger.removeHandler(self._log_handler)
            logger.propagate = True
            self._log_handler.close()
            self._log_handler = None
        self._lock.close()


def _take_lock(path: Path) -> IO[str]:
    """An open file that holds the folder's lock; ConfigError naming the process that has it."""
    file = (path / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ConfigError(
            f"run folder {path} is in use by {holder}; only one can write it"
        ) from error
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()}\n")
    file.flush()
    return file


def code_version() -> dict[str, Any]:
    """Which code makes a run. `git_commit` and `git_dirty` are null when the code is not a git
    checkout."""
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain") if commit else None
    return {
        "git_commit": commit or None,
        "git_dirty": None if status is None else bool(status),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of a git command; None when there is no git, no checkout or no commit."""
    folder = str(Path(__file__).resolve().parents[1])
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
