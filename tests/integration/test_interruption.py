"""Stopping a run in the middle: Ctrl-C, SIGTERM, a dead service. Nothing hangs or is left behind."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from nexrl.testing.micro_recipe import Recipe, Running, has_ended

SERVED: dict[str, Any] = {
    "service": {
        "train_service": {"placement": "process"},
        "inference_service": {"placement": "process"},
    }
}
ENDLESS: dict[str, Any] = {"trainer": {"num_steps": 100_000, "checkpoint": {"every_steps": 2}}}
TELL = """
import sys, time

def tell(word):
    print(word, flush=True)
    time.sleep(0.5)
"""
TELLING_REWARD = (
    "from tell import tell\ndef even_digits(completion, **_):\n    {body}\n    return 0.5\n"
)
TELLING_TRAINER = """
from tell import tell
from nexrl.trainer.policy_gradient import PolicyGradientTrainer

class Telling(PolicyGradientTrainer):
    async def train(self, trajectories):
        tell("training now")
        return await super().train(trajectories)
"""
TELLING_MODEL = """
import shutil
from pathlib import Path
from tell import tell

def make(folder, seed):
    tell("starting now")
    shutil.copytree(Path(__file__).with_name("model"), folder, dirs_exist_ok=True)
"""

ENDLESS_UPLOAD = """
import threading

run = None

class Settings:
    def __init__(self, **settings): pass

class Run:
    def define_metric(self, name, **settings): pass
    def log(self, metrics): pass
    def finish(self):
        print("uploading now", flush=True)
        threading.Event().wait()

def init(**settings):
    return Run()
"""


def start_up(recipe: Recipe) -> Running:
    recipe.code("factory.py", TELLING_MODEL)
    model = {"model_path": None, "model_factory": "factory.py:make"}
    recipe.write(service={"train_service": model})
    return recipe.start()


def rollouts(recipe: Recipe) -> Running:
    recipe.code("reward.py", TELLING_REWARD.format(body='tell("rollouts now")'))
    recipe.write()
    return recipe.start()


def validation(recipe: Recipe) -> Running:
    recipe.code("reward.py", TELLING_REWARD.format(body='tell("validation now")'))
    recipe.write(validate={"enabled": True, "sources": [{"path": "rows.jsonl"}]})
    return recipe.start()


def training(recipe: Recipe) -> Running:
    recipe.code("trainer.py", TELLING_TRAINER)
    trainer = {"custom_trainer_module_path": "trainer.py", "custom_trainer_class_name": "Telling"}
    recipe.write(trainer={"type": "custom", **trainer})
    return recipe.start()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "word"),
    [
        (start_up, "starting now"),
        (rollouts, "rollouts now"),
        (validation, "validation now"),
        (training, "training now"),
    ],
)
def test_ctrl_c_in_any_phase_ends_the_run_with_a_summary(
    recipe: Recipe, phase: Any, word: str
) -> None:
    recipe.code("tell.py", TELL)
    running = phase(recipe)
    running.read_until(word)
    running.process.send_signal(signal.SIGINT)
    done = running.end()
    assert done.code == 130, done.err
    assert "interrupted: stopped by SIGINT" in done.out
    assert done.err == ""
    assert done.summary["status"] == "interrupted"


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_a_tracker_that_still_uploads(recipe: Recipe) -> None:
    recipe.code("wandb.py", ENDLESS_UPLOAD)
    recipe.write(logger=["wandb"], trainer={"num_steps": 1})
    running = recipe.start()
    running.read_until("uploading now")
    running.process.send_signal(signal.SIGINT)
    done = running.end()
    assert done.code == 130, done.err
    assert done.summary["steps"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_cleanly_leaves_no_process_and_the_run_can_be_continued(
    recipe: Recipe, number: signal.Signals
) -> None:
    recipe.write(**ENDLESS, **SERVED)
    running = recipe.start()
    running.read_until("step 3")
    children = running.children()
    assert len(children) == 2
    running.process.send_signal(number)
    done = running.end()
    assert done.code == 130, done.err
    assert f"stopped by {number.name}" in done.out
    assert done.err == ""
    assert all(has_ended(pid, timeout_s=0) for pid in children)
    assert done.summary["ledger"]["in_flight"] == 0
    done = recipe.launch("--resume", "trainer.num_steps=4")
    assert done.code == 0, done.err
    assert done.summary["steps"] >= 4


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_still_leaves_no_process(recipe: Recipe) -> None:
    recipe.code("tell.py", TELL)
    recipe.code("reward.py", TELLING_REWARD.format(body='tell("rollouts now")'))
    recipe.write(**ENDLESS, **SERVED)
    running = recipe.start()
    running.read_until("rollouts now")
    children = running.children()
    for _ in range(2):
        running.process.send_signal(signal.SIGINT)
    assert running.end().code == 130
    assert len(children) == 2
    assert all(has_ended(pid) for pid in children)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["inference", "train"])
def test_a_service_that_dies_ends_the_run_with_its_name_and_signal(
    recipe: Recipe, victim: str
) -> None:
    """FR-167, and an engine that dies in mid-request."""
    recipe.write(**ENDLESS, **SERVED)
    running = recipe.start()
    running.read_until("step 1")
    children = running.children()
    [pid] = [p for p, command in children.items() if f"services.{victim}.server" in command]
    os.kill(pid, signal.SIGKILL)
    done = running.end()
    assert done.code == 1
    assert victim in done.err
    assert "SIGKILL" in done.err
    assert done.summary["status"] == "failed"
    assert victim in done.summary["exit_reason"]
    assert all(has_ended(pid, timeout_s=0) for pid in children)
