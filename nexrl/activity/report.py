"""report.html and curve.png: how a run went, for people, from the files of its run folder.

Consumes metrics.jsonl, summary.json, config.yaml and code_version.json; can be made again at any
time, also for a run that crashed. The page holds everything it shows: nothing is loaded from
elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from nexrl.activity.atomic_file import read_json, write_text
from nexrl.activity.charts import Series, format_number, line_chart, stacked_bars
from nexrl.activity.curve import draw_curve
from nexrl.activity.metric_series import series_of, stage_borders
from nexrl.activity.metric_sink import MetricRecord, read_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSpec:
    """A chart of the page: which metrics it shows."""

    title: str
    """Heading."""
    lines: tuple[tuple[str, str], ...]
    """(label, metric name) of each line; those without a value are left out."""
    y_range: tuple[float, float] | None = None
    """Fixed edges; None fits the values."""
    per_stage: bool = False
    """One chart for each stage, where scales have nothing in common."""


CHARTS = (
    ChartSpec(
        title="Held-out accuracy", lines=(("accuracy", "validation/accuracy"),), y_range=(0.0, 1.0)
    ),
    ChartSpec(
        title="Reward",
        lines=(
            ("all rollouts", "reward/mean"),
            ("trained", "reward/trained_mean"),
            ("held-out", "validation/reward"),
        ),
    ),
    ChartSpec(
        title="Loss",
        lines=(("loss", "loss/total"), ("nll per token", "nll/token")),
        per_stage=True,
    ),
    ChartSpec(title="Gradient norm", lines=(("before clipping", "grad_norm"),)),
    ChartSpec(
        title="Response length, tokens",
        lines=(
            ("mean", "response_length/mean"),
            ("longest", "response_length/max"),
        ),
    ),
    ChartSpec(title="Entropy, nats per token", lines=(("entropy", "entropy"),)),
    ChartSpec(
        title="Trainer and engine disagree, nats",
        lines=(("mean", "mismatch/abs_mean"), ("largest", "mismatch/max")),
    ),
    ChartSpec(
        title="Throughput, tokens per second", lines=(("generated", "rollout/tokens_per_s"),)
    ),
    ChartSpec(
        title="Seconds of each step",
        lines=(
            ("train", "time/train"),
            ("sync", "time/sync"),
            ("validation", "time/validation"),
            ("waiting for rollouts", "time/rollout_wait"),
            ("other", "time/other"),
        ),
    ),
)


def write_report(folder: Path) -> Path:
    """Write curve.png (where matplotlib is installed) and report.html; returns the latter."""
    records = read_metrics(folder / "metrics.jsonl")
    summary = read_json(folder / "summary.json") or {}
    no_curve = draw_curve(folder / "curve.png", records, summary)
    path = folder / "report.html"
    write_text(path, _page(folder, records, summary, no_curve))
    return path


def _page(
    folder: Path, records: Sequence[MetricRecord], summary: Mapping[str, Any], no_curve: str
) -> str:
    template = Template(
        resources.files("nexrl.activity").joinpath("report_template.html").read_text("utf-8")
    )
    status = str(summary.get("status", "unfinished"))
    tone = {"completed": "good", "failed": "bad"}.get(status, "")
    reason = str(summary.get("exit_reason", "no summary.json: the run did not end by itself"))
    first_line = reason.partition("\n")[0]
    charts, absent = _charts(records)
    missing = [f"Not logged in this run: {', '.join(absent)}."] if absent else []
    missing += [no_curve] if no_curve else []
    return template.substitute(
        title=escape(f"{folder.parent.name} / {folder.name}"),
        subtitle=f'<b class="{tone}">{escape(status)}</b> · {escape(first_line)}',
        tiles=_tiles(summary),
        failure=_failure(status, reason),
        charts=charts or '<p class="note">No metrics yet.</p>',
        missing="".join(f'<p class="note">{escape(text)}</p>' for text in missing),
        time_share=_time_share(summary),
        tables=_ledger(summary) + _failures(summary) + _slowest(summary),
        origin=_origin(folder),
    )


def _charts(records: Sequence[MetricRecord]) -> tuple[str, list[str]]:
    """The charts that have values, and the titles of those that have none."""
    borders = stage_borders(records)
    stages = list(dict.fromkeys(r.stage for r in records))
    figures, absent = [], []
    for spec in CHARTS:
        parts: list[tuple[str, Sequence[MetricRecord]]] = [(spec.title, records)]
        if spec.per_stage and len(stages) > 1:
            parts = [
                (f"{spec.title}: {stage}", [r for r in records if r.stage == stage])
                for stage in stages
            ]
        drawn = "".join(
            line_chart(
                title,
                [
                    Series(label=label, points=points)
                    for label, metric in spec.lines
                    if (points := series_of(part, metric))
                ],
                borders=() if spec.per_stage else borders,
                y_range=spec.y_range,
            )
            for title, part in parts
        )
        if drawn:
            figures.append(drawn)
        else:
            absent.append(spec.title.lower())
    return "".join(figures), absent


def _tiles(summary: Mapping[str, Any]) -> str:
    stages = summary.get("stages") or []
    tiles = [
        ("steps", format_number(float(summary.get("steps", 0)))),
        ("trajectories", format_number(float(summary.get("trajectories", 0)))),
        ("wall time", _minutes(float(summary.get("wall_s", 0.0)))),
    ]
    for stage in stages:
        first, last = stage.get("accuracy_first"), stage.get("accuracy_last")
        if first is not None and last is not None:
            name = f"accuracy, {stage['name']}" if stage.get("name") else "accuracy"
            tiles.append((name, f"{float(first):.1%} → {float(last):.1%}"))
    return "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for label, value in tiles
    )


def _failure(status: str, reason: str) -> str:
    if status != "failed":
        return ""
    return f'<h2 class="bad">Why it failed</h2><section class="card"><pre>{escape(reason)}</pre></section>'


def _time_share(summary: Mapping[str, Any]) -> str:
    rows = [
        (str(stage.get("name") or "run"), stage["time_share"])
        for stage in summary.get("stages") or []
        if stage.get("time_share")
    ]
    if summary.get("time_share") and len(rows) != 1:
        rows.append(("whole run", summary["time_share"]))
    if not rows:
        return '<p class="note">No time shares: the run left no summary.json.</p>'
    return stacked_bars([(name, _words(shares)) for name, shares in rows])


def _words(shares: Mapping[str, float]) -> dict[str, float]:
    return {
        {"rollout_wait": "waiting for rollouts"}.get(name, name): float(value)
        for name, value in shares.items()
    }


def _ledger(summary: Mapping[str, Any]) -> str:
    ledger: Mapping[str, Any] = summary.get("ledger") or {}
    admitted = float(ledger.get("admitted", 0)) or 1.0
    rows: list[tuple[str, float]] = []
    for outcome, value in ledger.items():
        if isinstance(value, Mapping):
            rows += [(f"{outcome}: {reason}", float(number)) for reason, number in value.items()]
        else:
            rows.append((outcome.replace("_", " "), float(value)))
    body = [(name, f"{number:,.0f}", f"{number / admitted:.1%}") for name, number in rows]
    return _table("Ledger, in rollouts", ("outcome", "rollouts", "share"), body)


def _failures(summary: Mapping[str, Any]) -> str:
    body = [
        (f"{f['error_type']}: {f['message']}", str(f["first_rollout_id"]), f"{f['count']:,}")
        for f in summary.get("failures") or []
    ]
    return _table("Failures", ("cause", "first in rollout", "rollouts"), body, numbers=1)


def _slowest(summary: Mapping[str, Any]) -> str:
    body = [
        (f"{a['kind']} {a['name']}", f"{float(a['seconds']):.2f}")
        for a in summary.get("slowest") or []
    ]
    return _table("Slowest work", ("what", "seconds"), body)


def _table(
    title: str, head: Sequence[str], body: Sequence[Sequence[str]], *, numbers: int | None = None
) -> str:
    """A card with a table; the last `numbers` columns (default: all but the first) are numbers."""
    first_number = 1 if numbers is None else len(head) - numbers

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if index >= first_number else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )

    rows = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in body)
    content = (
        f"<table><tr>{row(head, 'th')}</tr>{rows}</table>" if body else '<p class="note">None.</p>'
    )
    return f'<div class="card"><h3>{escape(title)}</h3>{content}</div>'


def _origin(folder: Path) -> str:
    parts = []
    for name, title in (("config.yaml", "Configuration"), ("code_version.json", "Code version")):
        path = folder / name
        if path.exists():
            text = escape(path.read_text(encoding="utf-8"))
            parts.append(
                f'<details class="card"><summary>{title}</summary><pre>{text}</pre></details>'
            )
    return "".join(parts) or '<p class="note">Neither config.yaml nor code_version.json exists.</p>'


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
