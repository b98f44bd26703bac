"""`nexrl algorithms`: every name is listed and shown, and what is shown is what runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.aggregation import AGGREGATIONS
from nexrl.algorithms.corrections import CORRECTION_PRESETS
from nexrl.algorithms.filters import GROUP_FILTERS
from nexrl.algorithms.kl import KL_ESTIMATORS
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.presets import PRESETS
from nexrl.cli.algorithms import FILTER_LINES, KL_LINES, LOSS_LINES, WIDTH, listing
from nexrl.cli.main import main
from nexrl.config.loader import load_run_config
from nexrl.config.rule import ADVANTAGE_SETTINGS
from nexrl.config.schema import AdvantageConfig

PARTS = (ADVANTAGES, LOSSES, AGGREGATIONS, KL_ESTIMATORS, CORRECTION_PRESETS, GROUP_FILTERS)
NAMES = list(dict.fromkeys(name for names in (PRESETS, *PARTS) for name in names))


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `nexrl algorithms show NAME` prints."""
    assert main(["algorithms", "show", name]) == 0
    return capsys.readouterr().out


def test_every_name_is_listed_with_one_line_of_words() -> None:
    first_words = [line.split()[0] for line in listing() if line.startswith("    ")]
    for names in (PRESETS, *PARTS):
        assert set(names) <= set(first_words)
    assert max(map(len, listing())) <= WIDTH


def test_the_lines_of_the_list_are_of_parts_that_exist() -> None:
    assert set(LOSS_LINES) == set(LOSSES)
    assert set(KL_LINES) == set(KL_ESTIMATORS)
    assert set(FILTER_LINES) == set(GROUP_FILTERS)
    assert {"name", *ADVANTAGE_SETTINGS} == set(AdvantageConfig.model_fields)
    readers = {name for users in ADVANTAGE_SETTINGS.values() for name in users}
    assert readers <= set(ADVANTAGES)


def test_experimental_presets_are_marked() -> None:
    marked = [line for line in listing() if line.startswith("    kimi (x)")]
    assert len(marked) == 2
    assert not any(line.startswith("    dapo (x)") for line in listing())


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_shown_within_the_width(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(name, capsys)
    assert name in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_preset_shows_its_formula_with_denominators_source_and_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown("grpo", capsys)
    for part in (
        "L = 1/R sum 1/n [",
        "R rows",
        "source       Shao et al. 2024",
        "a frozen reference",
    ):
        assert part in text


def test_a_name_of_several_parts_shows_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("reinforce", capsys)
    assert [f"{kind} reinforce" in text for kind in ("preset", "advantage", "loss")] == [True] * 3


@pytest.mark.parametrize("name", PRESETS)
def test_the_expansion_can_be_pasted_into_a_recipe_and_changes_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe: dict[str, dict[str, Any]] = {
        "data": {"sources": [{"path": "a.jsonl"}]},
        "service": {"train_service": {"model_path": "m"}},
        "rollout_worker": {"reward": "reward.py:f"},
    }
    needed = ["trainer.algorithm.teacher.path=t"] if name.startswith("distill") else []
    if name in ("gigpo", "step_returns"):
        prefix = "rollout_worker.custom_rollout_worker"
        needed = [f"{prefix}_module_path=w.py", f"{prefix}_class_name=W"]
        needed.append("rollout_worker.type=custom")
    (tmp_path / "rl_train.yaml").write_text(yaml.safe_dump(recipe))
    by_name = load_run_config(tmp_path, [f"trainer.algorithm={name}", *needed]).config

    pasted = yaml.safe_load(shown(name, capsys).split("\n\n")[1])
    for section, settings in pasted.items():
        recipe[section] = {**recipe.get(section, {}), **settings}
    (tmp_path / "rl_train.yaml").write_text(yaml.safe_dump(recipe))
    assert load_run_config(tmp_path, needed).config == by_name


def test_an_unknown_name_is_answered_with_the_nearest_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["algorithms", "show", "cipso"]) == 2
    assert capsys.readouterr().err == "nothing is named 'cipso'; did you mean cispo?\n"
    assert main(["algorithms", "show", "qqqqqq"]) == 2
    assert "`nexrl algorithms` lists all" in capsys.readouterr().err


def test_nothing_heavy_is_loaded() -> None:
    program = (
        "import sys; from nexrl.cli.main import main; main(['algorithms']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
