"""Logged metrics as points over training steps, for report and curve."""

from __future__ import annotations

from collections.abc import Iterable

from nexrl.activity.metric_sink import TRAIN_AXIS, MetricRecord
from nexrl.types import DEFAULT_POLICY


def stage_borders(records: Iterable[MetricRecord]) -> list[tuple[float, str]]:
    """(last step before it, name) of each stage in order of appearance; empty for one stage."""
    starts: dict[str, float] = {}
    last = 0
    for record in records:
        if record.stage not in starts:
            starts[record.stage] = float(last)
        last = max(last, record.at_step)
    named = [(start, name) for name, start in starts.items() if name]
    return named if len(named) > 1 else []


def series_of(records: Iterable[MetricRecord], metric: str) -> tuple[tuple[float, float], ...]:
    """Points of a metric over training steps; of several at one step the last."""
    points: dict[float, float] = {}
    for record in records:
        if metric in record.metrics and record.policy == DEFAULT_POLICY:
            # A validation's own axis is its version: on the page everything shares the step.
            x = record.step if record.axis == TRAIN_AXIS else record.at_step
            points[float(x)] = record.metrics[metric]
    return tuple(sorted(points.items()))
