"""What a hostile or hurried user does: each mistake ends the run with words that say what to mend.

Every case holds the same: exit code not zero, the first cause last on the screen, summary.json
written once a run folder exists, and nothing left running.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nexrl.cli.main import main
from nexrl.testing.micro_recipe import Recipe

Fail = Callable[..., str]


@pytest.fixture
def fail(recipe: Recipe, capfd: pytest.CaptureFixture[str]) -> Fail:
    """Launch the recipe in this process; the last line on the screen of the run that failed."""

    def launch(*arguments: str) -> str:
        code = main(["launch", str(recipe.folder), *arguments])
        err = capfd.readouterr().err
        assert code == 1, err
        [path] = (recipe.folder / "runs").glob("*/*/summary.json")
        summary = json.loads(path.read_text())
        last = err.strip().splitlines()[-1]
        assert summary["status"] == "failed"
        assert summary["exit_reason"] == last
        assert path.with_name("report.html").exists()
        return last

    return launch


@pytest.fixture
def refuse(recipe: Recipe, capfd: pytest.CaptureFixture[str]) -> Fail:
    """Launch the recipe in this process; what a configuration error says before anything started."""

    def launch(*arguments: str) -> str:
        assert main(["launch", str(recipe.folder), *arguments]) == 2
        assert not (recipe.folder / "runs").exists()
        return capfd.readouterr().err

    return launch


# --- configuration and command line: refused before anything starts ----------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.max_step=10", ["trainer.max_step", "trainer.num_steps", "command line"]),
        ("trainer.num_steps=ten", ["trainer.num_steps", '"ten"', "integer"]),
        ("trainer.num_steps", ["trainer.num_steps", "key=value"]),
        ("data.batch_size=0", ["data.batch_size", "at least 1", "0"]),
        ("trainer.num_optimizer_steps=3", ["num_optimizer_steps", "batch_size", "3"]),
        ("logger=[tensorbord]", ["logger", "tensorbord", "tensorboard"]),
        ("resume=nowhere", ["resume", "nowhere"]),
    ],
)
def test_an_impossible_override_is_refused_with_key_and_value(
    recipe: Recipe, refuse: Fail, override: str, says: list[str]
) -> None:
    recipe.write()
    said = refuse(override)
    assert all(word in said for word in says), said


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"trainr": {"num_steps": 2}}, ["trainr", "trainer", "rl_train.yaml:"]),
        ({"trainer": {"num_step": 2}}, ["trainer.num_step", "num_steps", "rl_train.yaml:"]),
    ],
)
def test_an_unknown_override_of_a_stage_is_refused_with_its_line(
    recipe: Recipe, refuse: Fail, stage: dict[str, Any], says: list[str]
) -> None:
    recipe.write(stages=[{"name": "a", **stage}])
    said = refuse()
    assert all(word in said for word in says), said


def test_a_run_root_that_cannot_be_written_is_named(recipe: Recipe, refuse: Fail) -> None:
    (recipe.folder / "file").write_text("")
    recipe.write(launch={"run_root": str(recipe.folder / "file" / "deeper")})
    said = refuse()
    assert "launch.run_root" in said
    assert "file/deeper" in said


def test_a_folder_that_is_no_run_is_not_resumed(recipe: Recipe, refuse: Fail) -> None:
    recipe.write()
    stranger = recipe.folder / "photos"
    stranger.mkdir()
    assert "photos is not a run folder" in refuse("--resume", str(stranger))
    assert list(stranger.iterdir()) == []


def test_a_recipe_folder_that_does_not_exist_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["lunch"], ["serve", "reward"], ["launch", "--fast"]])
def test_wrong_usage_of_the_command_line_prints_usage(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: nexrl" in capfd.readouterr().err


def test_a_port_in_use_is_named_before_the_model_loads(
    micro_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """FR-155: the message names the setting and the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for service in ("inference", "train"):
            assert main(["serve", service, "--model", str(micro_model), "--port", port]) == 2
            said = capfd.readouterr().err
            assert f"127.0.0.1:{port}" in said
            assert f"service.{service}_service port" in said


