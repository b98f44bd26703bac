"""Tables of the trajectory store, and how one is opened, checked and upgraded.

Facts (`rollouts`, `trajectories`) are written once; `outcomes`, `annotations` and `ledger` are only
appended to. Rows are numbered by the writer, so no text index slows it down.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from nexrl.errors import StoreError
from nexrl.pool.store_codec import LAYOUT, Layout
from nexrl.types import SCHEMA_VERSION

TABLES: Final[dict[str, dict[str, str]]] = {
    "meta": {"key": "TEXT PRIMARY KEY", "value": "TEXT NOT NULL"},
    "rollouts": {
        "row": "INTEGER PRIMARY KEY",
        "rollout_id": "TEXT NOT NULL",
        "group_key": "TEXT NOT NULL",
        "item_id": "TEXT NOT NULL",
        "draw": "INTEGER NOT NULL",
        "draw_order": "INTEGER NOT NULL DEFAULT 0",
        "source": "TEXT NOT NULL DEFAULT ''",
        "member": "INTEGER NOT NULL",
        "policy": "TEXT NOT NULL",
        "incarnation": "INTEGER NOT NULL DEFAULT 0",
        "admitted_version": "INTEGER NOT NULL DEFAULT 0",
        "status": "TEXT NOT NULL",
        "reason": "TEXT NOT NULL DEFAULT ''",
        "failure": "BLOB",
        "layout": "INTEGER NOT NULL DEFAULT 1",
        "first_trajectory": "INTEGER NOT NULL",
        "num_trajectories": "INTEGER NOT NULL",
        "attempts": "INTEGER NOT NULL DEFAULT 1",
        "duration_s": "REAL NOT NULL DEFAULT 0",
    },
    "trajectories": {
        "row": "INTEGER PRIMARY KEY",
        "rollout": "INTEGER NOT NULL",
        "trajectory_id": "TEXT NOT NULL",
        "reward": "REAL",
        "num_tokens": "INTEGER NOT NULL DEFAULT 0",
        "layout": "INTEGER NOT NULL DEFAULT 1",
        "facts": "BLOB NOT NULL",
    },
    "outcomes": {
        "row": "INTEGER PRIMARY KEY",
        "rollout": "INTEGER NOT NULL",
        "outcome": "TEXT NOT NULL",
        "reason": "TEXT NOT NULL DEFAULT ''",
        "version": "INTEGER NOT NULL DEFAULT 0",
    },
    "annotations": {
        "row": "INTEGER PRIMARY KEY",
        "trajectory": "INTEGER NOT NULL",
        "kind": "TEXT NOT NULL",
        "producer": "TEXT NOT NULL",
        "version": "TEXT NOT NULL",
        "value": "BLOB NOT NULL",
    },
    "ledger": {
        "row": "INTEGER PRIMARY KEY",
        "policy": "TEXT NOT NULL",
        "incarnation": "INTEGER NOT NULL DEFAULT 0",
        "version": "INTEGER NOT NULL",
        "counts": "TEXT NOT NULL",
    },
}
"""Columns by table. A column added later needs a default: older stores get it on opening."""

UNIQUE_ANNOTATIONS: Final = (
    "CREATE UNIQUE INDEX IF NOT EXISTS annotation_key "
    "ON annotations (trajectory, kind, producer, version)"
)
CHECKPOINT_PAGES: Final = 4000
"""Pages in the write-ahead log before SQLite moves them to the main file (16 MB)."""


class OpenStore(NamedTuple):
    """A store that can be written."""

    connection: sqlite3.Connection
    """Its only writer's; any thread may use it, one at a time."""
    layout: int
    """Number of the layout that this version encodes records in."""
    next_rollout: int
    """First free row of `rollouts`."""
    next_trajectory: int
    """First free row of `trajectories`."""


