"""`quick` changes what a frozen dataclass costs, and nothing else."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from nexrl.types.quick import quick


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: int
    y: int = 2
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")


def test_defaults_and_factories_are_those_of_the_dataclass() -> None:
    first, second = Point(x=1), Point(x=1)
    assert (first.x, first.y, first.names) == (1, 2, [])
    assert first == second
    assert first.names is not second.names


def test_fields_cannot_be_assigned() -> None:
    with pytest.raises(FrozenInstanceError):
        Point(x=1).x = 3  # type: ignore[misc]


def test_the_check_after_construction_runs() -> None:
    with pytest.raises(ValueError, match="negative"):
        Point(x=-1)


def test_a_missing_field_is_refused() -> None:
    with pytest.raises(TypeError, match="'x'"):
        Point()  # type: ignore[call-arg]


def test_copies_replacements_and_pickles_are_equal() -> None:
    point = Point(x=1, names=["a"])
    assert type(point) is Point
    assert replace(point, y=3).y == 3
    assert copy.deepcopy(point) == pickle.loads(pickle.dumps(point)) == point
