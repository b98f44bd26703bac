"""Mistakes in a recipe's own loss or advantage that would train nothing, or blame somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from nexrl.errors import ConfigError, UserCodeError
from nexrl.testing.toy_train_service import ToyTrainService
from nexrl.testing.toy_trainer import drawn, make_toy_trainer

CODE = """
def detached(outputs, inputs, settings):
    return outputs["logprobs"].detach() * inputs["advantage"]


def short(outputs, inputs, settings):
    return outputs["logprobs"][1:]


def misspelt(inputs, settings):
    return inputs.rewards


misspelt.needs = ("valuess",)


def bare(inputs, settings):
    return inputs.rewards


bare.needs = "values"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


async def test_a_loss_that_depends_on_no_output_is_refused(recipe: Path) -> None:
    """Its gradient is 0 at every token: the run would look well and learn nothing."""
    service = ToyTrainService()
    algorithm = {"loss": {"name": "mine.py:detached"}}
    trainer = make_toy_trainer(service, recipe_dir=recipe, algorithm=algorithm)
    await trainer.setup()
    with pytest.raises(UserCodeError, match=r"mine.py:detached .* depends on none of the outputs"):
        await trainer.train(drawn(service))


async def test_a_wrong_shape_is_told_with_the_line_of_the_function(recipe: Path) -> None:
    service = ToyTrainService()
    algorithm = {"loss": {"name": "mine.py:short"}}
    trainer = make_toy_trainer(service, recipe_dir=recipe, algorithm=algorithm)
    await trainer.setup()
    with pytest.raises(UserCodeError, match=r"must return .* \(.*/mine\.py:6\)$"):
        await trainer.train(drawn(service))


@pytest.mark.parametrize(
    ("name", "shown"),
    [("misspelt", r"'valuess'.*values"), ("bare", r"must be a tuple of names, got 'values'")],
)
def test_what_an_advantage_needs_is_checked_before_anything_starts(
    recipe: Path, name: str, shown: str
) -> None:
    with pytest.raises(ConfigError, match=rf"advantage.name: mine.py:{name} needs .*{shown}"):
        make_toy_trainer(recipe_dir=recipe, algorithm={"advantage": {"name": f"mine.py:{name}"}})
