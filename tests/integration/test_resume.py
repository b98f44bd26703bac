"""Resume equals not stopping; Ctrl-C stops cleanly; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
from nexrl.trainer.grpo import GrpoTrainer

class Killing(GrpoTrainer):
    """Dies after the weights of batch {at} have changed and before they are published."""

    async def train(self, trajectories):
        metrics = await super().train(trajectories)
        flag = Path(__file__).with_name("killed")
        if self.version == {at} and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return metrics
'''

DETERMINISTIC = {
    "deterministic": True,
    "trainer": {"num_steps": 5, "checkpoint": {"every_steps": 2}, "algorithm": {"std": "none"}},
    "data": {"batch_size": 2, "rollout_repeat_n": 4},
}


def uninterrupted(recipe: Recipe) -> dict[str, str]:
    recipe.write(**DETERMINISTIC)
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
@pytest.mark.parametrize("version", [0, 3])
def test_a_run_killed_between_step_and_publish_resumes_to_the_same_weights(
    make_recipe: Callable[[str], Recipe], version: int
) -> None:
    expected = uninterrupted(make_recipe("whole"))
    recipe = make_recipe("killed")
    recipe.code("trainer.py", KILLING_TRAINER.format(at=version))
    trainer = {
        **DETERMINISTIC["trainer"],  # type: ignore[dict-item]
        "type": "custom",
        "custom_trainer_module_path": "trainer.py",
        "custom_trainer_class_name": "Killing",
    }
    recipe.write(**{**DETERMINISTIC, "trainer": trainer})
    assert recipe.launch().code == -signal.SIGKILL
    done = recipe.launch("--resume")
    assert done.code == 0, done.err
    assert done.final_checksums == expected


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(p) for p in text.split()]


def start(recipe: Recipe, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "nexrl.cli.main", "launch", str(recipe.folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=recipe.folder,
    )


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(
        f"the run ended before it said {word!r}: {process.stderr and process.stderr.read()}"
    )


SERVED = {
    "service": {
        "train_service": {"placement": "process"},
        "inference_service": {"placement": "process"},
    }
}


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_leaves_no_process_and_can_be_continued(recipe: Recipe) -> None:
    trainer = {"num_steps": 100_000, "checkpoint": {"every_steps": 2}}
    recipe.write(trainer=trainer, **SERVED)
    process = start(recipe)
    read_until(process, "step 3")
    children = children_of(process.pid)
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=15)
    assert process.returncode == 130, err
    assert "interrupted" in out
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    done = recipe.launch("--resume", "trainer.num_steps=4")
    assert done.code == 0, done.err
    assert done.summary["steps"] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["inference", "train"])
def test_a_service_that_dies_ends_the_run_with_its_name_and_signal(
    recipe: Recipe, victim: str
) -> None:
    """FR-167, and an engine that dies in mid-request."""
    recipe.write(trainer={"num_steps": 100_000}, **SERVED)
    process = start(recipe)
    read_until(process, "step 1")
    for pid in children_of(process.pid):
        if f"services.{victim}.server" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert victim in err
    assert "SIGKILL" in err
