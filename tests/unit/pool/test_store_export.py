"""A store as JSONL, as Parquet, and on the screen."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from nexrl.cli.store import add_store_commands
from nexrl.errors import ConfigError, StoreError
from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.testing.makers import make_draw, make_record, make_row


@pytest.fixture
async def run_folder(tmp_path: Path) -> Path:
    """A run with a trained rollout, one of two rows, and a failed one."""
    store = TrajectoryStore(tmp_path / "store.sqlite")
    draws = [make_draw(i, source="sums") for i in range(3)]
    records = [
        make_record(draws[0], reward=0.75, reward_parts={"exact": 0.75}),
        make_record(draws[1], rows=(make_row(), make_row(logprobs=None))),
        make_record(draws[2], status="failed"),
    ]
    for draw, record in zip(draws, records, strict=True):
        store.append(record, draw=draw, policy="actor")
    store.append_outcomes([1, 2], "trained", "", version=4)
    store.append_outcomes([3], "failed", "infrastructure/ServiceError", version=4)
    await store.aclose()
    return tmp_path


def nexrl_store(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_store_commands(parser.add_subparsers())
    args = parser.parse_args(["store", *map(str, arguments)])
    status: int = args.run(args)
    return status


def test_jsonl_has_a_line_for_each_trajectory_and_each_failure(run_folder: Path) -> None:
    output = run_folder / "out.jsonl"
    assert nexrl_store("export", run_folder, "--output", output) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["item_id"] for line in lines] == ["i0", "i1", "i2"]
    assert lines[0]["reward_parts"] == {"exact": 0.75}
    assert lines[0]["rows"][0]["token_ids"] == [11, 12, 5, 6, 2]
    assert lines[0]["rows"][0]["loss_mask"] == [False, False, True, True, True]
    assert lines[0]["rows"][0]["versions"] == [{"start": 2, "end": 5, "version": "actor@0.0"}]
    turn = {"start": 2, "end": 5, "finish_reason": "eos", "reward": None, "anchor": ""}
    assert lines[0]["rows"][0]["turns"] == [turn]
    assert lines[1]["rows"][1]["behavior_logprobs"] is None
    assert lines[2]["failure"] == "infrastructure: engine answered 500"
    assert (lines[2]["rows"], lines[2]["outcome"]) == (None, "failed")


def test_parquet_holds_the_same_lines(run_folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("jsonl", "parquet"):
        nexrl_store("export", run_folder, "--format", name, "--output", run_folder / f"out.{name}")
    lines = [json.loads(line) for line in (run_folder / "out.jsonl").read_text().splitlines()]
    table = parquet.read_table(run_folder / "out.parquet").to_pylist()
    assert list(table[0]) == list(lines[0])
    for line, row in zip(lines, table, strict=True):
        for name in ("item_id", "reward", "outcome_version", "failure"):
            assert row[name] == line[name]
    for name in ("sampled", "turns"):
        assert table[1]["rows"][0][name] == lines[1]["rows"][0][name]
    assert json.loads(table[0]["reward_parts"]) == {"exact": 0.75}


def test_an_export_can_be_of_one_status_and_may_be_empty(run_folder: Path) -> None:
    output = run_folder / "out.jsonl"
    nexrl_store("export", run_folder, "--output", output, "--status", "failed")
    assert [json.loads(s)["item_id"] for s in output.read_text().splitlines()] == ["i2"]
    pytest.importorskip("pyarrow")
    nexrl_store(
        "export", run_folder, "--format", "parquet", "--output", output, "--status", "cancelled"
    )
    assert output.read_bytes().startswith(b"PAR1")


def test_parquet_without_pyarrow_names_the_extra(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"nexrl\[parquet\]"):
        nexrl_store("export", run_folder, "--format", "parquet", "--output", run_folder / "o")


def test_show_prints_counts_rewards_and_the_newest_rollout(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nexrl_store("show", run_folder / "store.sqlite") == 0
    shown = capsys.readouterr().out
    assert "2  outcome/trained" in shown
    assert "1  outcome/failed/infrastructure/ServiceError" in shown
    assert "rewards: count 2, mean 0.875, min 0.75, max 1" in shown
    assert "rollout i2/0/0: failed" in shown
    assert "engine answered 500" in shown


def test_show_prints_the_trajectory_that_was_asked_for(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nexrl_store("show", run_folder, "--id", "i0/0/0/t0") == 0
    assert '"reward": 0.75' in capsys.readouterr().out
    assert nexrl_store("show", run_folder, "--id", "nothing") == 1
    assert "no trajectory or rollout 'nothing'" in capsys.readouterr().err


def test_a_folder_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no trajectory store at .*store\.sqlite"):
        nexrl_store("show", tmp_path)
