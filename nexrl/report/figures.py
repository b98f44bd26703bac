"""What a run's metrics look like: charts for report.html and the image curve.png, by matplotlib.

Consumes records of metrics.jsonl; `report.py` puts the charts on its page. Without matplotlib
there are none, and the page says so.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexrl.activity.metric_sink import TRAIN_AXIS, MetricRecord
from nexrl.types import DEFAULT_POLICY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#3b78d8", "#e08a2b", "#35a06b", "#b052c0", "#8a94a3", "#d0505c")
_INK = "#7d8898"
"""Legible on a light page and on a dark one."""
_MAX_DOTTED = 40
_MARGINS = {"left": 0.11, "right": 0.99, "bottom": 0.11, "top": 0.91}
"""Of a chart: fixed, because fitting them takes as long as drawing."""

Chart = Mapping[str, str]
"""Metric name by label."""
CURVE: Chart = {
    "held-out accuracy": "validation/accuracy",
    "reward, all rollouts": "reward/mean",
    "reward, trained": "reward/trained_mean",
}
CHARTS: Mapping[str, Chart] = {
    "Held-out accuracy": {"accuracy": "validation/accuracy"},
    "Reward": {
        "all rollouts": "reward/mean",
        "trained": "reward/trained_mean",
        "held-out": "validation/reward",
    },
    "Loss": {"loss": "loss/total", "nll per token": "nll/token"},
    "Gradient norm": {"before clipping": "grad_norm"},
    "Response length, tokens": {"mean": "response_length/mean", "longest": "response_length/max"},
    "Entropy, nats per token": {"entropy": "entropy"},
    "Trainer and engine disagree, nats": {"mean": "mismatch/abs_mean", "largest": "mismatch/max"},
    "Throughput, tokens per second": {"generated": "rollout/tokens_per_s"},
    "Seconds of each step": {
        "train": "time/train",
        "sync": "time/sync",
        "validation": "time/validation",
        "waiting for rollouts": "time/rollout_wait",
        "other": "time/other",
    },
}
PER_STAGE = frozenset(["Loss"])
"""Charts of which each stage has its own, because scales have nothing in common."""


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
    for title, chart in CHARTS.items():
        parts = {title: records}
        if title in PER_STAGE and len(stages) > 1:
            parts = {f"{title}: {s}": [r for r in records if r.stage == s] for s in stages}
        for name, part in parts.items():
            figure = _figure(5.6, 2.5)
            if _plot(figure.subplots(gridspec_kw=_MARGINS), part, chart, stage_borders(part)):
                drawn[name] = _svg(figure)
    return drawn


def draw_curve(path: Path, records: Sequence[MetricRecord], shares: Mapping[str, float]) -> None:
    """curve.png: accuracy and reward over training steps, and where the time went below."""
    figure = _figure(8.0, 4.8)
    figure.set_layout_engine("constrained")
    curve, bar = figure.subplots(2, 1, height_ratios=(5, 1))
    if not _plot(curve, records, CURVE, stage_borders(records)):
        return
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


def _plot(
    axes: Any,
    records: Sequence[MetricRecord],
    chart: Chart,
    borders: Sequence[tuple[float, str]],
) -> bool:
    """Draw the metrics that have values; False when none has."""
    lines = {label: points for label, name in chart.items() if (points := series_of(records, name))}
    for colour, (label, points) in zip(COLOURS, lines.items(), strict=False):
        marker = "o" if len(points) <= _MAX_DOTTED else ""
        axes.plot(
            *zip(*points, strict=True), color=colour, lw=1.4, marker=marker, ms=3, label=label
        )
    for position, name in borders:
        axes.axvline(position, color=_INK, lw=0.8, ls=":")
        axes.text(
            *(position, 1.02, f" {name}"),
            transform=axes.get_xaxis_transform(),
            fontsize=8,
            style="italic",
            color=_INK,
        )
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.grid(alpha=0.2)
    axes.tick_params(colors=_INK, labelsize=8)
    axes.spines[:].set_visible(False)
    if lines:
        axes.legend(frameon=False, fontsize=8, labelcolor=_INK)
    return bool(lines)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()
