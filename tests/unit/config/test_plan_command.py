"""`nexrl plan` on real recipe folders: what it prints, what it refuses, and its exit code."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.cli.main import main
from nexrl.testing.tiny_models import make_micro_model

MakeRecipe = Callable[..., Path]
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(
    make_recipe: MakeRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Plan:
    """`plan(extra_yaml, *overrides, files=...)`: exit code, standard output and standard error of
    `nexrl plan` on the valid recipe, which has a model folder here."""
    monkeypatch.chdir(tmp_path)

    def run(
        extra: str = "",
        *overrides: str,
        files: dict[str, str] | None = None,
        provenance: bool = False,
    ) -> tuple[int, str, str]:
        recipe = make_recipe(extra, files=files)
        make_micro_model(recipe / "model")
        flags = ["--provenance"] if provenance else []
        code = main(["plan", str(recipe), *overrides, *flags])
        return code, *capsys.readouterr()

    return run


def test_a_good_recipe_prints_its_plan_and_a_rendered_prompt(plan: Plan) -> None:
    code, out, err = plan()
    assert (code, err) == (0, "")
    assert "train (6 items, 6 read)" in out
    assert "'0+1='" in out
    assert "train: AdamW moments" in out
    assert "versions                    3, 2.00 epochs of 6 items" in out


def test_a_configuration_error_is_printed_with_exit_code_2(plan: Plan) -> None:
    code, out, err = plan("", "trainer.max_step=10")
    assert (code, out) == (2, "")
    assert err == (
        "configuration error: trainer.max_step is not a key; did you mean trainer.num_steps? "
        "(command line)\n"
    )


def test_rows_without_the_prompt_column_are_refused_with_a_way_to_map_it(plan: Plan) -> None:
    """FR-073: missing fields, the expected schema and the mapping, before any heavy work."""
    files = {"train.jsonl": '{"question": "2+2?", "answer": "4"}\n'}
    code, _, err = plan(files=files)
    assert code == 2
    assert "neither a prompt (data.prompt_key: prompt)" in err
    assert "data.prompt_key: question" in err
    assert plan("", "data.prompt_key=question", files=files)[0] == 0


def test_a_reward_that_needs_a_column_the_rows_lack_is_refused(plan: Plan) -> None:
    """FR-073"""
    code, _, err = plan(files={"reward.py": "def exact(text, gold): return 1.0\n"})
    assert code == 2
    assert "rollout_worker.reward: exact needs `gold`" in err


def test_the_reward_is_tried_on_a_rows_own_answer_where_a_run_calls_it(plan: Plan) -> None:
    """FR-059: signals fail outside the main thread; the start-up probe shows it."""
    reward = (
        "import signal\n"
        "def exact(text, answer):\n"
        "    signal.signal(signal.SIGALRM, signal.SIG_DFL)\n"
        "    return float(text == answer)\n"
    )
    code, out, _ = plan(files={"reward.py": reward})
    assert code == 0
    assert "on the first row's own answer '1'" in out
    assert "signal only works in main thread" in out
    _, out, _ = plan("", "rollout_worker.reward_isolation=process", files={"reward.py": reward})
    assert "own answer" not in out


def test_a_zero_for_the_own_answer_is_a_warning(plan: Plan) -> None:
    """FR-059: one known-good pair is scored."""
    code, out, _ = plan(files={"reward.py": "def exact(text, answer): return 0.0\n"})
    assert code == 0
    assert "gives 0 to the first row's own answer '1'" in out


@pytest.mark.parametrize(
    ("worker", "sentence"),
    [
        ("class Worker(:\n", "syntax error"),
        ("import no_such_package\n", "ModuleNotFoundError"),
        ("class Worker: ...\n", "must be a subclass of nexrl.rollout.RolloutWorker"),
        ("class Wrker: ...\n", "did you mean Wrker?"),
    ],
)
def test_a_wrong_worker_is_refused_with_its_file(plan: Plan, worker: str, sentence: str) -> None:
    code, _, err = plan(
        "",
        "rollout_worker.type=custom",
        "rollout_worker.custom_rollout_worker_module_path=worker.py",
        "rollout_worker.custom_rollout_worker_class_name=Worker",
        files={"worker.py": worker},
    )
    assert code == 2
    assert sentence in err
    assert "worker.py" in err


def test_a_custom_worker_may_give_its_reward_columns_of_its_own(plan: Plan) -> None:
    worker = """
    from nexrl.rollout.rollout_worker import RolloutWorker

    class Worker(RolloutWorker):
        def step(self, data_item): ...
    """
    code, _, err = plan(
        "",
        "rollout_worker.type=custom",
        "rollout_worker.custom_rollout_worker_module_path=worker.py",
        "rollout_worker.custom_rollout_worker_class_name=Worker",
        files={"worker.py": worker, "reward.py": "def exact(text, finish_reason): return 1.0"},
    )
    assert (code, err) == (0, "")


def test_every_problem_is_shown_in_one_run(plan: Plan) -> None:
    code, _, err = plan(
        "",
        "service.train_service.model_path=gone",
        "data.sources.0.path=gone.jsonl",
        "rollout_worker.reward=gone.py:f",
        "resume=gone",
    )
    assert code == 2
    for part in ("no config.json in", "gone.jsonl", "gone.py", "no run folder 'gone'"):
        assert part in err


def test_an_endpoint_where_nobody_listens_is_named_with_its_key(plan: Plan) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        code, _, err = plan("", f"service.inference_service.url={url}")
    assert code == 2
    assert "service.inference_service.url: nobody answers at http://127.0.0.1:" in err


def test_a_device_that_is_not_there_is_refused(plan: Plan) -> None:
    """FR-157: asking for more devices than there are fails at once."""
    code, _, err = plan("", "service.train_service.device=cuda:99")
    assert code == 2
    assert "service.train_service.device is cuda:99, and this machine has" in err


def test_messages_without_a_chat_template_are_refused(plan: Plan) -> None:
    row = '{"messages": [{"role": "user", "content": "1+1"}], "answer": "2"}\n'
    code, _, err = plan(files={"train.jsonl": row})
    assert code == 2
    assert "has no chat template but the data has messages" in err


PAIRS = '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n'
DPO = ("trainer.algorithm=dpo", "rollout_worker.reward=null", "data.rollout_repeat_n=1")


def test_rows_of_pairs_are_made_by_the_worker_that_a_run_uses(plan: Plan) -> None:
    code, out, err = plan("", *DPO, files={"train.jsonl": PAIRS * 4})
    assert (code, err) == (0, "")
    assert "tokens per version          about 48 = 8 x 6, the longest row read" in out


@pytest.mark.parametrize(
    ("algorithm", "row", "sentence"),
    [
        ("dpo", {"chosen": "2", "rejected": "2"}, "hold the same response ('2'): nothing is pref"),
        ("dpo", {"chosen": "", "rejected": "2"}, "must be a non-empty string, got ''"),
        ("dpo", {"chosen": 2, "rejected": "3"}, "must be a non-empty string, got 2"),
        ("dpo", {"chosen": "2", "rejected": "3", "margin": "big"}, "must be a finite number, got"),
        ("dpo", {"chosen": "2"}, "has no column 'rejected'; its columns are chosen, prompt"),
        ("kto", {"answer": "2", "label": "true"}, "must be true (desirable) or false, got 'true'"),
        ("process_reward_model", {"steps": "2", "label": [1]}, "must be a non-empty list of strin"),
        ("process_reward_model", {"steps": ["2"], "label": []}, "one label for each of the 1 step"),
        ("process_reward_model", {"steps": ["2"], "label": [3]}, "a probability in [0, 1], got 3"),
        ("sft", {"reply": "2"}, "a supervised row needs a non-empty string in column 'answer'"),
    ],
    ids=str,
)
def test_rows_that_cannot_be_trained_are_refused_with_their_line(
    plan: Plan, algorithm: str, row: dict[str, object], sentence: str
) -> None:
    lines = json.dumps({"prompt": "1+1=", **row}) + "\n"
    overrides = (f"trainer.algorithm={algorithm}", "rollout_worker.reward=null")
    code, _, err = plan("", *overrides, files={"train.jsonl": lines})
    assert code == 2
    assert "train.jsonl:1" in err
    assert sentence in err


def test_one_row_among_others_that_cannot_be_trained_is_a_warning(plan: Plan) -> None:
    equal = '{"prompt": "1+1=", "chosen": "2", "rejected": "2"}\n'
    code, out, _ = plan("", *DPO, files={"train.jsonl": PAIRS * 2 + equal})
    assert code == 0
    assert "1 of the 3 rows read cannot be trained and count as failed rollouts" in out
    assert "train.jsonl:3: columns 'chosen' and 'rejected' hold the same response" in out


def test_nothing_left_of_the_data_is_found_before_a_run(plan: Plan) -> None:
    code, _, err = plan("", "data.max_prompt_tokens=1")
    assert code == 2
    assert "none of 6 rows is left" in err


OWN = """
def loss(outputs, inputs): return outputs["logprobs"]
def advantage(inputs): return inputs.rewards
number = 3
"""


@pytest.mark.parametrize(
    ("part", "name", "sentence"),
    [
        ("loss", "loss", "must accept (outputs, inputs, settings)"),
        ("advantage", "advantage", "must accept (inputs, settings)"),
        ("loss", "number", "is 3 of type int; a function or class is expected"),
        ("advantage", "advantag", "did you mean advantage?"),
    ],
)
def test_a_part_of_ones_own_is_refused_with_the_line_that_names_it(
    plan: Plan, part: str, name: str, sentence: str
) -> None:
    settings = f"trainer: {{algorithm: {{{part}: 'own.py:{name}'}}}}\n"
    code, _, err = plan(settings, files={"own.py": OWN})
    assert code == 2
    assert f"trainer.algorithm.{part}.name: " in err
    assert sentence in err
    assert err.endswith("(rl_train.yaml:2)\n")


def test_a_syntax_error_in_a_loss_is_told_with_its_line(plan: Plan) -> None:
    code, _, err = plan("", "trainer.algorithm.loss=own.py:f", files={"own.py": "x = 1\ndef f(:\n"})
    assert code == 2
    assert "syntax error" in err
    assert "own.py:2" in err


def distilled(teacher: object) -> tuple[str, ...]:
    """Overrides that ask for a teacher."""
    return ("trainer.algorithm=distill", f"trainer.algorithm.teacher.path={teacher}")


def test_a_teacher_is_looked_at_and_counted(plan: Plan, tmp_path: Path) -> None:
    code, out, err = plan("", *distilled(make_micro_model(tmp_path / "teacher")))
    assert (code, err) == (0, "")
    assert "train: teacher policy" in out


def test_a_teacher_that_is_not_there_is_refused(plan: Plan) -> None:
    code, _, err = plan("", *distilled("nowhere"))
    assert code == 2
    assert "trainer.algorithm.teacher.path: no config.json in nowhere" in err


def test_a_teacher_with_another_tokenizer_is_refused(plan: Plan, tmp_path: Path) -> None:
    teacher = make_micro_model(tmp_path / "teacher")
    file = teacher / "tokenizer.json"
    file.write_text(file.read_text().replace('"+"', '"-"'))
    code, _, err = plan("", *distilled(teacher))
    assert code == 2
    assert "trainer.algorithm.teacher.path: the tokenizer of" in err
    assert "accepted: a teacher with the policy's own tokenizer" in err


MADE_MODEL = (
    "service.train_service.model_path=null",
    "service.train_service.model_factory=model.py:make",
)


def test_a_factory_that_offers_its_tokenizer_is_planned_without_making_the_model(
    plan: Plan,
) -> None:
    factory = """
    from nexrl.testing.tiny_models import make_micro_model

    def make(folder, seed):
        raise AssertionError("the plan must not make the model")

    make.tokenizer = make_micro_model
    """
    code, out, _ = plan("", *MADE_MODEL, files={"model.py": factory})
    assert code == 0
    assert "first prompt" in out


def test_a_factory_of_another_signature_is_refused(plan: Plan) -> None:
    code, _, err = plan("", *MADE_MODEL, files={"model.py": "def make(folder): ...\n"})
    assert code == 2
    assert "model.py:make(folder) must accept (folder, seed)" in err


def test_provenance_lists_every_value_with_its_origin_and_no_secret(plan: Plan) -> None:
    code, out, _ = plan(
        "stages: [{name: a, trainer: {num_steps: 9}}, {name: b}]",
        "seed=4",
        "rollout_worker.arguments={token: hunter2, 'a.b': 1, password: [hunter2]}",
        provenance=True,
    )
    assert code == 0
    assert "  seed = 4  (command line)" in out
    assert "  data.batch_size = 4  (valid.yaml:6)" in out
    assert '  weight.mode = "sync"  (default)' in out
    assert "in stage a\n  trainer.num_steps = 9  (rl_train.yaml:2)" in out
    assert "in stage b" not in out
    assert "hunter2" not in out


def test_planning_loads_no_torch(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    make_micro_model(recipe / "model")
    program = (
        "import sys; from pathlib import Path; from nexrl.cli.plan import run_plan\n"
        f"planned = run_plan(Path({str(recipe)!r}), [], provenance=False)\n"
        "sys.exit(not planned or ('torch' in sys.modules) or ('transformers' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_broken_row_behind_the_sampled_ones_is_found_while_counting(plan: Plan) -> None:
    rows = '{"prompt": "1+1=", "answer": "2"}\n' * 25 + "{broken\n"
    code, _, err = plan(files={"train.jsonl": rows})
    assert code == 2
    assert "train.jsonl:26" in err


def test_damaged_weights_are_named(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe()
    weights = next(make_micro_model(recipe / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:20])
    overrides = [f"launch.run_root={tmp_path}"]
    assert main(["plan", str(recipe), *overrides]) == 2
    assert f"model folder {recipe / 'model'} cannot be read" in capsys.readouterr().err
