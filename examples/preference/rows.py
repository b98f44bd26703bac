"""The rows and the model of these examples: a plain sum (`19`) is preferred to a padded one (`0019`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nexrl.testing.tiny_models import make_micro_model

Row = dict[str, Any]


def make_model(folder: Path, seed: int) -> None:
    """Random weights, one token for each character."""
    make_micro_model(folder, seed=seed)


def make_preview(folder: Path) -> None:
    """Tokenizer and configuration for `nexrl plan`."""
    make_model(folder, 0)


make_model.tokenizer = make_preview  # type: ignore[attr-defined]


def _sums(start: int, stop: int) -> Iterator[tuple[str, str]]:
    for number in range(start, stop):
        left, right = divmod(number * 37 % 1000, 31)
        yield f"{left}+{right}=", str(left + right)


def pairs(start: int, stop: int) -> list[Row]:
    """A plain answer and a padded one."""
    return [{"prompt": p, "chosen": a, "rejected": f"00{a}"} for p, a in _sums(start, stop)]


def labelled(start: int, stop: int) -> list[Row]:
    """The same answers one by one, with a label."""
    return [
        row
        for p, a in _sums(start, stop)
        for row in (
            {"prompt": p, "answer": a, "label": True},
            {"prompt": p, "answer": f"00{a}", "label": False},
        )
    ]
