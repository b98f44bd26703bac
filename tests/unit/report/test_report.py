"""report.html and curve.png: self-contained, complete, and made from whatever a run left."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nexrl.activity.metric_sink import MetricSink, read_metrics
from nexrl.atomic import write_json
from nexrl.report.figures import draw_charts, series_of, stage_borders
from nexrl.report.report import write_report

VOID = {"meta", "img"}


class BalanceChecker(HTMLParser):
    """Fails on a tag that closes another than the last opened one."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.stack.pop() == tag


def make_run(folder: Path, **summary: object) -> Path:
    run = folder / "arithmetic" / "20260504-120000"
    run.mkdir(parents=True)
    sink = MetricSink(run / "metrics.jsonl", clock=lambda: 0.0)
    sink.log("validation", 0, {"validation/accuracy": 0.0}, stage="warmup")
    for step in range(1, 41):
        stage = "warmup" if step <= 20 else "grpo"
        sink.log("step", step, {"loss/total": 1 / step, "reward/mean": step / 40}, stage=stage)
    sink.log("validation", 40, {"validation/accuracy": 0.97}, stage="grpo")
    sink.close()
    if summary:
        write_json(run / "summary.json", summary)
    return run


def test_the_page_loads_nothing_and_its_tags_are_balanced(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path, status="completed", exit_reason="done")).read_text()
    assert not re.search(r'(?:src|href)=(?!"data:)|url\(|@import|https?://', page)
    checker = BalanceChecker()
    checker.feed(page)
    assert checker.stack == []


def test_the_page_shows_curves_stages_shares_ledger_failures_and_configuration(
    tmp_path: Path,
) -> None:
    stage = {
        "name": "grpo",
        "accuracy_first": 0.5,
        "accuracy_last": 0.97,
        "time_share": {"train": 0.6},
    }
    run = make_run(
        tmp_path,
        status="completed",
        exit_reason="done",
        stages=[stage],
        ledger={"admitted": 8, "trained": 6, "filtered": {"constant_reward": 2}},
        failures=[
            {"error_type": "ValueError", "message": "4x", "first_rollout_id": "r1", "count": 3}
        ],
        slowest=[{"kind": "train", "name": "batch 7", "seconds": 2.5}],
    )
    (run / "config.yaml").write_text("seed: 41\n")
    page = write_report(run).read_text()
    for text in ("Held-out accuracy", "Loss: warmup", "50.0% → 97.0%", "filtered: constant_reward",
                 "ValueError: 4x", "train batch 7", "seed: 41", "60%"):  # fmt: skip
        assert text in page, text
    assert "Not logged in this run: gradient norm" in page


def test_a_failed_run_shows_its_reason_and_escapes_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, status="failed", exit_reason="ValueError: <script>alert(1)</script>")
    page = write_report(run).read_text()
    assert "Why it failed" in page
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_run_that_crashed_before_anything_was_logged_still_has_a_page(tmp_path: Path) -> None:
    page = write_report(tmp_path).read_text()
    assert "the run did not end by itself" in page
    assert "No metrics yet." in page


def test_a_run_without_a_reason_has_a_page(tmp_path: Path) -> None:
    assert (
        "interrupted"
        in write_report(make_run(tmp_path, status="interrupted", exit_reason="")).read_text()
    )


def test_the_curve_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = make_run(tmp_path, status="completed", time_share={"train": 0.7, "sync": 0.3})
    write_report(run)
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_page_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    run = make_run(tmp_path, status="completed")
    page = write_report(run).read_text()
    assert "matplotlib is not installed" in page
    assert "<td>validation/accuracy</td><td class=n>0</td><td class=n>0.97</td>" in page
    assert not (run / "curve.png").exists()


def test_an_interrupted_run_leaves_drawing_to_a_later_call(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "the run was interrupted" in write_report(run, draw=False).read_text()
    assert not (run / "curve.png").exists()
    assert "the run was interrupted" not in write_report(run).read_text()


def test_a_validation_stands_at_the_training_step_it_was_made_at(tmp_path: Path) -> None:
    records = read_metrics(make_run(tmp_path) / "metrics.jsonl")
    assert series_of(records, "validation/accuracy") == ((0.0, 0.0), (40.0, 0.97))
    assert stage_borders(records) == [(0.0, "warmup"), (20.0, "grpo")]


def test_a_series_leaves_out_what_is_not_finite_and_is_empty_without_values(tmp_path: Path) -> None:
    sink = MetricSink(tmp_path / "metrics.jsonl", clock=lambda: 0.0)
    for step, value in enumerate((1.0, float("nan"), 3.0)):
        sink.log("step", step, {"entropy": value, "grad_norm": float("nan")})
    sink.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert series_of(records, "entropy") == ((0.0, 1.0), (2.0, 3.0))
    assert series_of(records, "grad_norm") == ()
    assert list(draw_charts(records)) == ["Entropy, nats per token"]


def drawn(folder: Path, *steps: dict[str, float]) -> dict[str, str]:
    """The charts of a run that logged these metrics, one mapping a step."""
    sink = MetricSink(folder / "metrics.jsonl", clock=lambda: 0.0)
    for step, metrics in enumerate(steps, 1):
        sink.log("step", step, metrics)
    sink.close()
    return draw_charts(read_metrics(folder / "metrics.jsonl"))


def test_every_kind_of_training_has_its_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    metrics = {
        **{"kl/k3": 0.1, "ratio/clip_share_low": 0.2, "correction/ess": 0.9},
        **{"values/mean": 0.3, "values/explained_variance": 0.5},
        **{"preference/accuracy": 0.8, "preference/margin": 1.0, "preference/logprob_chosen": -2},
    }
    titles = " ".join(drawn(tmp_path, metrics))
    for title in ("KL, nats", "by the clip", "Off-policy correction", "Critic: values",
                  "Told apart", "Margin between", "Logprobs of the two sides"):  # fmt: skip
        assert title in titles, title


def test_terms_of_a_loss_are_drawn_only_when_there_are_several(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = drawn(tmp_path, {"loss/total": 1.0, "loss/policy": 1.0})
    assert list(one) == ["Loss"]
    (tmp_path / "two").mkdir()
    two = drawn(tmp_path / "two", {"loss/total": 1.0, "loss/policy": 0.9, "loss/kl": 0.1})
    assert list(two) == ["Loss", "Terms of the loss"]


def test_what_no_scale_can_show_does_not_hide_the_rest(tmp_path: Path) -> None:
    """Returns that stop varying make the explained variance fall without bound; no step validates
    for 0 seconds on a logarithmic scale."""
    pytest.importorskip("matplotlib")
    wild = {"values/explained_variance": -300.0, "time/train": 0.1, "time/validation": 0.0}
    charts = drawn(tmp_path, {"values/explained_variance": 0.5, "time/train": 4.0}, wild)
    ticks = re.findall(r"<!-- (\S+) -->", charts["Critic: explained variance, at least -1"])
    assert "\N{MINUS SIGN}1" in ticks
    assert not any("00" in tick for tick in ticks)
    assert "Seconds of each step" in charts


def test_bars_have_a_part_for_each_share(tmp_path: Path) -> None:
    run = make_run(tmp_path, status="completed", time_share={"train": 0.75, "other": 0.25})
    assert re.findall(r"width:([\d.]+)%", write_report(run).read_text()) == ["75.00", "25.00"]
