"""Resume equals not stopping."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from nexrl.testing.micro_recipe import Recipe

KILLER = '''
import os, signal
from pathlib import Path
from reward_base import even_digits as base

CALLS = 0

def even_digits(completion, **_):
    """Kills its own process at a chosen call, once."""
    global CALLS
    CALLS += 1
    flag = Path(__file__).with_name("killed")
    if CALLS == {at} and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return base(completion)
'''

KILLING_TRAINER = '''
import os, signal
from pathlib import Path
from nexrl.trainer.policy_gradient import PolicyGradientTrainer

class Killing(PolicyGradientTrainer):
    """Dies after the weights of batch {at} have changed and before they are published."""

    async def train(self, trajectories):
        metrics = await super().train(trajectories)
        flag = Path(__file__).with_name("killed")
        if self.version == {at} and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return metrics
'''

DETERMINISTIC: dict[str, Any] = {
    "deterministic": True,
    "trainer": {
        "num_steps": 5,
        "checkpoint": {"every_steps": 2},
        "algorithm": {"advantage": {"std": "none"}},
    },
    "data": {"batch_size": 2, "rollout_repeat_n": 4},
}


def uninterrupted(recipe: Recipe, changes: Mapping[str, Any] = DETERMINISTIC) -> dict[str, str]:
    recipe.write(**changes)
    done = recipe.launch()
    assert done.code == 0, done.err
    return done.final_checksums


@pytest.mark.slow
def test_two_runs_with_one_seed_end_with_the_same_bits(
    make_recipe: Callable[[str], Recipe],
) -> None:
    first, second = uninterrupted(make_recipe("a")), uninterrupted(make_recipe("b"))
    assert first == second


@pytest.mark.slow
def test_another_seed_ends_elsewhere(make_recipe: Callable[[str], Recipe]) -> None:
    other = make_recipe("b")
    other.write(**DETERMINISTIC, seed=8)
    done = other.launch()
    assert done.code == 0, done.err
    assert done.final_checksums != uninterrupted(make_recipe("a"))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("call", [3, 17, 31])
def test_a_run_killed_in_the_middle_of_rollouts_resumes_to_the_same_weights(
    make_recipe: Callable[[str], Recipe], call: int
) -> None:
    """FR-130, FR-131, FR-133: no item is lost or seen twice. A batch is 8 reward calls here."""
    expected = uninterrupted(make_recipe("whole"))
    recipe = make_recipe("killed")
    recipe.code("reward_base.py", (recipe.folder / "reward.py").read_text())
    recipe.code("reward.py", KILLER.format(at=call))
    recipe.write(**DETERMINISTIC)
    assert recipe.launch().code == -signal.SIGKILL
    done = recipe.launch("--resume")
    assert done.code == 0, done.err
    assert done.final_checksums == expected
    assert done.summary["steps"] == 5


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("version", "algorithm"),
    [(0, {}), (3, {}), (3, {"preset": "ppo", "critic": {"lr": 1e-2}, "kl": {"coefficient": 0.1}})],
    ids=["first", "fourth", "fourth with a critic and a reference"],
)
def test_a_run_killed_between_step_and_publish_resumes_to_the_same_weights(
    make_recipe: Callable[[str], Recipe], version: int, algorithm: dict[str, Any]
) -> None:
    trainer = {**DETERMINISTIC["trainer"]}
    if algorithm:
        trainer["algorithm"] = algorithm
    changes = {**DETERMINISTIC, "trainer": trainer}
    expected = uninterrupted(make_recipe("whole"), changes)
    recipe = make_recipe("killed")
    recipe.code("trainer.py", KILLING_TRAINER.format(at=version))
    killing = {
        **trainer,
        "type": "custom",
        "custom_trainer_module_path": "trainer.py",
        "custom_trainer_class_name": "Killing",
    }
    recipe.write(**{**changes, "trainer": killing})
    assert recipe.launch().code == -signal.SIGKILL
    done = recipe.launch("--resume")
    assert done.code == 0, done.err
    assert done.final_checksums == expected


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("last", [3, 5, 6])
def test_a_run_of_three_families_resumes_in_any_stage_to_the_same_weights(
    make_recipe: Callable[[str], Recipe], last: int
) -> None:
    """sft -> dpo -> ppo, cut after a batch of dpo, the critic's warm-up, and a batch of ppo."""
    recipe = make_recipe("chain")
    pair = json.dumps({"prompt": "1+1=", "chosen": "22", "rejected": "77"})
    (recipe.folder / "pairs.jsonl").write_text(f"{pair}\n" * 8)
    ppo = {
        "preset": "ppo",
        "kl": {"coefficient": 0.1, "placement": "reward", "estimator": "k1"},
        "critic": {"warmup_batches": 1, "lr": 1e-2},
        "entropy": {"target": 1.0},
    }
    recipe.write(
        deterministic=True,
        trainer={"num_steps": 2, "checkpoint": {"every_steps": 1, "keep_last": 10}},
        stages=[
            offline_stage("imitate", "sft", "supervised", "rows.jsonl"),
            offline_stage("prefer", "dpo", "preference", "pairs.jsonl"),
            {
                "name": "reward",
                "trainer": {"algorithm": ppo, "num_steps": 3, "num_optimizer_steps": 2},
                "rollout_worker": {"sampling": {"temperature": 0.7}},
            },
        ],
    )
    whole = recipe.launch()
    assert whole.code == 0, whole.err
    assert whole.run is not None
    expected = whole.final_checksums
    for folder in (whole.run / "checkpoints").glob("step-*"):
        if int(folder.name.split("-")[1]) > last:
            folder.rename(whole.run / folder.name)
    resumed = recipe.launch(f"resume={whole.run}")
    assert resumed.code == 0, resumed.err
    assert resumed.final_checksums == expected


def offline_stage(name: str, algorithm: str, worker: str, rows: str) -> dict[str, Any]:
    return {
        "name": name,
        "trainer": {"algorithm": algorithm},
        "rollout_worker": {"type": worker, "reward": None},
        "data": {"rollout_repeat_n": 1, "sources": [{"path": rows}]},
    }
