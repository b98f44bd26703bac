"""A reward that is a class: constructed once, checked and timed like a function."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nexrl.errors import ConfigError, DeadlineError, RewardError, ServiceError, UserCodeError
from nexrl.services.reward.local import load_reward_service
from nexrl.services.reward.protocol import RewardService
from nexrl.testing.virtual_time import virtual_time

JUDGE = """
import asyncio

class Judge:
    contract = "judge 1"

    def __init__(self, *, recipe_dir, answer=1.0, delay=0.0):
        if answer == "broken":
            raise ValueError("no judge")
        self.answer, self.delay, self.closed = answer, delay, False

    async def score(self, completion_text, row, completion=None):
        await asyncio.sleep(self.delay)
        if self.answer == "raise":
            raise ValueError("no idea")
        if self.answer == "lost":
            raise ConnectionError("the judge is gone")
        return self.answer

    async def aclose(self):
        self.closed = True
"""


def judge(folder: Path, *, deadline_s: float = 5.0, **fields: Any) -> RewardService:
    (folder / "judge.py").write_text(JUDGE)
    arguments = fields.pop("arguments", {})
    return load_reward_service(
        "judge.py:Judge",
        recipe_dir=folder,
        arguments=arguments,
        deadline_s=deadline_s,
        **fields,
    )


async def test_it_is_built_with_its_arguments_and_asked_for_each_completion(tmp_path: Path) -> None:
    service = judge(tmp_path, arguments={"answer": 0.5})
    assert service.contract == "judge 1"
    assert (await service.score("4", {})).value == 0.5
    await service.aclose()


@pytest.mark.parametrize(
    ("answer", "named"), [("raise", "ValueError: no idea at .*judge.py"), ("text", "'text'")]
)
async def test_an_exception_or_nonsense_is_an_error_and_no_zero(
    tmp_path: Path, answer: str, named: str
) -> None:
    with pytest.raises(RewardError, match=named):
        await judge(tmp_path, arguments={"answer": answer}).score("4", {})


async def test_a_lost_connection_to_a_judge_is_infrastructure(tmp_path: Path) -> None:
    """FR-140: retried, as for a function."""
    with pytest.raises(ServiceError, match=r"Judge raised ConnectionError: the judge") as caught:
        await judge(tmp_path, arguments={"answer": "lost"}).score("4", {})
    assert caught.value.retryable


@virtual_time
async def test_a_slow_judge_passes_its_deadline(tmp_path: Path) -> None:
    service = judge(tmp_path, deadline_s=2.0, arguments={"delay": 60.0})
    with pytest.raises(DeadlineError, match=r"longer than 2 s .rollout_worker.reward_deadline_s"):
        await service.score("4", {})
    assert asyncio.get_running_loop().time() == 2.0


def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"accepted: answer, delay"):
        judge(tmp_path, arguments={"anwser": 1.0})
    with pytest.raises(ConfigError, match=r"accepted for it: thread"):
        judge(tmp_path, isolation="process")
    with pytest.raises(UserCodeError, match=r"ValueError: no judge at .*judge.py"):
        judge(tmp_path, arguments={"answer": "broken"})


def test_a_class_that_is_half_a_service_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(
        "class Half:\n    async def score(self, *a): ...\n    def __init__(self, recipe_dir): ...\n"
    )
    with pytest.raises(ConfigError, match=r"no \['contract', 'aclose'\]"):
        load_reward_service("half.py:Half", recipe_dir=tmp_path, arguments={})