# --- data ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (b"", ["rows.jsonl", "no rows"]),
        (b'{"question": "2+2?"}\n' * 20, ["rows.jsonl:1", "data.prompt_key: question"]),
        (b'{"prompt": "1"}\n' * 5 + b'{"answer": "4"}\n', ["rows.jsonl:6", "prompt"]),
        (b'{"prompt": "1+1="}\n{"prompt": "\xff\xfe"}\n', ["rows.jsonl:2", "not UTF-8", "0xff"]),
        (b'{"prompt": "1+1="}\n{"prompt": "1+\n', ["rows.jsonl:2", "not JSON"]),
        (b'{"prompt": 5}\n', ["rows.jsonl:1", "prompt", "5"]),
        (b'["1+1="]\n', ["rows.jsonl:1"]),
        (
            b'{"messages": [{"role": "user", "content": "1+1="}]}\n',
            ["chat template", "tokenizer"],
        ),
        (b'{"prompt": "%s", "answer": ""}\n' % (b"1+" * 4000), ["8000 tokens", "context 64"]),
    ],
    ids=[
        *("empty", "no_prompt_column", "one_row_without_prompt", "not_utf8", "not_json"),
        *("prompt_is_a_number", "row_is_a_list", "messages_without_chat_template", "too_long"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(
    recipe: Recipe, fail: Fail, rows: bytes, says: list[str]
) -> None:
    """FR-073: before any training."""
    (recipe.folder / "rows.jsonl").write_bytes(rows)
    recipe.write(data={"batch_size": 1})
    last = fail()
    assert all(word in last for word in says), last


@pytest.mark.slow
def test_a_data_file_that_does_not_exist_is_named_with_the_nearest_one(
    recipe: Recipe, fail: Fail
) -> None:
    recipe.write(data={"sources": [{"path": "row.jsonl"}]})
    last = fail()
    assert "data.sources.0.path" in last
    assert "did you mean 'rows.jsonl'" in last


# --- rewards ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise RuntimeError('no scorer today')", ["RuntimeError: no scorer today", "reward.py:2"]),
        ("return float('nan')", ["even_digits returned nan", "a finite number"]),
        ("return '0.5'", ["even_digits returned '0.5' of type str", "a finite number"]),
        ("return [0.5, 1.0]", ["even_digits returned 2 values, expected 1"]),
        ("return {'a': 'good'}", ["even_digits", "part 'a'", "'good'"]),
    ],
    ids=["raises", "nan", "string", "wrong_length", "part_is_a_string"],
)
def test_a_broken_reward_ends_the_run_with_its_words_and_is_never_a_zero(
    recipe: Recipe, fail: Fail, body: str, says: list[str]
) -> None:
    """FR-059, FR-061: also in a run that is shorter than the error policy's window."""
    recipe.code("reward.py", f"def even_digits(completion, **_):\n    {body}\n")
    recipe.write(trainer={"num_steps": 1})
    last = fail()
    assert all(word in last for word in ["all 16 rollouts", *says]), last
    [path] = (recipe.folder / "runs").glob("*/*/summary.json")
    ledger = json.loads(path.read_text())["ledger"]
    assert (ledger["trained"], sum(ledger["failed"].values())) == (0, 16)


# --- user code by path --------------------------------------------------------------------------


WORKER = {
    "type": "custom",
    "custom_rollout_worker_module_path": "worker.py",
    "custom_rollout_worker_class_name": "Mine",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (None, ["there is no file 'worker.py'", "custom_rollout_worker_module_path"]),
        ("class Mine:\n    def step(self, x)\n        pass\n", ["syntax error", "worker.py:2"]),
        ("import no_such_package\n", ["No module named 'no_such_package'", "worker.py:1"]),
        ("class Mined:\n    pass\n", ["worker.py has no 'Mine'", "did you mean Mined"]),
        ("class Mine:\n    pass\n", ["Mine", "RolloutWorker", "custom_rollout_worker_class_name"]),
    ],
    ids=["missing", "syntax_error", "import_error", "other_name", "not_a_worker"],
)
def test_a_worker_that_cannot_be_loaded_is_named_with_key_file_and_line(
    recipe: Recipe, fail: Fail, code: str | None, says: list[str]
) -> None:
    if code is not None:
        recipe.code("worker.py", code)
    recipe.write(rollout_worker=WORKER)
    last = fail()
    assert all(word in last for word in says), last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 'done'", ["Mine.train", "a mapping of metric names to numbers", "str"]),
        ("return None", ["Mine.train", "NoneType"]),
        ("return {'loss': 'low'}", ["Mine.train", "'loss'", "'low'"]),
        ("return {'x': 1 / 0}", ["Mine.train", "ZeroDivisionError", "trainer.py:4"]),
    ],
)
def test_a_trainer_that_returns_nonsense_is_named(
    recipe: Recipe, fail: Fail, body: str, says: list[str]
) -> None:
    recipe.code(
        "trainer.py",
        "from nexrl.trainer.trainer import Trainer\nclass Mine(Trainer):\n"
        f"    def train(self, trajectories):\n        {body}\n",
    )
    trainer = {
        "type": "custom",
        "custom_trainer_module_path": "trainer.py",
        "custom_trainer_class_name": "Mine",
    }
    recipe.write(trainer=trainer)
    last = fail()
    assert all(word in last for word in says), last


