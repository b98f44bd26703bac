"""Trainer: the base class that a user subclasses, and what the controller gets from it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexrl.config.schema import TrainerConfig
from nexrl.errors import ConfigError, InvariantError, UserCodeError
from nexrl.testing.makers import make_batch, make_group, make_tracker
from nexrl.testing.toy_train_service import ToyTrainService
from nexrl.trainer import BaseTrainer, Trainer, TrainerContext
from nexrl.trainer.build import build_trainer, trainer_class
from nexrl.trainer.policy_gradient import PolicyGradientTrainer
from nexrl.trainer.preference import PreferenceTrainer
from nexrl.trainer.reward_model import RewardModelTrainer
from nexrl.trainer.sft import SftTrainer
from nexrl.types import LossSpec, RowChunk, Trajectory


def make_context(service: ToyTrainService | None = None, **settings: Any) -> TrainerContext:
    return TrainerContext(
        train_service=service or ToyTrainService(),
        config=TrainerConfig(**settings),
        tracker=make_tracker(),
    )


def chunk_of(trajectories: list[Trajectory]) -> RowChunk:
    rows = [row for t in trajectories for row in t.rows]
    weights = [row.loss_mask.astype(np.float32) for row in rows]
    return RowChunk.from_rows([row.token_ids for row in rows], {"weight": weights})


class AsyncTrainer(Trainer):
    async def train(self, trajectories: list[Trajectory]) -> dict[str, float]:
        await self.train_service.forward_backward(
            self.policy, chunk_of(trajectories), LossSpec(name="cross_entropy")
        )
        result = await self.train_service.optim_step(self.policy, self.next_optim_params())
        return {"grad_norm": result.grad_norm}


class BlockingTrainer(Trainer):
    thread = ""

    def train(self, trajectories: list[Trajectory]) -> dict[str, float]:
        self.thread = threading.current_thread().name
        self.blocking.forward_backward(chunk_of(trajectories), LossSpec(name="cross_entropy"))
        return {"grad_norm": self.blocking.optim_step(self.next_optim_params()).grad_norm}


@pytest.mark.parametrize("kind", [AsyncTrainer, BlockingTrainer])
async def test_a_custom_trainer_may_be_async_or_ordinary(kind: type[Trainer]) -> None:
    trainer = kind(make_context())
    report = await trainer.train_batch(make_batch())
    assert report.metrics["grad_norm"] > 0
    assert (report.unchanged, report.num_optimizer_steps) == (False, 1)
    await trainer.aclose()


async def test_an_ordinary_train_runs_off_the_event_loop() -> None:
    trainer = BlockingTrainer(make_context())
    await trainer.train_batch(make_batch())
    assert trainer.thread.startswith("trainer")
    await trainer.aclose()


async def test_both_kinds_leave_the_same_weights() -> None:
    services = [ToyTrainService(), ToyTrainService()]
    for kind, service in zip((AsyncTrainer, BlockingTrainer), services, strict=True):
        trainer = kind(make_context(service, optimizer={"lr": 0.1}))
        await trainer.train_batch(make_batch())
        await trainer.aclose()
    np.testing.assert_array_equal(services[0].tables["actor"], services[1].tables["actor"])


async def test_an_empty_batch_leaves_the_weights_unchanged() -> None:
    service = ToyTrainService()
    report = await AsyncTrainer(make_context(service)).train_batch(make_batch(groups=()))
    assert (report.unchanged, report.num_optimizer_steps) == (True, 0)
    assert service.calls == []


async def test_an_error_in_train_names_file_and_line() -> None:
    class Broken(Trainer):
        def train(self, trajectories: list[Trajectory]) -> dict[str, float]:
            return {"x": 1 / 0}

    trainer = Broken(make_context())
    with pytest.raises(UserCodeError, match=r"ZeroDivisionError.*test_trainer\.py:\d+"):
        await trainer.train_batch(make_batch())
    await trainer.aclose()


@pytest.mark.parametrize("result", [None, [1.0], {"loss": "low"}, {"loss": None}])
async def test_metrics_that_are_no_numbers_are_refused(result: Any) -> None:
    class Odd(Trainer):
        async def train(self, trajectories: list[Trajectory]) -> Mapping[str, float]:
            return result  # type: ignore[no-any-return]

    with pytest.raises(UserCodeError, match=r"Odd\.train"):
        await Odd(make_context()).train_batch(make_batch())


async def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    """FR-070"""

    class Nan(Trainer):
        async def train(self, trajectories: list[Trajectory]) -> dict[str, float]:
            return {"loss/total": float("nan")}

    with pytest.raises(InvariantError, match="loss/total"):
        await Nan(make_context()).train_batch(make_batch())


async def test_the_blocking_service_refuses_to_block_the_event_loop() -> None:
    class Confused(Trainer):
        async def train(self, trajectories: list[Trajectory]) -> dict[str, float]:
            return {"x": self.blocking.optim_step(self.next_optim_params()).grad_norm}

    with pytest.raises(InvariantError, match=r"awaits self\.train_service"):
        await Confused(make_context()).train_batch(make_batch())


async def test_closing_ends_a_thread_that_waits_for_the_service() -> None:
    entered = asyncio.Event()

    class Hanging(ToyTrainService):
        async def optim_step(self, *_: Any) -> Any:
            entered.set()
            await asyncio.Event().wait()

    trainer = BlockingTrainer(make_context(Hanging()))
    batch = asyncio.create_task(trainer.train_batch(make_batch()))
    await entered.wait()
    await trainer.aclose()
    with pytest.raises(InvariantError, match="closed while its `train` function waited"):
        await batch


async def test_the_learning_rate_goes_on_where_the_state_was_taken() -> None:
    settings: dict[str, Any] = {"optimizer": {"lr": 1.0, "warmup_steps": 4}}
    whole = AsyncTrainer(make_context(**settings))
    rates = [whole.next_optim_params().lr for _ in range(4)]
    first = AsyncTrainer(make_context(**settings))
    for _ in range(2):
        first.next_optim_params()
    second = AsyncTrainer(make_context(**settings))
    second.load_state_dict(first.state_dict())
    assert [second.next_optim_params().lr for _ in range(2)] == rates[2:]


CUSTOM = """
from nexrl.trainer import BaseTrainer

