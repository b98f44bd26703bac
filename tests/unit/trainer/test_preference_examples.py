"""The examples of preferences run as they stand, one after the other as their comments say."""

from __future__ import annotations

import json
from pathlib import Path

from nexrl.launch.run import launch

EXAMPLES = Path(__file__).parents[3] / "examples" / "preference"


def run(name: str, folder: Path, *overrides: str) -> list[str]:
    """Names of the metrics of two batches of an example."""
    short = ["trainer.num_steps=2", "data.batch_size=4", "logger=[]", "runtime_monitor.live=off"]
    assert launch(EXAMPLES / name, [f"launch.run_root={folder / name}", *short, *overrides]) == 0
    (metrics,) = (folder / name).glob("*/*/metrics.jsonl")
    return [n for line in metrics.read_text().splitlines() for n in json.loads(line)["metrics"]]


def test_the_examples_of_preferences_train(tmp_path: Path) -> None:
    for name, loss in (("dpo.yaml", "dpo"), ("dpo.yaml", "simpo"), ("kto.yaml", "kto")):
        found = run(name, tmp_path / loss, f"trainer.algorithm={loss}")
        assert {f"loss/{loss}", "preference/accuracy", "validation/margin"} <= set(found)


def test_the_reward_model_of_one_example_is_the_reward_of_the_next(tmp_path: Path) -> None:
    assert "loss/reward_model" in run("reward_model.yaml", tmp_path)
    published = sorted(tmp_path.glob("reward_model.yaml/*/*/publications/actor-*"))[-1]
    path = f"rollout_worker.reward_arguments.path={published}"
    assert "reward/mean" in run("with_reward_model.yaml", tmp_path, path)
