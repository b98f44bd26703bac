"""summary.json: stages from what was logged, always whole, also when the run fails."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.activity.metric_sink import MetricRecord
from nexrl.atomic import write_json
from nexrl.config.schema import RuntimeMonitorConfig
from nexrl.report.summary import summarize_run, summarize_stages, write_summary
from nexrl.testing.makers import make_record
from nexrl.testing.virtual_time import virtual_time
from nexrl.types import LedgerSnapshot


def make_metric_record(axis: str, step: int, stage: str, **metrics: float) -> MetricRecord:
    named = {f"validation/{name}": value for name, value in metrics.items()}
    return MetricRecord(
        segment=0,
        axis=axis,
        step=step,
        at_step=step,
        version="",
        stage=stage,
        wall_s=0.0,
        policy="actor",
        metrics=named,
    )


def test_stages_have_their_steps_and_first_and_last_validation() -> None:
    records = [
        make_metric_record("validation", 0, "warmup", accuracy=0.0, reward=0.1),
        make_metric_record("step", 1, "warmup"),
        make_metric_record("step", 2, "warmup"),
        make_metric_record("validation", 2, "warmup", accuracy=0.5, reward=0.6),
        make_metric_record("step", 3, "grpo"),
    ]
    warmup, grpo = summarize_stages(records, time_shares={"grpo": {"train": 1.0}})
    assert (warmup.name, warmup.steps) == ("warmup", 2)
    assert (warmup.accuracy_first, warmup.accuracy_last) == (0.0, 0.5)
    assert (warmup.reward_first, warmup.reward_last) == (0.1, 0.6)
    assert (grpo.steps, grpo.accuracy_first, grpo.time_share) == (1, None, {"train": 1.0})


@virtual_time
async def test_the_summary_of_a_failed_run_says_why_and_what_failed(tmp_path: Path) -> None:
    tracker = ActivityTracker(RuntimeMonitorConfig())
    with tracker.activity("train", "batch 0"):
        await asyncio.sleep(4)
    tracker.rollout_ended(make_record(status="failed"))
    ledger = LedgerSnapshot(
        admitted=1,
        in_flight=0,
        ready=0,
        handed_out=0,
        trained=0,
        filtered={},
        failed={"infrastructure/ServiceError": 1},
        stale={},
        cancelled={},
    )
    summary = summarize_run(tracker, status="failed", exit_reason="boom", stages=(), ledger=ledger)
    write_summary(tmp_path / "summary.json", summary)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["status"], written["exit_reason"], written["wall_s"]) == ("failed", "boom", 4.0)
    assert written["ledger"]["failed"] == {"infrastructure/ServiceError": 1}
    assert written["time_share"]["train"] == 1.0
    assert written["slowest"][0] == {"kind": "train", "name": "batch 0", "seconds": 4.0}
    assert written["failures"][0]["error_type"] == "ServiceError"


def test_a_json_file_is_replaced_whole_and_is_valid_json_whatever_the_numbers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": math.nan, "b": [math.inf]})
    assert json.loads(path.read_text(), parse_constant=lambda _: None) == {"a": "nan", "b": ["inf"]}
    assert [f.name for f in tmp_path.iterdir()] == ["summary.json"]
