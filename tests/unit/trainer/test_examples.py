"""Every example runs as it stands, for a batch or two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nexrl.launch.run import launch

EXAMPLES = Path(__file__).parents[3] / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/rl_train.yaml"))


@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_trains(tmp_path: Path, name: str) -> None:
    overrides = [
        f"launch.run_root={tmp_path}",
        "trainer.num_steps=2",
        "data.batch_size=4",
        "logger=[]",
        "runtime_monitor.live=off",
    ]
    assert launch(EXAMPLES / name, overrides) == 0
    (metrics,) = tmp_path.glob(f"{name}/*/metrics.jsonl")
    steps = [
        row
        for line in metrics.read_text().splitlines()
        if "grad_norm" in (row := json.loads(line)).get("metrics", row)
    ]
    assert len(steps) == 2


def test_there_is_a_documented_example_of_each_thing_that_a_user_may_write() -> None:
    page = (EXAMPLES.parent / "docs" / "own-code.md").read_text()
    own = ("own_loss", "own_advantage", "own_filter", "own_trainer", "client_side_loss")
    assert set(own) <= set(FOLDERS)
    assert [name for name in own if f"| `{name}` |" not in page] == []
