"""summary.json: how a run ended, for programs; written on success, failure and interruption alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.activity.metric_sink import TRAIN_AXIS, VALIDATION_AXIS, MetricRecord
from nexrl.atomic import write_json
from nexrl.types import LedgerSnapshot

RunStatus = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """One stage of a run."""

    name: str
    """Stage name."""
    steps: int
    """Batches trained in it."""
    accuracy_first: float | None = None
    """validation/accuracy before its first step; None when it never validated."""
    accuracy_last: float | None = None
    """validation/accuracy of its last validation."""
    reward_first: float | None = None
    """validation/reward before its first step."""
    reward_last: float | None = None
    """validation/reward of its last validation."""
    time_share: Mapping[str, float] = field(default_factory=dict)
    """Share of its wall time by activity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A whole run."""

    status: RunStatus
    """completed, failed or interrupted."""
    exit_reason: str
    """In one line: what ended it."""
    stages: tuple[StageSummary, ...]
    """In order; the last may be unfinished."""
    steps: int
    """Batches trained."""
    trajectories: int
    """Trajectories that rollouts left, validation included."""
    ledger: LedgerSnapshot | Mapping[str, Any] | None
    """Rollouts by outcome."""
    wall_s: float
    """Seconds from start to end."""
    time_share: Mapping[str, float]
    """Share of wall time by activity."""
    slowest: tuple[Mapping[str, Any], ...] = ()
    """The longest pieces of work: kind, name, seconds."""
    failures: tuple[Mapping[str, Any], ...] = ()
    """Kinds of rollout failures: error_type, count, first_rollout_id, message."""


def summarize_stages(
    records: Iterable[MetricRecord], *, time_shares: Mapping[str, Mapping[str, float]]
) -> tuple[StageSummary, ...]:
    """Stage summaries from what was logged, in order of first appearance.

    So a resumed run also counts the stages that an earlier process trained.
    """
    steps: dict[str, set[int]] = {}
    validations: dict[str, list[Mapping[str, float]]] = {}
    for record in records:
        done = steps.setdefault(record.stage, set())
        if record.axis == TRAIN_AXIS:
            done.add(record.step)
        elif record.axis == VALIDATION_AXIS:
            validations.setdefault(record.stage, []).append(record.metrics)
    summaries = []
    for name, done in steps.items():
        validated = validations.get(name) or [{}]
        first, last = validated[0], validated[-1]
        summaries.append(
            StageSummary(
                name=name,
                steps=len(done),
                accuracy_first=first.get("validation/accuracy"),
                accuracy_last=last.get("validation/accuracy"),
                reward_first=first.get("validation/reward"),
                reward_last=last.get("validation/reward"),
                time_share=time_shares.get(name, {}),
            )
        )
    return tuple(summaries)


def summarize_run(
    tracker: ActivityTracker,
    *,
    status: RunStatus,
    exit_reason: str,
    stages: tuple[StageSummary, ...],
    ledger: LedgerSnapshot | Mapping[str, Any] | None,
) -> RunSummary:
    """The summary of a run that is ending, with the tracker's numbers."""
    return RunSummary(
        status=status,
        exit_reason=exit_reason,
        stages=stages,
        steps=sum(stage.steps for stage in stages),
        trajectories=tracker.rollouts.num_trajectories,
        ledger=ledger,
        wall_s=round(tracker.wall_s, 3),
        time_share=tracker.time_share(),
        slowest=tuple(dataclasses.asdict(activity) for activity in tracker.spans.slowest()),
        failures=tuple(
            {
                "error_type": kind.error_type,
                "count": kind.count,
                "first_rollout_id": kind.first_rollout_id,
                "message": kind.first.message,
            }
            for kind in tracker.failures
        ),
    )


def write_summary(path: Path, summary: RunSummary) -> None:
    """Write summary.json in one step."""
    write_json(path, dataclasses.asdict(summary))
