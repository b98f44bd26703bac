"""Files and folders that are either whole or absent, whatever happens while they are written.

A reader finds the whole thing under its name or nothing (or the previous one), also when the writer
is killed at any instant. Summaries, reports, checkpoints and publications are written this way.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step; a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """`write_text` of indented JSON with a final newline."""
    write_text(path, json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None when it is absent."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def finite(value: Any) -> Any:
    """A copy with NaN and infinities as words, which JSON does not know; `float()` reads them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


@contextmanager
def atomic_folder(path: str | Path, *, durable: bool) -> Iterator[Path]:
    """Yields a new sibling folder to fill; renames it to `path` when the block ends well.

    A folder already at `path` is replaced: a run that was killed between writing a checkpoint and
    committing it writes the same one again. `durable` flushes every file and folder to the disk
    first, so that the folder is also whole after a power cut.
    """
    target = Path(path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f".{target.name}.partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:12]}"
    partial.mkdir()
    try:
        yield partial
        if durable:
            _flush_tree(partial)
        _move_into_place(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if durable:
        _flush(target.parent)


def _move_into_place(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        # A non-empty folder cannot be renamed over: step it aside first.
        old = target.parent / f".{target.name}.partial-old-{uuid.uuid4().hex[:12]}"
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)


def _flush_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _flush(Path(root) / name)
        _flush(Path(root))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
