"""A folder that appears only when it is complete: publications and checkpoints are made in one.

A reader either finds the whole folder under its name or nothing (or the previous one), also when
the writer is killed at any instant.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
