"""What is checked of a rollout before it may join its group.

Called by `Arrivals` for each record: first `check_identity` (whose tokens are these, and can
that version exist), then, after annotators, `first_unmet_need`. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real

import numpy as np

from nexrl.errors import InvariantError
from nexrl.pool.ledger import Outcome
from nexrl.types import RolloutRecord, Trajectory, TrajectoryStatus


def pushed_record(trajectory: Trajectory, group_key: str) -> RolloutRecord:
    """The rollout that a trajectory from outside stands for."""
    return RolloutRecord(
        rollout_id=trajectory.rollout_id or group_key,
        group_key=group_key,
        member=0,
        status=trajectory.status,
        trajectories=(trajectory,),
        failure=trajectory.failure,
    )


def with_group_ids(record: RolloutRecord) -> RolloutRecord:
    """The record with `group_id` filled in where the worker left it open: the group's key
    (`item_id/draw`), plus `/role` so that roles are never compared with each other (FR-046)."""
    if "" not in [t.group_id for t in record.trajectories]:
        return record
    key = record.group_key
    filled = tuple(
        t if t.group_id else replace(t, group_id=f"{key}/{t.role}" if t.role else key)
        for t in record.trajectories
    )
    return replace(record, trajectories=filled)


def ledger_reason(record: RolloutRecord) -> tuple[Outcome, str]:
    """Outcome and reason of a rollout by its status alone."""
    if record.status is TrajectoryStatus.CANCELLED:
        return "cancelled", record.reason or "cancelled"
    if record.status is not TrajectoryStatus.FAILED:
        return "ready", ""
    failure = record.failure
    if record.reason or failure is None:
        return "failed", record.reason or "unknown"
    return "failed", f"{failure.failure_class}/{failure.error_type or failure.where or 'unknown'}"


def check_identity(
    record: RolloutRecord,
    *,
    policy: str,
    incarnation: int,
    newest_version: int,
    allow_bounded: bool,
) -> int | None:
    """The oldest version number among trained tokens; None when no token says.

    Raises InvariantError for tokens of another policy or incarnation, of a version that does not
    exist yet, or (with `allow_bounded` false) of a version that is only known within bounds.
    """
    oldest: int | None = None
    for trajectory in record.trajectories:
        if not trajectory.trainable:
            continue
        name = trajectory.trajectory_id or f"of rollout {record.rollout_id or record.group_key}"
        if trajectory.policy != policy:
            raise InvariantError(
                f"trajectory {name} is of policy {trajectory.policy!r}, but this pool trains "
                f"{policy!r}"
            )
        for row in trajectory.rows:
            for span in row.versions:
                version = span.version
                if version.policy != policy or version.incarnation != incarnation:
                    raise InvariantError(
                        f"trajectory {name} has tokens of {version}, but this pool trains "
                        f"{policy!r} in incarnation {incarnation}: an engine was not reloaded"
                    )
                if version.number > newest_version:
                    raise InvariantError(
                        f"trajectory {name} has tokens of {version}, but the newest version there "
                        f"can be is {newest_version}"
                    )
            if row.version_source == "bounded" and not allow_bounded:
                raise InvariantError(
                    f"trajectory {name} has versions known only within bounds (version_source "
                    "`bounded`); mode sync accepts `engine` and `pinned`"
                )
            # Where one version drew everything there is no need to look which tokens are trained.
            first = row.versions[0].version if len(row.versions) == 1 else None
            trained = first or row.oldest_trained_version()
            if trained is not None and (oldest is None or trained.number < oldest):
                oldest = trained.number
    return oldest


def first_unmet_need(
    trajectories: Sequence[Trajectory], needs: Sequence[str], *, logprobs_optional: bool
) -> str | None:
    """The first need that some of these trainable trajectories lacks.

    reward: a number; None is abstain and never becomes 0 (FR-070, FR-071).
    behavior_logprobs: every row has them, not of a truncated distribution (FR-083). With
    `logprobs_optional` (mode sync, proximal policy recomputed) a row may have none at all.
    greedy_reward: a finite number in `Trajectory.extra["greedy_reward"]`.
    Any other need `x`: every row has a column `x` or `x_logprobs`.
    """
    for need in needs:
        for trajectory in trajectories:
            if not _meets(trajectory, need, logprobs_optional):
                return need
    return None


def prompt_fingerprint(trajectory: Trajectory) -> bytes:
    """Token ids before the first drawn token of the first row."""
    row = trajectory.rows[0]
    if row.turns:
        return row.token_ids[: row.turns[0].start].tobytes()
    drawn = row.loss_mask if row.sampled is None else row.sampled
    end = int(np.argmax(drawn)) if drawn.any() else len(row.token_ids)
    return row.token_ids[:end].tobytes()


def _meets(trajectory: Trajectory, need: str, logprobs_optional: bool) -> bool:
    if need == "reward":
        return trajectory.reward is not None
    if need == "greedy_reward":
        value = trajectory.extra.get(need)
        return isinstance(value, Real) and math.isfinite(value)
    for row in trajectory.rows:
        if need != "behavior_logprobs":
            met = need in row.columns or f"{need}_logprobs" in row.columns
        elif row.behavior_logprobs is None:
            met = logprobs_optional
        else:
            met = row.logprob_kind != "truncated"
        if not met:
            return False
    return True
