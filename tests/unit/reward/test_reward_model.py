"""RewardModel: what a run has trained on preferences judges completions of another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexrl.config.schema import (
    DataConfig,
    RolloutWorkerConfig,
    TrainerConfig,
    TrainServiceConfig,
)
from nexrl.errors import ConfigError, RewardError
from nexrl.rendering.renderer import load_renderer
from nexrl.rollout.build import build_worker
from nexrl.rollout.rollout_worker import WorkerContext
from nexrl.services.reward.local import load_reward_service
from nexrl.services.reward.model import RewardModel
from nexrl.services.train.backends.torch_backend import TorchTrainService
from nexrl.testing.makers import RecordingTracker, make_completion
from nexrl.testing.tiny_models import make_micro_model
from nexrl.trainer.reward_model import RewardModelTrainer
from nexrl.trainer.trainer import TrainerContext
from nexrl.types import ModelSpec, PolicyVersion, Trajectory

REFERENCE = "nexrl.services.reward.model:RewardModel"
ROWS = [
    {"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": "-" + str(2 * i)} for i in range(12)
]
"""The right sum against its negative: one token tells them apart."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A reward model as a run leaves it."""

    folder: Path
    before: dict[str, float]
    after: dict[str, float]


async def rows_of(model: Path) -> list[Trajectory]:
    """The pairs as the worker of such a run makes them."""
    config = RolloutWorkerConfig(type="preference")
    context = WorkerContext(
        inference=None, renderer=load_renderer(model), config=config, data=DataConfig()
    )
    worker: Any = build_worker(context, model)
    return [t for row in ROWS for t in await named_pair(worker, row)]


async def named_pair(worker: Any, row: dict[str, str]) -> list[Trajectory]:
    return [replace(t, item_id=row["prompt"]) for t in await worker.step(row)]


async def train_reward_model(folder: Path) -> Trained:
    model = make_micro_model(folder / "model")
    service = TorchTrainService(TrainServiceConfig(num_threads=1))
    algorithm = {"preset": "reward_model", "loss": {"name": "reward_model"}}
    config = {"algorithm": algorithm, "optimizer": {"lr": 1e-2}}
    try:
        await service.create(ModelSpec(path=str(model), head="value"))
        trainer = RewardModelTrainer(
            TrainerContext(
                train_service=service,
                config=TrainerConfig.model_validate(config),
                tracker=RecordingTracker(),
            )
        )
        await trainer.setup()
        rows = await rows_of(model)
        before = await trainer.evaluate(rows)
        for _ in range(10):
            await trainer.train(rows)
        after = await trainer.evaluate(rows)
        published = folder / "published"
        await service.publish_weights("actor", PolicyVersion(number=1), str(published))
    finally:
        await service.aclose()
    return Trained(folder=published, before=before, after=after)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return asyncio.run(train_reward_model(tmp_path_factory.mktemp("reward_model")))


@pytest.fixture
async def judge(trained: Trained) -> AsyncIterator[RewardModel]:
    model = RewardModel(str(trained.folder), recipe_dir=Path())
    yield model
    await model.aclose()


def ids(folder: Path, text: str) -> list[int]:
    found: list[int] = load_renderer(folder).encode(text).tolist()
    return found


async def scores_of(judge: Any, side: str) -> np.ndarray[Any, Any]:
    found = await asyncio.gather(*(judge.score(row[side], row) for row in ROWS))
    return np.array([result.value for result in found])


async def test_training_raises_accuracy_and_margin(trained: Trained) -> None:
    assert trained.before["margin"] == 0.0
    assert trained.after["accuracy"] == 1.0
    assert trained.after["margin"] > 1.0


async def test_scores_are_those_of_training(trained: Trained, judge: RewardModel) -> None:
    for side in ("chosen", "rejected"):
        scores = await scores_of(judge, side)
        assert scores.mean() == pytest.approx(trained.after[f"reward_{side}"], abs=1e-4)


async def test_drawn_ids_and_their_text_score_the_same(
    trained: Trained, judge: RewardModel
) -> None:
    row = ROWS[3]
    drawn = make_completion(
        [*ids(trained.folder, "6"), 1],
        prompt_ids=ids(trained.folder, row["prompt"]),
        text="6",
    )
    by_ids = await judge.score("6", row, drawn)
    assert by_ids.value == pytest.approx((await judge.score("6", row)).value, abs=1e-5)


