"""What was acknowledged survives: SIGKILL, a log cut anywhere, a full disk."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from nexrl.pool.store_reader import StoreReader
from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.testing.makers import make_record

WRITER = """
import asyncio, resource, sys
from nexrl.errors import StoreError
from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.testing.makers import make_record

async def main(path, limit, rounds):
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    store = TrajectoryStore(path, commit_every_s=0.001)
    print("ready", flush=True)
    for start in range(0, rounds * 20, 20):
        stored = [store.append(make_record(member=m), policy="actor") for m in range(start, start + 20)]
        try:
            await stored[-1]
        except StoreError as error:
            print(f"error {error}", flush=True)
            break
        print(start + 20, flush=True)
    if limit:
        await store.aclose()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def start_writer(path: Path, *, limit: int = 0, rounds: int = 1_000_000) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(path), str(limit), str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)


def members(path: Path) -> list[int]:
    with StoreReader(path) as reader:
        return [stored.record.member for stored in reader.read()]


def test_what_was_acknowledged_survives_sigkill_at_any_instant(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    seed = random.Random(0)
    acknowledged = 0
    for _ in range(4):
        writer = start_writer(path)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        lines = [writer.stdout.readline() for _ in range(seed.randrange(1, 40))]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
        writer.stdout.close()
        writer.wait(10)
        acknowledged += max(int(line) for line in lines if line.endswith("\n"))
        found = members(path)
        assert len(found) >= acknowledged
        assert sorted(set(found)) == list(range(max(found) + 1))
        acknowledged = len(found)


async def write_with_a_checkpoint(path: Path) -> tuple[bytes, bytes]:
    """Main file and log of a live store with rows 0-9 in the former and 10-39 in the latter."""
    store = TrajectoryStore(path)
    for member in range(40):
        await store.append(make_record(member=member), policy="actor")
        if member == 9:
            connection = sqlite3.connect(path)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.close()
    files = read_bytes(path), read_bytes(log_of(path))
    await store.aclose()
    return files


def read_bytes(path: Path) -> bytes:
    return path.read_bytes()


def log_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def cut_copy(folder: Path, main: bytes, log: bytes) -> Path:
    path = folder / "store.sqlite"
    folder.mkdir()
    path.write_bytes(main)
    log_of(path).write_bytes(log)
    return path


async def test_a_log_cut_at_any_byte_loses_only_what_was_in_the_cut_part(tmp_path: Path) -> None:
    """Rows before a checkpoint are in the main file; the rest is a prefix of what was written."""
    main, log = await write_with_a_checkpoint(tmp_path / "store.sqlite")
    cuts = sorted({0, 1, 31, 32, 33, len(log), *random.Random(1).sample(range(len(log)), 12)})
    counts = []
    for cut in cuts:
        path = cut_copy(tmp_path / str(cut), main, log[:cut])
        found = members(path)
        assert found == list(range(len(found)))
        counts.append(len(found))
        reopened = TrajectoryStore(path)
        await reopened.append(make_record(member=len(found)), policy="actor")
        await reopened.aclose()
        assert members(path) == list(range(len(found) + 1))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (10, 40)


@pytest.mark.skipif(sys.platform == "win32", reason="file-size limits are of POSIX")
def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    writer = start_writer(path, limit=300_000)
    output, _ = writer.communicate(timeout=60)
    acknowledged = [int(line) for line in output.split("\n") if line.isdigit()]
    error = output.strip().split("\n")[-1]
    assert writer.returncode == 0
    assert "store.sqlite cannot be written" in error
    assert "trajectory_pool.store.on_error" in error
    assert len(members(path)) >= acknowledged[-1] > 0
