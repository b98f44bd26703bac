"""docs/configuration.md is what the schema says, and its examples load."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.config.fields import all_fields
from nexrl.config.loader import load_run_config
from nexrl.config.reference import COMMAND, render_reference

MakeRecipe = Callable[..., Path]
PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_reference(), f"run: {COMMAND}"


def test_every_field_has_a_row_with_type_default_range_and_sentence() -> None:
    """FR-161: the docs name no key that does not exist, and all that do."""
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \| (.+) \|$", render_reference(), re.M)
    leaves = [field for field in all_fields().values() if field.kind != "section"]
    assert sorted(name for name, *_ in rows) == sorted(field.path[-1] for field in leaves)
    assert len(rows) == len(leaves)
    assert all(row[-1].endswith(".") for row in rows)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_examples_of_the_page_load(make_recipe: MakeRecipe, index: int) -> None:
    """FR-161: docs snippets are run in tests."""
    fences = re.findall(r"```yaml\n(.*?)```", render_reference(), re.S)
    assert len(fences) == 3
    loaded = load_run_config(make_recipe(fences[index]))
    assert [stage.name for stage in loaded.stages] == [["main"], ["main"], ["warmup", "rl"]][index]