async def test_a_draw_cut_short_is_scored_without_an_end(
    trained: Trained, judge: RewardModel
) -> None:
    row, prompt = ROWS[3], ids(trained.folder, ROWS[3]["prompt"])
    whole = make_completion([9, 1], prompt_ids=prompt, text="6", logprobs=None)
    cut = make_completion([9], prompt_ids=prompt, text="6", logprobs=None, finish_reason="length")
    assert (await judge.score("6", row, whole)).value != (await judge.score("6", row, cut)).value


@pytest.mark.parametrize("prompt_ids", [(500, 501), (5, 6)])
async def test_ids_of_another_tokenizer_are_not_used(
    judge: RewardModel, prompt_ids: tuple[int, ...]
) -> None:
    foreign = make_completion([7, 7, 7], prompt_ids=prompt_ids, text="6", logprobs=None)
    expected = (await judge.score("6", ROWS[3])).value
    assert (await judge.score("6", ROWS[3], foreign)).value == pytest.approx(expected, abs=1e-5)


async def test_one_row_at_a_time_gives_the_same_bits_in_any_company(trained: Trained) -> None:
    judge = RewardModel(str(trained.folder), recipe_dir=Path(), batch_size=1)
    together = await scores_of(judge, "chosen")
    alone = [(await judge.score(row["chosen"], row)).value for row in ROWS]
    await judge.aclose()
    assert together.tolist() == alone


async def test_batched_scores_differ_by_rounding_only(trained: Trained, judge: RewardModel) -> None:
    alone = [(await judge.score(row["chosen"], row)).value for row in ROWS]
    assert await scores_of(judge, "chosen") == pytest.approx(alone, abs=1e-5)


async def test_it_is_configured_as_a_reward(trained: Trained) -> None:
    arguments = {"path": trained.folder.name}
    service = load_reward_service(
        REFERENCE, recipe_dir=trained.folder.parent, arguments=arguments, deadline_s=30.0
    )
    right, wrong = [await service.score(ROWS[4][side], ROWS[4]) for side in ("chosen", "rejected")]
    await service.aclose()
    assert right.value is not None
    assert wrong.value is not None
    assert right.value > wrong.value
    assert service.contract.startswith("nexrl.services.reward.model:RewardModel(")


async def test_a_row_longer_than_the_model_takes_is_an_error_and_no_zero(
    judge: RewardModel,
) -> None:
    with pytest.raises(RewardError, match="at most 64 tokens, prompt and completion have"):
        await judge.score("1" * 70, ROWS[0])


async def test_a_row_without_a_prompt_is_named(judge: RewardModel) -> None:
    with pytest.raises(ConfigError, match=r"needs column 'prompt'.*the row has: question"):
        judge.check_row({"question": "2+2="})


async def test_closing_ends_calls_that_wait(trained: Trained) -> None:
    judge = RewardModel(str(trained.folder), recipe_dir=Path(), batch_size=1)
    waiting = asyncio.create_task(scores_of(judge, "chosen"))
    for _ in range(3):  # the first batch is under way, nothing is answered
        await asyncio.sleep(0)
    await judge.aclose()
    await judge.aclose()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"path": None}, "path must be a model folder, got None"),
        ({"path": "nowhere"}, "path: 'nowhere' is not a model folder"),
        ({"path": "model"}, "holds no value head"),
        ({"path": "published", "batch_size": 0}, "batch_size must be at least 1"),
        ({"path": "published", "folder": "x"}, "unexpected keyword argument 'folder'"),
        ({}, "missing a required argument: 'path'"),
    ],
)
async def test_what_cannot_work_is_refused_at_the_start(
    trained: Trained, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load_reward_service(REFERENCE, recipe_dir=trained.folder.parent, arguments=arguments)


async def test_an_error_reaches_its_batch_and_leaves_the_others_waiting_for_no_one(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = RewardModel(str(trained.folder), recipe_dir=Path(), batch_size=1)
    scored: list[int] = []

    def fails_once(_: Any, rows: list[Any]) -> list[float]:
        scored.append(len(rows))
        if len(scored) == 1:
            raise RuntimeError("out of memory")
        return [0.5] * len(rows)

    monkeypatch.setattr("nexrl.services.reward.model._score", fails_once)
    async with asyncio.timeout(5.0):
        first, *others = await asyncio.gather(
            *(judge.score(row["chosen"], row) for row in ROWS[:3]), return_exceptions=True
        )
    await judge.aclose()
    assert isinstance(first, RuntimeError)
    assert [found.value for found in others if not isinstance(found, BaseException)] == [0.5, 0.5]
