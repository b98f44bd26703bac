"""Whole runs of a micro recipe, as a user would start them."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from nexrl.testing.micro_recipe import Recipe

PROCESSES: dict[str, Any] = {
    "service": {
        "train_service": {"placement": "process"},
        "inference_service": {"placement": "process"},
    }
}
VALIDATE: dict[str, Any] = {
    "validate": {
        "enabled": True,
        "sources": [{"path": "rows.jsonl"}],
        "max_items": 8,
        "success_reward": 0.5,
    }
}


def store_count(run: Path, where: str = "1") -> int:
    with sqlite3.connect(run / "store.sqlite") as connection:
        count: int = connection.execute(f"SELECT count(*) FROM rollouts WHERE {where}").fetchone()[
            0
        ]
    connection.close()
    return count


@pytest.mark.slow
@pytest.mark.parametrize("placement", [{}, PROCESSES], ids=["in_process", "process"])
def test_a_run_trains_validates_and_leaves_a_complete_run_folder(
    recipe: Recipe, placement: dict[str, Any]
) -> None:
    recipe.write(**placement, **VALIDATE)
    done = recipe.launch()
    assert done.code == 0, done.err
    assert done.run is not None
    summary = done.summary
    assert (summary["status"], summary["steps"]) == ("completed", 4)
    assert summary["ledger"]["trained"] == summary["ledger"]["admitted"] == 64
    [stage] = summary["stages"]
    assert stage["accuracy_first"] is not None
    assert stage["accuracy_last"] is not None
    for name in ("config.yaml", "code_version.json", "report.html", "curve.png", "tensorboard"):
        assert (done.run / name).exists(), name
    assert store_count(done.run) == 64
    assert "report.html" in done.out


@pytest.mark.slow
def test_training_raises_the_reward(recipe: Recipe) -> None:
    recipe.write(trainer={"num_steps": 30, "algorithm": {"advantage": {"std": "none"}}})
    done = recipe.launch()
    assert done.code == 0, done.err
    rewards = [s["metrics"]["reward/mean"] for s in done.steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


@pytest.mark.slow
def test_stages_follow_each_other_on_the_same_weights(recipe: Recipe) -> None:
    warm_up = {
        "name": "warm_up",
        "rollout_worker": {"type": "supervised"},
        "trainer": {"algorithm": "sft", "num_steps": 2},
        "data": {"rollout_repeat_n": 1},
    }
    recipe.write(stages=[warm_up, {"name": "rl", "trainer": {"num_steps": 2}}])
    done = recipe.launch()
    assert done.code == 0, done.err
    assert [s["name"] for s in done.summary["stages"]] == ["warm_up", "rl"]
    assert [s["version"] for s in done.steps] == [f"actor@0.{n}" for n in (1, 2, 3, 4)]


WORKER = '''
import time
from nexrl import Trajectory
from nexrl.rollout.rollout_worker import RolloutWorker


class Faulty(RolloutWorker):
    """Every way in which one rollout can go wrong, chosen by the item."""

    def step(self, data_item):
        number = int(data_item["answer"])
        kind = number % 8
        if kind == 1:
            raise ValueError("user code is wrong here")
        if kind == 2:
            return "nonsense"
        if kind == 3:
            return None
        [completion] = self.generate_blocking(data_item["prompt"])
        if kind == 4:
            self.put_trajectory(completion.to_trajectory(reward=0.5))
            return None
        return completion.to_trajectory(reward=len(completion.text) / 4)
'''


@pytest.mark.slow
def test_bad_rollouts_are_recorded_with_reasons_and_never_scored_zero(recipe: Recipe) -> None:
    """FR-140, FR-142: one exception discards one rollout, not the step."""
    recipe.code("worker.py", WORKER)
    recipe.write(
        rollout_worker={
            "type": "custom",
            "custom_rollout_worker_module_path": "worker.py",
            "custom_rollout_worker_class_name": "Faulty",
        },
        runtime_monitor={"exception_handling": {"policy": "continue"}},
    )
    done = recipe.launch()
    assert done.code == 0, done.err
    ledger = done.summary["ledger"]
    assert ledger["failed"]
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["failed"].values()) + sum(
        ledger["filtered"].values()
    ) + sum(ledger["cancelled"].values())
    assert done.run is not None
    assert store_count(done.run, "status = 'failed'") == sum(ledger["failed"].values())


@pytest.mark.slow
def test_a_run_whose_rollouts_all_fail_stops_with_the_first_cause_last(recipe: Recipe) -> None:
    """FR-122, FR-152: no trainer waits for ever for a producer that is broken."""
    recipe.code("reward.py", "def even_digits(completion, **_):\n    return completion.no_such()\n")
    recipe.write(runtime_monitor={"exception_handling": {"policy": "stop_on_error"}})
    done = recipe.launch()
    assert done.code == 1
    assert done.summary["status"] == "failed"
    last = done.err.strip().splitlines()[-1]
    assert "no_such" in last
    assert "reward.py:2" in done.err


TRAINER = '''
from nexrl.trainer.trainer import Trainer
from nexrl.types import LossSpec, RowChunk
import numpy as np


class Plain(Trainer):
    """A whole policy-gradient trainer in a few lines."""

    needs = ("reward",)

    def train(self, trajectories):
        rows = [t.rows[0] for t in trajectories]
        mean = sum(t.reward for t in trajectories) / len(trajectories)
        chunk = RowChunk.from_rows(
            [r.token_ids for r in rows],
            {
                "weight": [r.loss_mask.astype(np.float32) / len(rows) for r in rows],
                "advantage": [np.full(r.num_tokens, t.reward - mean, np.float32) for r, t in zip(rows, trajectories)],
            },
        )
        self.blocking.forward_backward(chunk, LossSpec(name="reinforce"))
        result = self.blocking.optim_step(self.next_optim_params())
        return {"grad_norm": result.grad_norm, "mine/reward": mean}
'''


@pytest.mark.slow
def test_a_custom_trainer_trains(recipe: Recipe) -> None:
    recipe.code("trainer.py", TRAINER)
    recipe.write(
        trainer={
            "type": "custom",
            "custom_trainer_module_path": "trainer.py",
            "custom_trainer_class_name": "Plain",
        }
    )
    done = recipe.launch()
    assert done.code == 0, done.err
    assert all(s["metrics"]["grad_norm"] > 0 and "mine/reward" in s["metrics"] for s in done.steps)


@pytest.mark.slow
def test_messages_that_cross_protocols_can_be_recorded(recipe: Recipe) -> None:
    recipe.write(
        trainer={"num_steps": 2},
        debug={
            "dump": {"kinds": ["inference", "train", "reward", "pool", "weights"], "every_steps": 2}
        },
    )
    done = recipe.launch()
    assert done.code == 0, done.err
    assert done.run is not None
    names = {p.name for p in (done.run / "dumps").iterdir()}
    assert names == {f"{k}.msgpack" for k in ("inference", "train", "reward", "pool", "weights")}
