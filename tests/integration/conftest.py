"""Fixtures of whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.testing.micro_recipe import Recipe
from nexrl.testing.tiny_models import make_micro_model


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_micro_model(tmp_path_factory.mktemp("micro") / "model")


@pytest.fixture
def make_recipe(tmp_path: Path, micro_model: Path) -> Callable[[str], Recipe]:
    return lambda name: Recipe.make(tmp_path / name, micro_model)


@pytest.fixture
def recipe(make_recipe: Callable[[str], Recipe]) -> Recipe:
    return make_recipe("recipe")
