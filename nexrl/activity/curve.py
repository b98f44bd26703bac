"""curve.png: accuracy and reward over training steps with the time shares below, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nexrl.activity.metric_series import series_of, stage_borders
from nexrl.activity.metric_sink import MetricRecord

_COLOURS = ("#2563c9", "#d9730d", "#2c8c5a", "#a03fb0", "#8a94a3")
_LINES = (
    ("held-out accuracy", "validation/accuracy", _COLOURS[0], 2.2),
    ("reward, all rollouts", "reward/mean", _COLOURS[1], 1.0),
    ("reward, trained", "reward/trained_mean", _COLOURS[2], 1.0),
)


def draw_curve(path: Path, records: Sequence[MetricRecord], summary: Mapping[str, Any]) -> str:
    """Draw the image; returns what to tell people when there is none, else an empty string."""
    lines = [
        (label, points, colour, width)
        for label, metric, colour, width in _LINES
        if (points := series_of(records, metric))
    ]
    if not lines:
        return "No curve.png: neither accuracy nor reward was logged."
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "No curve.png: matplotlib is not installed (pip install 'nexrl[report]')."
    figure = Figure(figsize=(8.0, 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    curve, bars = figure.subplots(2, 1, height_ratios=(5, 1))
    for label, points, colour, width in lines:
        marker = "o" if len(points) <= 30 else ""
        curve.plot(
            *zip(*points, strict=True), color=colour, lw=width, marker=marker, ms=3.5, label=label
        )
    for position, name in stage_borders(records):
        curve.axvline(position, color="#8a94a3", lw=0.8, ls=":")
        curve.annotate(
            name,
            (position, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=8,
            color="#5d6878",
            style="italic",
        )
    curve.set_xlabel("training step")
    curve.grid(alpha=0.25)
    curve.spines[["top", "right"]].set_visible(False)
    curve.legend(frameon=False, fontsize=8, loc="lower right")
    _draw_shares(bars, summary.get("time_share") or {})
    figure.savefig(path)
    return ""


def _draw_shares(axes: Any, shares: Mapping[str, float]) -> None:
    """One stacked horizontal bar of where the time went."""
    left = 0.0
    for colour, (name, value) in zip(_COLOURS, shares.items(), strict=False):
        axes.barh(0, value, left=left, color=colour, label=name.replace("_", " "))
        if value >= 0.06:
            axes.text(
                left + value / 2,
                0,
                f"{value:.0%}",
                ha="center",
                va="center",
                color="white",
                fontsize=8,
            )
        left += value
    axes.set_xlim(0, 1)
    axes.axis("off")
    if shares:
        axes.set_title("where the time went", fontsize=9, loc="left", color="#5d6878")
        axes.legend(
            ncols=len(shares),
            frameon=False,
            fontsize=8,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.05),
        )