class Mine(BaseTrainer):
    needs = ("reward",)

    def train(self, trajectories):
        return {"seen": len(trajectories), "scale": self.arguments["scale"]}

class NoTrainer:
    def train(self, trajectories):
        return {}
"""


def custom(name: str) -> dict[str, Any]:
    return {
        "type": "custom",
        "custom_trainer_module_path": "mine.py",
        "custom_trainer_class_name": name,
        "arguments": {"scale": 3},
    }


async def test_a_custom_trainer_comes_from_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM)
    context = make_context(**custom("Mine"))
    trainer = build_trainer(context.config, context, tmp_path)
    report = await trainer.train_batch(make_batch())
    assert (report.metrics["seen"], report.metrics["scale"]) == (4, 3)
    assert report.unchanged
    await trainer.aclose()


@pytest.mark.parametrize(
    ("name", "message"), [("NoTrainer", "must be a subclass"), ("Absent", "Absent")]
)
def test_a_class_that_is_no_trainer_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM)
    context = make_context(**custom(name))
    with pytest.raises(ConfigError, match=message):
        build_trainer(context.config, context, tmp_path)


@pytest.mark.parametrize(
    ("preset", "loss", "kind"),
    [
        ("dapo", "ppo", PolicyGradientTrainer),
        ("sft", "cross_entropy", SftTrainer),
        ("dpo", "dpo", PreferenceTrainer),
        ("reward_model", "reward_model", RewardModelTrainer),
    ],
)
def test_the_presets_family_chooses_the_built_in_trainer(
    tmp_path: Path, preset: str, loss: str, kind: type[Trainer]
) -> None:
    context = make_context(algorithm={"preset": preset, "loss": {"name": loss}})
    assert type(build_trainer(context.config, context, tmp_path)) is kind
    assert BaseTrainer is Trainer


@pytest.mark.parametrize("part", ["loss", "advantage"])
def test_code_by_path_is_looked_at_before_anything_is_built(tmp_path: Path, part: str) -> None:
    config = make_context(algorithm={part: {"name": "absent.py:mine"}}).config
    with pytest.raises(ConfigError, match=rf"{part}\.name: there is no file 'absent\.py'"):
        trainer_class(config, tmp_path)


async def test_a_row_longer_than_the_model_takes_is_named_by_its_item() -> None:
    trainer = AsyncTrainer(make_context(ToyTrainService(max_positions=4)))
    with pytest.raises(InvariantError, match=r"item 'i1' .* row of 5 tokens, .* at most 4"):
        await trainer.train_batch(make_batch([make_group(item=1)]))
