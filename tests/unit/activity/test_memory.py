"""read_memory: the smaller of host and container counts; no /proc means no reading."""

from __future__ import annotations

from pathlib import Path

from nexrl.activity.memory import read_memory


def make_system(folder: Path, **cgroup: str) -> tuple[Path, Path]:
    proc, group = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    group.mkdir()
    (proc / "self" / "status").write_text("Name:\tpython\nVmRSS:\t  2048 kB\n")
    (proc / "meminfo").write_text("MemTotal: 100000 kB\nMemAvailable: 50000 kB\n")
    for name, text in cgroup.items():
        (group / f"memory.{name}").write_text(text + "\n")
    return proc, group


def test_the_host_counts_where_there_is_no_limit(tmp_path: Path) -> None:
    reading = read_memory(*make_system(tmp_path, max="max", current="123"))
    assert reading is not None
    assert (reading.resident, reading.available, reading.total) == (2048 << 10, 51200000, 102400000)
    assert not reading.low


def test_the_limit_of_a_container_counts_where_it_is_smaller(tmp_path: Path) -> None:
    reading = read_memory(*make_system(tmp_path, max="1000000", current="950000"))
    assert reading is not None
    assert (reading.available, reading.total) == (50000, 1000000)
    assert reading.low


def test_a_system_that_does_not_tell_gives_no_reading(tmp_path: Path) -> None:
    assert read_memory(tmp_path / "proc", tmp_path / "cgroup") is None
