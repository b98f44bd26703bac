"""Resume equals not stopping."""

from __future__ import annotations

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
