"""build_worker: the worker that the configuration names, with errors that name file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nexrl.config.schema import SamplingConfig
from nexrl.errors import ConfigError, UserCodeError
from nexrl.rollout.build import build_worker, to_sampling
from nexrl.rollout.single_turn import SingleTurnWorker
from nexrl.rollout.supervised import SupervisedWorker
from nexrl.types import Sampling

HEADER = (
    "from nexrl.rollout import BaseRolloutWorker, RolloutWorker\nfrom nexrl import Trajectory\n"
)
GOOD = (
    HEADER
    + """
class Mine(BaseRolloutWorker):
    def step(self, data_item: dict) -> Trajectory:
        return Trajectory(tokens=[1, 2], loss_mask=[0, self.arguments["mask"]], reward=1.0)
"""
)


def build(
    make_context: Any, folder: Path, source: str | None, name: str = "Mine", **config: Any
) -> Any:
    if source is not None:
        (folder / "worker.py").write_text(source)
    context = make_context(
        config={
            "type": "custom",
            "custom_rollout_worker_module_path": "worker.py",
            "custom_rollout_worker_class_name": name,
            **config,
        }
    )
    return build_worker(context, folder)


@pytest.mark.parametrize(
    ("kind", "cls"), [("single_turn", SingleTurnWorker), ("supervised", SupervisedWorker)]
)
def test_built_in_workers_by_name(make_context: Any, tmp_path: Path, kind: str, cls: type) -> None:
    context = make_context(config={"type": kind})
    assert type(build_worker(context, tmp_path)) is cls


async def test_a_custom_worker_of_the_recipe_runs(
    make_context: Any, make_rollouts: Any, tmp_path: Path
) -> None:
    worker = build(make_context, tmp_path, GOOD, arguments={"mask": 1})
    (record,) = await make_rollouts(type(worker), context=worker.context).run()
    assert record.trajectories[0].loss_mask.tolist() == [False, True]
    assert record.trajectories[0].reward == 1.0


@pytest.mark.parametrize(
    ("source", "name", "named"),
    [
        (None, "Mine", "worker.py"),
        ("def step(:\n", "Mine", r"worker.py:1"),
        (GOOD, "Other", "Other"),
        ("class Mine: pass\n", "Mine", "must be a subclass of nexrl.rollout.RolloutWorker"),
        (HEADER + "class Mine(RolloutWorker): pass\n", "Mine", "that defines step"),
    ],
)
def test_a_worker_that_cannot_be_used_is_refused(
    make_context: Any, tmp_path: Path, source: str | None, name: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        build(make_context, tmp_path, source, name)
    assert "rollout_worker.custom_rollout_worker" in str(caught.value)


def test_an_exception_in_the_constructor_names_file_and_line(
    make_context: Any, tmp_path: Path
) -> None:
    source = GOOD + "    def __init__(self, context):\n        self.x = 1 / 0\n"
    with pytest.raises(UserCodeError, match=r"ZeroDivisionError.*worker\.py:8"):
        build(make_context, tmp_path, source)


def test_a_constructor_that_forgets_super_is_told(make_context: Any, tmp_path: Path) -> None:
    source = GOOD + "    def __init__(self, context):\n        self.x = 1\n"
    with pytest.raises(UserCodeError, match=r"must call super\(\).__init__\(context\)"):
        build(make_context, tmp_path, source)


def test_sampling_takes_every_field_of_the_configuration() -> None:
    config = SamplingConfig(max_tokens=5, temperature=0.7, top_p=0.9, top_k=4, stop=("\n",))
    assert to_sampling(config) == Sampling(
        max_tokens=5, temperature=0.7, top_p=0.9, top_k=4, stop=("\n",)
    )
