"""A recipe maker: a folder with a small valid rl_train.yaml and whatever files a test adds."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

VALID = """
experiment_name: demo
data:
  sources:
    - path: train.jsonl
  batch_size: 4
  rollout_repeat_n: 2
rollout_worker:
  reward: reward.py:exact
  sampling: {max_tokens: 8}
trainer:
  num_steps: 3
service:
  train_service:
    model_path: model
"""

REWARD = """
def exact(completion, *, answer, **columns):
    return float(completion.strip() == answer)
"""

RecipeMaker = Callable[..., Path]


@pytest.fixture
def make_recipe(tmp_path: Path) -> RecipeMaker:
    """`make_recipe(extra_yaml, files={"x.py": ...})` writes a recipe folder and returns it.

    `extra_yaml` goes into a file of its own on top of the valid one, at the line it has in the
    text, so a test can name the origin of an error.
    """

    def make(extra: str = "", *, files: dict[str, str] | None = None, base: str = VALID) -> Path:
        folder = tmp_path / "recipe"
        folder.mkdir(exist_ok=True)
        rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
        (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (folder / "reward.py").write_text(REWARD)
        (folder / "valid.yaml").write_text(base)
        text = textwrap.dedent(extra).lstrip("\n")
        (folder / "rl_train.yaml").write_text(f"defaults: valid.yaml\n{text}")
        for name, content in (files or {}).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(content))
        return folder

    return make
