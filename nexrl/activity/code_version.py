"""Which code made a run: commit, packages, Python, platform."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "nexrl",
    "aiohttp",
    "msgpack",
    "numpy",
    "pydantic",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
_GIT_DEADLINE_S = 5.0


def code_version(source: Path | None = None) -> dict[str, Any]:
    """`git_commit` and `git_dirty` are null when the code is not a git checkout."""
    folder = source or Path(__file__).resolve().parents[1]
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain") if commit else None
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


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None when there is no git, no checkout or no commit."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
