"""Memory of this process and of the host, read from /proc: a warning comes before the kill.

An out-of-memory kill leaves no message of its own, so the trend is written down while the process
still lives (FR-167). On systems without /proc there are no numbers and no warnings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LOW_SHARE = 0.1
"""Warn when less than this share of the host's (or container's) memory is available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Memory at one moment, in bytes."""

    resident: int
    """Held by this process."""
    available: int
    """What the host, or the container's limit, still has to give."""
    total: int
    """Size of the host's memory, or the container's limit."""

    @property
    def low(self) -> bool:
        """Whether the watermark is passed."""
        return self.available < LOW_SHARE * self.total

    def describe(self, first: MemoryReading) -> str:
        """The reading in words, with the trend since an earlier one."""
        grown = (self.resident - first.resident) / 1e9
        return (
            f"{self.available / 1e9:.2f} GB of {self.total / 1e9:.2f} GB memory left; this process "
            f"holds {self.resident / 1e9:.2f} GB ({grown:+.2f} GB since start)"
        )


def read_memory(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> MemoryReading | None:
    """A reading, or None where the system does not tell."""
    try:
        status = _kilobyte_fields(proc / "self" / "status")
        host = _kilobyte_fields(proc / "meminfo")
        resident, total, available = status["VmRSS"], host["MemTotal"], host["MemAvailable"]
    except (OSError, KeyError):
        return None
    limit = _number(cgroup / "memory.max")
    used = _number(cgroup / "memory.current")
    if limit is not None and used is not None and limit < total:
        total, available = limit, min(available, max(limit - used, 0))
    return MemoryReading(resident=resident, available=available, total=total)


def _kilobyte_fields(path: Path) -> dict[str, int]:
    """`Name:  123 kB` lines as bytes."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    return fields


def _number(path: Path) -> int | None:
    """The integer in a file; None when it is absent or says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
