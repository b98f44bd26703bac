"""What a run's metrics look like: charts for report.html and the image curve.png, by matplotlib.

Consumes records of metrics.jsonl and the table of `charts.py`; `report.py` puts the charts on its page. Without matplotlib
there are none, and the page says so.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexrl.activity.metric_sink import TRAIN_AXIS, MetricRecord
from nexrl.report.charts import CHARTS, CURVE, Chart
from nexrl.types import DEFAULT_POLICY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#3b78d8", "#e08a2b", "#35a06b", "#b052c0", "#8a94a3", "#d0505c")
_INK = "#7d8898"
"""Legible on a light page and on a dark one."""
_MAX_DOTTED = 40
_MARGINS = {"left": 0.11, "right": 0.99, "bottom": 0.11, "top": 0.91}
"""Of a chart: fixed, because fitting them takes as long as drawing."""


def series_of(records: Iterable[MetricRecord], metric: str) -> tuple[tuple[float, float], ...]:
    """Finite points of a metric over training steps; of several at one step the last."""
    points: dict[float, float] = {}
    for record in records:
        value = record.metrics.get(metric, math.nan)
        if math.isfinite(value) and record.policy == DEFAULT_POLICY:
            # A validation's own axis is its version: on the page everything shares the step.
            x = record.step if record.axis == TRAIN_AXIS else record.at_step
            points[float(x)] = value
    return tuple(sorted(points.items()))


def stage_borders(records: Iterable[MetricRecord]) -> list[tuple[float, str]]:
    """(last step before it, name) of each stage in order of appearance; empty for one stage."""
    starts: dict[str, float] = {}
    last = 0
    for record in records:
        starts.setdefault(record.stage, float(last))
        last = max(last, record.at_step)
    named = [(start, name) for name, start in starts.items() if name]
    return named if len(named) > 1 else []


def draw_charts(records: Sequence[MetricRecord]) -> dict[str, str]:
    """A self-contained SVG by title, for each chart that has values; ImportError without matplotlib."""
    stages = list(dict.fromkeys(record.stage for record in records))
    drawn = {}
    for chart in CHARTS:
        parts = {chart.title: records}
        if chart.per_stage and len(stages) > 1:
            parts = {f"{chart.title}: {s}": [r for r in records if r.stage == s] for s in stages}
        for name, part in parts.items():
            lines = _lines(part, chart)
            if len(lines) < chart.min_lines:
                continue
            figure = _figure(5.6, 2.5)
            axes = figure.subplots(gridspec_kw=_MARGINS)
            _plot(axes, lines, stage_borders(part))
            if chart.is_log:
                axes.set_yscale("log")
            drawn[name] = _svg(figure)
    return drawn


def draw_curve(path: Path, records: Sequence[MetricRecord], shares: Mapping[str, float]) -> None:
    """curve.png: accuracy and reward over training steps, and where the time went below."""
    lines = _lines(records, CURVE)
    if not lines:
        return
    figure = _figure(8.0, 4.8)
    figure.set_layout_engine("constrained")
    curve, bar = figure.subplots(2, 1, height_ratios=(5, 1))
    _plot(curve, lines, stage_borders(records))
    curve.set_xlabel("training step", color=_INK, fontsize=8)
    left = 0.0
    for colour, (name, share) in zip(COLOURS, shares.items(), strict=False):
        parts = bar.barh(0, share, left=left, color=colour, label=name.replace("_", " "))
        bar.bar_label(
            parts,
            [f"{share:.0%}" if share >= 0.06 else ""],
            label_type="center",
            color="white",
            fontsize=8,
        )
        left += share
    bar.set_xlim(0, 1)
    bar.axis("off")
    if shares:
        bar.set_title("where the time went", fontsize=9, loc="left", color=_INK)
        bar.legend(
            ncols=len(shares),
            frameon=False,
            fontsize=8,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.05),
        )
    figure.savefig(path, dpi=130)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    label: str
    colour: str
    """That of its place in the chart, whatever else was logged."""
    points: Sequence[tuple[float, float]]


def _lines(records: Sequence[MetricRecord], chart: Chart) -> list[_Line]:
    """Those metrics that have points; a point beyond the limits is drawn at the border."""
    low, high = chart.limits or (-math.inf, math.inf)
    found = []
    for colour, (label, name) in zip(COLOURS, chart.lines.items(), strict=False):
        series = series_of(records, name)
        points = [(x, min(max(y, low), high)) for x, y in series if y > 0 or not chart.is_log]
        if points:
            found.append(_Line(label=label, colour=colour, points=points))
    return found


def _plot(axes: Any, lines: Sequence[_Line], borders: Sequence[tuple[float, str]]) -> None:
    from matplotlib.ticker import MaxNLocator

    for line in lines:
        marker = "o" if len(line.points) <= _MAX_DOTTED else ""
        x, y = zip(*line.points, strict=True)
        axes.plot(x, y, color=line.colour, lw=1.4, marker=marker, ms=3, label=line.label)
    for position, name in borders:
        axes.axvline(position, color=_INK, lw=0.8, ls=":")
        axes.text(
            *(position, 1.02, f" {name}"),
            transform=axes.get_xaxis_transform(),
            fontsize=8,
            style="italic",
            color=_INK,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.grid(alpha=0.2)
    axes.tick_params(colors=_INK, labelsize=8)
    axes.spines[:].set_visible(False)
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()