def open_for_writing(path: Path, run_id: str) -> OpenStore:
    """The store at `path`, made when absent, with every table and column of this version.

    An existing file is checked page by page first. StoreError names damage and newer schemas.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with _opened(path, str(path), check_same_thread=False, isolation_level=None) as connection:
        query = connection.execute
        query("PRAGMA journal_mode = WAL")
        # In WAL mode NORMAL survives the death of the process at any instant; only a power cut or a
        # crash of the machine may lose the last commits, and never corrupts the file.
        query("PRAGMA synchronous = NORMAL")
        query(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        if not is_new:
            (verdict,) = query("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise StoreError(f"{_damage(path)}: {verdict}")
            _check_schema(connection, path)
        _create(connection, run_id)
        layout = _current_layout(connection)
        (rollout,) = query("SELECT coalesce(max(row), 0) + 1 FROM rollouts").fetchone()
        (trajectory,) = query("SELECT coalesce(max(row), 0) + 1 FROM trajectories").fetchone()
        return OpenStore(connection, layout, rollout, trajectory)


def open_for_reading(path: Path) -> sqlite3.Connection:
    """An existing store, also while a run writes it. StoreError as for `open_for_writing`."""
    if not path.is_file():
        raise StoreError(f"there is no trajectory store at {path}")
    with _opened(path, f"{path.resolve().as_uri()}?mode=rw", uri=True) as connection:
        connection.execute("PRAGMA query_only = ON")
        _check_schema(connection, path)
        return connection


@contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """What an SQLite error in this block means for the owner of the file, as StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        raise store_error(path, error) from error


def store_error(path: Path, error: sqlite3.Error) -> StoreError:
    """What an SQLite error means for the owner of the file."""
    text = str(error).lower()
    if "malformed" in text or "not a database" in text or "corrupt" in text:
        return StoreError(f"{_damage(path)}: {error}")
    if "full" in text or "disk i/o" in text:
        return StoreError(
            f"trajectory store {path} cannot be written: {error}. Free space on its disk, move the "
            "run folder, or set trajectory_pool.store.on_error to `continue`"
        )
    return StoreError(f"trajectory store {path}: {error}")


def columns_of(connection: sqlite3.Connection, table: str) -> list[str]:
    """Columns that a table has in this file."""
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def layouts_of(connection: sqlite3.Connection) -> Mapping[int, Layout]:
    """Layouts of the encoded records in this file, by number."""
    found = connection.execute("SELECT key, value FROM meta WHERE key LIKE 'layout/%'")
    return {int(key.removeprefix("layout/")): json.loads(value) for key, value in found}


@contextmanager
def _opened(path: Path, database: str, **options: Any) -> Iterator[sqlite3.Connection]:
    """A connection that stays open unless the block raises."""
    with naming_errors(path):
        connection = sqlite3.connect(database, **options)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """StoreError when the store was written by a newer NexRL; an older one is fine."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    if not tables:
        return
    if "meta" not in tables:
        raise StoreError(f"{path} is an SQLite file, but not a trajectory store (no table `meta`)")
    found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    version = int(found[0]) if found else 0
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}; this NexRL reads versions up to "
            f"{SCHEMA_VERSION}: use a newer one"
        )


def _current_layout(connection: sqlite3.Connection) -> int:
    """Number of the layout that this version writes, noted in the file when it is new there."""
    known = layouts_of(connection)
    for number, layout in known.items():
        if layout == LAYOUT:
            return number
    number = max(known, default=0) + 1
    connection.execute("INSERT INTO meta VALUES (?, ?)", (f"layout/{number}", json.dumps(LAYOUT)))
    return number


def _create(connection: sqlite3.Connection, run_id: str) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for table, columns in TABLES.items():
        declared = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({declared})")
        present = columns_of(connection, table)
        for name, kind in columns.items():
            if name not in present:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
    connection.execute(UNIQUE_ANNOTATIONS)
    connection.execute(
        "INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),)
    )
    connection.execute("INSERT OR IGNORE INTO meta VALUES ('run_id', ?)", (run_id,))
    connection.execute("COMMIT")


def _damage(path: Path) -> str:
    return (
        f"trajectory store {path} is damaged. Move it aside (with its -wal and -shm files) and "
        "continue with a new one, or recover rows with `sqlite3 FILE .recover`. Checkpoints do not "
        "need it"
    )
