"""report.html and curve.png: how a run went, for people, from the files of its run folder.

Consumes metrics.jsonl, summary.json, config.yaml and code_version.json; can be made again at any
time, also for a run that crashed. The page holds everything it shows: nothing is loaded from
elsewhere.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from nexrl.activity.metric_sink import MetricRecord, read_metrics
from nexrl.atomic import read_json, write_text
from nexrl.report.charts import CHARTS
from nexrl.report.figures import COLOURS, draw_charts, draw_curve


def write_report(folder: Path, *, draw: bool = True) -> Path:
    """Write curve.png (where matplotlib is installed) and report.html; returns the latter.

    `draw=False` leaves charts and curve.png to a later call, which takes a second less.
    """
    records = read_metrics(folder / "metrics.jsonl")
    summary = read_json(folder / "summary.json") or {}
    charts = _latest(records, "the run was interrupted; it draws them when it is resumed")
    if draw:
        try:
            draw_curve(folder / "curve.png", records, summary.get("time_share") or {})
            charts = _charts(draw_charts(records))
        except ImportError:
            charts = _latest(records, "matplotlib is not installed (pip install 'nexrl[report]')")
    path = folder / "report.html"
    write_text(path, _page(folder, charts if records else _note("No metrics yet."), summary))
    return path


def _page(folder: Path, charts: str, summary: Mapping[str, Any]) -> str:
    template = resources.files("nexrl.report").joinpath("report_template.html").read_text("utf-8")
    status = str(summary.get("status", "unfinished"))
    tone = {"completed": "good", "failed": "bad"}.get(status, "")
    reason = str(summary.get("exit_reason", "no summary.json: the run did not end by itself"))
    first_line = reason.partition("\n")[0]
    return Template(template).substitute(
        title=escape(f"{folder.parent.name} / {folder.name}"),
        subtitle=f'<b class="{tone}">{escape(status)}</b> · {escape(first_line)}',
        tiles=_tiles(summary),
        failure=_failure(status, reason),
        charts=charts,
        time_share=_time_share(summary),
        tables=_ledger(summary) + _failures(summary) + _slowest(summary),
        origin=_origin(folder),
    )


def _charts(drawn: Mapping[str, str]) -> str:
    """The charts that have values, and the titles of those that have none."""
    figures = [
        f'<figure class="card"><figcaption>{escape(title)}</figcaption><img alt="{escape(title)}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"></figure>'
        for title, svg in drawn.items()
    ]
    shown = {title.partition(": ")[0] for title in drawn}  # a stage's own chart names the stage
    absent = [c.title.lower() for c in CHARTS if c.usual and c.title not in shown]
    note = _note(f"Not logged in this run: {', '.join(absent)}.") if absent else ""
    return f'<section class="two">{"".join(figures)}</section>{note}'


def _latest(records: Sequence[MetricRecord], reason: str) -> str:
    """In place of charts: the first and the last value of each metric that has a chart."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.metrics.items():
            values.setdefault(name, []).append(value)
    body = [
        (name, f"{values[name][0]:.4g}", f"{values[name][-1]:.4g}")
        for chart in CHARTS
        for name in chart.lines.values()
        if name in values
    ]
    note = _note(f"No charts and no curve.png: {reason}.")
    return note + _table("Metrics", ("metric", "first", "last"), body)


def _tiles(summary: Mapping[str, Any]) -> str:
    stages = summary.get("stages") or []
    tiles = [
        ("steps", f"{summary.get('steps', 0):,}"),
        ("trajectories", f"{summary.get('trajectories', 0):,}"),
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
    """One bar for each stage and one for the run; its parts are shares of the wall time."""
    rows = [
        (str(stage.get("name") or "run"), stage["time_share"])
        for stage in summary.get("stages") or []
        if stage.get("time_share")
    ]
    if summary.get("time_share") and len(rows) != 1:
        rows.append(("whole run", summary["time_share"]))
    if not rows:
        return _note("No time shares: the run left no summary.json.")
    names = list(dict.fromkeys(name for _, shares in rows for name in shares))
    colours = dict(zip(names, COLOURS, strict=False))
    words = {name: escape(name.replace("rollout_wait", "waiting for rollouts")) for name in names}
    legend = "".join(
        f'<span><i style="background:{colours[name]}"></i>{words[name]}</span>' for name in names
    )
    bars = []
    for label, shares in rows:
        parts = "".join(
            f'<span style="width:{share:.2%};background:{colours[name]}" '
            f'title="{words[name]} {share:.1%}">{f"{share:.0%}" if share >= 0.06 else ""}</span>'
            for name, share in shares.items()
        )
        bars.append(
            f'<div class="bar"><b>{escape(label)}</b><div class="parts">{parts}</div></div>'
        )
    return f'<div class="bars"><div class="legend">{legend}</div>{"".join(bars)}</div>'


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
    content = f"<table><tr>{row(head, 'th')}</tr>{rows}</table>" if body else _note("None.")
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
    return "".join(parts) or _note("Neither config.yaml nor code_version.json exists.")


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