@pytest.mark.slow
def test_a_validation_that_always_fails_ends_the_run(recipe: Recipe, fail: Fail) -> None:
    recipe.code(
        "reward.py",
        "def even_digits(completion, answer, **_):\n    return 0.5 if answer else 1 / 0\n",
    )
    (recipe.folder / "held.jsonl").write_text('{"prompt": "1+1=", "answer": ""}\n' * 4)
    recipe.write(validate={"enabled": True, "sources": [{"path": "held.jsonl"}]})
    last = fail()
    assert "all 4 validation rollouts" in last
    assert "ZeroDivisionError" in last
    assert "reward.py:2" in last


# --- model and machine --------------------------------------------------------------------------


def own_model(recipe: Recipe) -> Path:
    """The recipe's model folder as a copy that a test may damage."""
    link = recipe.folder / "model"
    source = link.resolve()
    link.unlink()
    shutil.copytree(source, link)
    return link


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("*.safetensors", ["model", "model.safetensors"]),
        ("tokenizer*", ["tokenizer.json"]),
        ("config.json", ["service.train_service.model_path", "config.json"]),
    ],
)
def test_an_incomplete_model_folder_is_named_with_what_it_lacks(
    recipe: Recipe, fail: Fail, pattern: str, says: list[str]
) -> None:
    for file in own_model(recipe).glob(pattern):
        file.unlink()
    recipe.write()
    last = fail()
    assert all(word in last for word in says), last


@pytest.mark.slow
def test_damaged_weights_are_named_with_their_folder(recipe: Recipe, fail: Fail) -> None:
    [weights] = own_model(recipe).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:500])
    recipe.write()
    last = fail()
    assert last.startswith("ConfigError: ")
    assert "recipe/model" in last


@pytest.mark.slow
def test_a_logger_whose_package_is_absent_is_named_and_the_run_has_a_summary(
    recipe: Recipe, fail: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    recipe.write(logger=["wandb"])
    last = fail()
    assert "logger: wandb needs the package wandb" in last


@pytest.mark.slow
def test_an_engine_that_nobody_serves_is_named_with_its_url(recipe: Recipe, fail: Fail) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    recipe.write(service={"inference_service": {"placement": "process", "url": url}})
    last = fail()
    assert last.startswith("ServiceError: inference:")
    assert url in last


LIMITED = """
import resource, signal, sys
from nexrl.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(["launch", sys.argv[2]]))
"""


def launch_with_file_limit(recipe: Recipe, limit: int) -> subprocess.CompletedProcess[str]:
    """A run on a disk where no file can grow beyond `limit` bytes."""
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), str(recipe.folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_names_the_store(recipe: Recipe) -> None:
    recipe.write(trainer={"num_steps": 200})
    done = launch_with_file_limit(recipe, 300_000)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "store.sqlite cannot be written" in last
    assert "trajectory_pool.store.on_error" in last
    [summary] = (recipe.folder / "runs").glob("*/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_disk_that_was_full_from_the_start_leaves_the_cause_last(recipe: Recipe) -> None:
    """Not even the summary can be written, and that is not what is said last."""
    recipe.write()
    done = launch_with_file_limit(recipe, 500)
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert "File too large" in done.stderr.strip().splitlines()[-1]


# --- resume -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_changed_data_is_refused_on_resume(
    recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    """FR-130: a position in other data is no position."""
    recipe.write(trainer={"num_steps": 3, "checkpoint": {"every_steps": 1}})
    assert main(["launch", str(recipe.folder)]) == 0
    [folder] = (recipe.folder / "runs").glob("*/*/checkpoints")
    shutil.rmtree(max(folder.iterdir()))  # as if it had been stopped before its last step
    rows = (recipe.folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (recipe.folder / "rows.jsonl").write_text("".join(rows[:30]))
    capfd.readouterr()
    assert main(["launch", str(recipe.folder), "--resume"]) == 1
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert "data" in last
    assert "resume" in last


@pytest.mark.slow
def test_resuming_a_run_that_is_complete_does_nothing_and_says_so(
    recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe.write(trainer={"num_steps": 1})
    assert main(["launch", str(recipe.folder)]) == 0
    assert main(["launch", str(recipe.folder), "--resume"]) == 0
    assert "completed: every stage was done before this resume" in capfd.readouterr().out
