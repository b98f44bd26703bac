"""A micro recipe in a folder of its own: a real model of a few thousand parameters, real services.

For tests that start `nexrl` as a user would and read what it leaves.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REWARD = '''
def even_digits(completion, **_):
    """Share of even digits: differs between siblings, so groups carry signal."""
    return sum(c in "02468" for c in completion) / 4
'''


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A `nexrl` process that has ended."""

    code: int
    out: str
    err: str
    run: Path | None

    @property
    def summary(self) -> dict[str, Any]:
        assert self.run is not None
        loaded: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return loaded

    @property
    def steps(self) -> list[dict[str, Any]]:
        assert self.run is not None
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [r for line in lines if (r := json.loads(line))["axis"] == "step"]

    @property
    def final_checksums(self) -> dict[str, str]:
        """Checksums of the last published weights, by tensor."""
        assert self.run is not None
        manifests = sorted((self.run / "publications").glob("*/manifest.json"), key=version_number)
        tensors = json.loads(manifests[-1].read_text())["tensors"]
        return {t["name"]: t["checksum"] for t in tensors}


class Running:
    """A `nexrl launch` process that runs; tests signal it at a moment that its output marks."""

    def __init__(self, recipe: Recipe, *arguments: str) -> None:
        self._recipe = recipe
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nexrl.cli.main", "launch", str(recipe.folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=recipe.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def read_until(self, word: str) -> None:
        """Wait for a line with this word on standard output; AssertionError when the run ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if word in line:
                return
        assert self.process.stderr is not None
        raise AssertionError(f"the run ended before {word!r}: {self.process.stderr.read()}")

    def children(self) -> dict[int, str]:
        """Command lines of its child processes by pid."""
        pid = self.process.pid
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(p): Path(f"/proc/{p}/cmdline").read_text() for p in pids}

    def end(self, timeout_s: float = 30) -> Finished:
        """Wait for its end; kills it and fails when it does not end in time."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        finally:
            self.process.kill()
        return Finished(
            code=self.process.returncode, out=out, err=err, run=self._recipe.latest_run()
        )


def has_ended(pid: int, timeout_s: float = 10) -> bool:
    """Whether a process that is not ours to wait for ends in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


def version_number(path: Path) -> int:
    version = json.loads(path.read_text())["version"]
    return int(version["number"] if isinstance(version, dict) else str(version).rpartition(".")[2])


def merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = (
            merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
        )
    return merged


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe folder in a temporary place."""

    folder: Path

    def base(self) -> dict[str, Any]:
        return {
            "experiment_name": "micro",
            "seed": 7,
            "data": {
                "sources": [{"path": "rows.jsonl"}],
                "batch_size": 4,
                "rollout_repeat_n": 4,
            },
            "rollout_worker": {"reward": "reward.py:even_digits", "sampling": {"max_tokens": 4}},
            "trainer": {
                "num_steps": 4,
                "optimizer": {"lr": 1e-2},
                "algorithm": {"preset": "grpo", "kl": {"coefficient": 0.0}},
            },
            "service": {
                "train_service": {
                    "model_path": "model",
                    "placement": "in_process",
                    "num_threads": 1,
                },
                "inference_service": {"placement": "in_process", "num_threads": 1},
            },
            "launch": {"run_root": str(self.folder / "runs")},
            "runtime_monitor": {"live": "plain", "plain_every_s": 0},
        }

    def write(self, **changes: Any) -> Path:
        config = merge(self.base(), changes)
        (self.folder / "rl_train.yaml").write_text(yaml.safe_dump(config))
        return self.folder

    def code(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def nexrl(self, *arguments: str, timeout_s: float = 100) -> Finished:
        """Run `nexrl ARGUMENTS` to its end in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "nexrl.cli.main", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return Finished(
            code=done.returncode, out=done.stdout, err=done.stderr, run=self.latest_run()
        )

    def launch(self, *arguments: str, timeout_s: float = 100) -> Finished:
        return self.nexrl("launch", str(self.folder), *arguments, timeout_s=timeout_s)

    def start(self, *arguments: str) -> Running:
        """Start `nexrl launch` and return while it runs."""
        return Running(self, *arguments)

    def latest_run(self) -> Path | None:
        runs = sorted(
            (self.folder / "runs").glob("*/*/metrics.jsonl"), key=lambda p: p.stat().st_mtime
        )
        return runs[-1].parent if runs else None

    @classmethod
    def make(cls, folder: Path, model: Path) -> Recipe:
        """A recipe folder with forty rows, a reward function and a link to the model."""
        folder.mkdir()
        (folder / "model").symlink_to(model)
        rows = [{"prompt": f"{i}+{i % 7}=", "answer": str(i)} for i in range(40)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (folder / "reward.py").write_text(REWARD)
        return cls(folder=folder)
