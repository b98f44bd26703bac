"""Folders of published weights: their names, and which of them may go.

One folder a version, `<policy>-<incarnation>-<number>`, so that several policies and a resumed run
share a parent without meeting.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from nexrl.types import PolicyVersion


def publication_folder(parent: Path, version: PolicyVersion) -> Path:
    """Where a version's weights lie."""
    return parent / f"{version.policy}-{version.incarnation:04d}-{version.number:08d}"


def delete_old(parent: Path, policy: str, *, keep: int) -> list[Path]:
    """Delete all but the newest `keep` publications of a policy; returns what went."""
    pattern = re.compile(re.escape(policy) + r"-(\d+)-(\d+)")
    found = [
        (int(match[1]), int(match[2]), folder)
        for folder in parent.iterdir()
        if (match := pattern.fullmatch(folder.name))
    ]
    gone = [folder for _, _, folder in sorted(found)[:-keep]]
    for folder in gone:
        shutil.rmtree(folder)
    return gone
