"""MetricSink: one owner of the step clock, whole lines, segments after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol

import pytest

from nexrl.activity.metric_sink import MetricSink, read_metrics
from nexrl.errors import StoreError


class ListLogger:
    """A logger that keeps what it is given; fails from a given call on."""

    def __init__(self, fails_from: int = 10**9) -> None:
        self.logged: list[tuple[str, int, dict[str, float]]] = []
        self.closed = 0
        self._fails_from = fails_from

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        if len(self.logged) >= self._fails_from:
            raise ConnectionError("tracker unreachable")
        self.logged.append((axis, step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1
        if len(self.logged) >= self._fails_from:
            raise ConnectionError("tracker unreachable")


class SinkMaker(Protocol):
    def __call__(self, *loggers: ListLogger, resumed_step: int | None = None) -> MetricSink: ...


@pytest.fixture
def make_sink(tmp_path: Path) -> Iterator[SinkMaker]:
    """Sinks on one metrics.jsonl, closed at the end."""
    with ExitStack() as opened:

        def make(*loggers: ListLogger, resumed_step: int | None = None) -> MetricSink:
            sink = MetricSink(
                tmp_path / "metrics.jsonl",
                clock=lambda: 5.0,
                loggers=loggers,
                resumed_step=resumed_step,
            )
            return opened.enter_context(closing(sink))

        yield make


def test_a_record_is_one_line_with_everything_needed_to_read_it_alone(
    tmp_path: Path, make_sink: SinkMaker
) -> None:
    sink = make_sink()
    sink.log("step", 3, {"lr": 0.5}, version="actor@0.3", stage="grpo")
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "segment": 0,
        "axis": "step",
        "step": 3,
        "at_step": 3,
        "version": "actor@0.3",
        "stage": "grpo",
        "wall_s": 0.0,
        "policy": "actor",
        "metrics": {"lr": 0.5},
    }


def test_families_with_different_counters_never_drop_each_others_points(
    tmp_path: Path, make_sink: SinkMaker
) -> None:
    """FR-166: the trainer logs step 3, rollouts 8073, the evaluator 2."""
    logger = ListLogger()
    sink = make_sink(logger)
    for axis, step in (("step", 3), ("rollout", 8073), ("validation", 2), ("step", 4)):
        sink.log(axis, step, {"x": 1.0})
    logged = [(axis, step) for axis, step, _ in logger.logged]
    assert logged == [("step", 3), ("rollout", 8073), ("validation", 2), ("step", 4)]
    assert [(r.axis, r.at_step) for r in read_metrics(tmp_path / "metrics.jsonl")] == [
        ("step", 3),
        ("rollout", 3),
        ("validation", 3),
        ("step", 4),
    ]


def test_after_a_resume_later_points_are_superseded_and_kept_in_the_file(
    tmp_path: Path, make_sink: SinkMaker
) -> None:
    """FR-166: resume from step 100 after logging 150."""
    path = tmp_path / "metrics.jsonl"
    first = make_sink()
    for step in range(1, 151):
        first.log("step", step, {"x": 0.0})
        if step % 50 == 0:
            first.log("validation", step // 50, {"y": 0.0})
    first.close()
    second = make_sink(resumed_step=100)
    second.log("step", 101, {"x": 1.0})
    records = read_metrics(path)
    assert [r.step for r in records if r.axis == "step"] == [*range(1, 101), 101]
    assert [r.step for r in records if r.axis == "validation"] == [1, 2]
    assert records[-1].segment == 1
    assert len(path.read_text().splitlines()) == 154 + 1  # and the resume's own line


def test_a_line_cut_by_a_crash_is_left_out_and_cut_off_when_writing_goes_on(
    tmp_path: Path, make_sink: SinkMaker
) -> None:
    path = tmp_path / "metrics.jsonl"
    make_sink().log("step", 1, {"x": 1.0})
    with path.open("a") as file:
        file.write('{"segment": 0, "axis": "st')
    assert [r.step for r in read_metrics(path)] == [1]
    make_sink(resumed_step=1).log("step", 2, {"x": 2.0})
    assert [r.step for r in read_metrics(path)] == [1, 2]


def test_damage_within_the_file_is_named_with_its_line(
    tmp_path: Path, make_sink: SinkMaker
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}}\n")
    with pytest.raises(StoreError, match=r"metrics.jsonl:1: not a line of JSON"):
        read_metrics(path)


def test_numbers_that_json_does_not_know_survive(tmp_path: Path, make_sink: SinkMaker) -> None:
    make_sink().log("step", 1, {"a": math.nan, "b": -math.inf})
    [record] = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record.metrics["a"])
    assert record.metrics["b"] == -math.inf


def test_metrics_of_a_second_policy_are_named_after_it_in_loggers(
    tmp_path: Path, make_sink: SinkMaker
) -> None:
    logger = ListLogger()
    sink = make_sink(logger)
    sink.log("step", 1, {"grad_norm": 1.0}, policy="critic")
    assert logger.logged == [("step", 1, {"critic/grad_norm": 1.0})]
    assert read_metrics(tmp_path / "metrics.jsonl")[0].policy == "critic"


def test_a_logger_that_fails_is_left_out_and_nothing_else_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make_sink: SinkMaker
) -> None:
    bad, good = ListLogger(fails_from=1), ListLogger()
    sink = make_sink(bad, good)
    for step in (1, 2, 3):
        sink.log("step", step, {"x": 1.0})
    assert (len(bad.logged), len(good.logged)) == (1, 3)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert caplog.text.count("ListLogger failed and gets no further metrics") == 1


def test_a_logger_that_cannot_be_closed_does_not_keep_the_others_open(
    make_sink: SinkMaker, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = ListLogger(fails_from=0), ListLogger()
    make_sink(broken, sound).close()
    assert (broken.closed, sound.closed) == (1, 1)
    assert "ListLogger could not be closed" in caplog.text
    assert "tracker unreachable" in caplog.text


def test_closing_twice_closes_loggers_once(make_sink: SinkMaker) -> None:
    logger = ListLogger()
    sink = make_sink(logger)
    sink.close()
    sink.close()
    assert logger.closed == 1


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"absent/metrics.jsonl: cannot write metrics"):
        MetricSink(tmp_path / "absent" / "metrics.jsonl", clock=lambda: 0.0)
