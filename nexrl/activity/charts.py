"""Line charts and stacked bars as inline SVG: no script, font or image from elsewhere.

Consumes plain numbers; used by `report.py`. Colours are CSS variables of the page (`--c0` ...), so
one SVG serves light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 14, 28
_MAX_POINTS = 400
NUM_COLOURS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart."""

    label: str
    """Shown in the legend."""
    points: tuple[tuple[float, float], ...]
    """(x, y) with ascending x; y that is not finite is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The mapping from values to pixels."""

    x_range: tuple[float, float]
    """Smallest and largest x."""
    y_range: tuple[float, float]
    """Lower and upper edge."""

    def x(self, value: float) -> float:
        """Pixel of an x."""
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Pixel of a y."""
        low, high = self.y_range
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    borders: Sequence[tuple[float, str]] = (),
    y_range: tuple[float, float] | None = None,
    x_label: str = "step",
) -> str:
    """A figure with title, legend, grid, stage borders (x, name of the stage that begins)."""
    drawn = [Series(label=s.label, points=_thin(_finite(s.points))) for s in series]
    points = [point for s in drawn for point in s.points]
    if not points:
        return ""
    frame = Frame(x_range=_span([x for x, _ in points]), y_range=y_range or _padded(points))
    body = [_grid(frame, x_label), _borders(frame, borders)]
    body += [_line(frame, s, index) for index, s in enumerate(drawn)]
    data = [
        {"label": s.label, "points": [[*p, *_pixel(frame, p)] for p in s.points]} for s in drawn
    ]
    return (
        f'<figure class="chart" data-series="{escape(json.dumps(data), quote=True)}">'
        f"<figcaption>{escape(title)}{_legend([s.label for s in drawn])}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
        + "".join(body)
        + '<line class="cursor" y1="14" y2="212" x1="-9" x2="-9"/></svg>'
        '<output class="readout"></output></figure>'
    )


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """One bar for each row; the values of a row are shares that add up to about 1."""
    labels = list(dict.fromkeys(label for _, shares in rows for label in shares))
    bars = []
    for name, shares in rows:
        parts = "".join(
            f'<span class="f{index % NUM_COLOURS}" style="width:{100 * shares.get(label, 0.0):.2f}%" '
            f'title="{escape(label, quote=True)} {shares.get(label, 0.0):.1%}">'
            f"{f'{shares[label]:.0%}' if shares.get(label, 0.0) >= 0.06 else ''}</span>"
            for index, label in enumerate(labels)
        )
        bars.append(f'<div class="bar"><b>{escape(name)}</b><div class="parts">{parts}</div></div>')
    return f'<div class="bars">{_legend(labels)}{"".join(bars)}</div>'


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Round numbers within [low, high], about `number` of them."""
    raw = (high - low) / max(number, 1)
    if raw <= 0 or not math.isfinite(raw):
        return [low]
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(f * magnitude for f in (1, 2, 5, 10) if f * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def format_number(value: float) -> str:
    """Short, for axes and tables."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 1e6:
        return f"{value / 1e6:.3g}M"
    if magnitude >= 1e4:
        return f"{value / 1e3:.3g}k"
    if magnitude >= 100:
        return f"{value:,.0f}"
    return f"{value:.1e}" if magnitude < 1e-3 else f"{value:.3g}"


def _finite(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((x, y) for x, y in points if math.isfinite(y))


def _thin(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """At most `_MAX_POINTS`, each the mean of its neighbours; the last stays as it is."""
    if len(points) <= _MAX_POINTS:
        return points
    size = math.ceil(len(points) / _MAX_POINTS)
    buckets = [points[i : i + size] for i in range(0, len(points) - 1, size)]
    means = [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in buckets]
    return (*means, points[-1])


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _padded(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    values = [y for _, y in points]
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    # A quantity that is never negative does not get a negative axis.
    return (max(low - margin, 0.0) if low >= 0 else low - margin, high + margin)


def _pixel(frame: Frame, point: tuple[float, float]) -> tuple[float, float]:
    return round(frame.x(point[0]), 1), round(frame.y(point[1]), 1)


def _grid(frame: Frame, x_label: str) -> str:
    parts = []
    for value in ticks(*frame.y_range):
        y = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_number(value)}</text>'
        )
    parts += [
        f'<text class="tick" x="{frame.x(value):.1f}" y="{HEIGHT - 10}" text-anchor="middle">'
        f"{format_number(value)}</text>"
        for value in ticks(*frame.x_range, number=6)
        if value == int(value)
    ]
    parts.append(
        f'<text class="tick" x="{_LEFT - 14}" y="{HEIGHT - 10}" text-anchor="end">'
        f"{escape(x_label)}</text>"
    )
    return "".join(parts)


def _borders(frame: Frame, borders: Sequence[tuple[float, str]]) -> str:
    parts = []
    low, high = frame.x_range
    for position, name in borders:
        if not low <= position <= high:
            continue
        x = frame.x(position)
        if position > low:
            parts.append(
                f'<line class="border" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            )
        parts.append(f'<text class="stage" x="{x + 4:.1f}" y="{_TOP - 3}">{escape(name)}</text>')
    return "".join(parts)


def _line(frame: Frame, series: Series, index: int) -> str:
    colour = f"s{index % NUM_COLOURS}"
    pixels = [_pixel(frame, point) for point in series.points]
    path = " ".join(f"{x},{y}" for x, y in pixels)
    dots = ""
    if len(pixels) <= 40:
        dots = "".join(
            f'<circle class="{colour} dot" cx="{x}" cy="{y}" r="2.4"/>' for x, y in pixels
        )
    return f'<polyline class="{colour} line" points="{path}"/>{dots}'


def _legend(labels: Sequence[str]) -> str:
    items = "".join(
        f'<span><i class="f{index % NUM_COLOURS}"></i>{escape(label)}</span>'
        for index, label in enumerate(labels)
    )
    return f'<span class="legend">{items}</span>'
