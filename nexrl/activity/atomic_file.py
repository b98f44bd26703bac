"""Files that are either whole or absent, whatever happens while they are written; and JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
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
