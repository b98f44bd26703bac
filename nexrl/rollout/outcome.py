"""How a rollout ended, as values: what `step` returned or raised becomes status, reason, failure,
and trajectories get their identity.

Pure functions between the runner (which awaits) and the `RolloutRecord` it hands on. A worker says
what happened; who did it, for which item, with which seed and when, is known to the scope of the
attempt. Built-in workers ask it beforehand and so build each trajectory once.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nexrl.errors import (
    FailureClass,
    InvariantError,
    NexRLError,
    UserCodeError,
    classify,
    innermost_cause,
    user_frame,
)
from nexrl.rollout.scope import RolloutScope
from nexrl.types import (
    DEFAULT_POLICY,
    EMPTY_PROVENANCE,
    Failure,
    Provenance,
    Trajectory,
    TrajectoryStatus,
    TruncationCause,
)
from nexrl.types.quick import quick


class StepResultError(UserCodeError):
    """`step` left nothing that can be stored: names what it returned and what is accepted."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a rollout, before it has its identity."""

    status: TrajectoryStatus
    """How it ended."""
    trajectories: tuple[Trajectory, ...] = ()
    """What it left."""
    failure: Failure | None = None
    """Why it failed."""
    reason: str = ""
    """Ledger reason when failed or cancelled."""


def collect(result: Any, put: Sequence[Trajectory]) -> list[Trajectory]:
    """Everything a `step` left: what it put, then what it returned. Raises StepResultError."""
    trajectories = [*put, *_returned(result, bool(put))]
    for trajectory in trajectories:
        if trajectory.status in (TrajectoryStatus.FAILED, TrajectoryStatus.CANCELLED):
            continue
        if not trajectory.rows or any(not row.num_tokens for row in trajectory.rows):
            raise StepResultError(
                "step() left a trajectory without tokens; give `tokens` and `loss_mask`, or `rows`, "
                "or build it with completion.to_trajectory(...)"
            )
    return trajectories


def _returned(result: Any, has_put: bool) -> list[Trajectory]:
    accepted = "a Trajectory, a non-empty list of them, or None after self.put_trajectory(...)"
    if isinstance(result, Trajectory):
        return [result]
    if isinstance(result, list | tuple):
        for index, entry in enumerate(result):
            if not isinstance(entry, Trajectory):
                raise StepResultError(
                    f"step() returned a list whose entry {index} is a {type(entry).__name__} "
                    f"({entry!r:.80}); accepted: {accepted}"
                )
        if result or has_put:
            return list(result)
        raise StepResultError(f"step() returned an empty list; accepted: {accepted}")
    if result is None:
        if has_put:
            return []
        raise StepResultError(f"step() returned None and put no trajectory; accepted: {accepted}")
    raise StepResultError(
        f"step() returned a {type(result).__name__} ({result!r:.80}); accepted: {accepted}"
    )


def ended(trajectories: list[Trajectory]) -> Outcome:
    """The outcome of a step that ended by itself; a worker may report a failure of its own.

    The same object left twice (put, then returned) counts once.
    """
    distinct = tuple({id(t): t for t in trajectories}.values())
    statuses = {t.status for t in distinct}
    for status in (TrajectoryStatus.COMPLETED, TrajectoryStatus.TRUNCATED):
        if status in statuses:
            return Outcome(status=status, trajectories=distinct)
    failure = next((t.failure for t in distinct if t.failure is not None), None)
    if failure is None:
        return Outcome(status=TrajectoryStatus.CANCELLED, trajectories=distinct, reason="by_worker")
    return failed(failure, distinct)


def failed(failure: Failure, trajectories: Sequence[Trajectory] = ()) -> Outcome:
    """A failed rollout. What it had is kept for the store and can never be trained."""
    return Outcome(
        status=TrajectoryStatus.FAILED,
        trajectories=_marked(trajectories, TrajectoryStatus.FAILED, failure),
        failure=failure,
        reason=f"{failure.failure_class.value}/{failure.error_type or 'reported'}",
    )


def cancelled(trajectories: Sequence[Trajectory], reason: str) -> Outcome:
    """A rollout that was ended from outside."""
    kept = _marked(trajectories, TrajectoryStatus.CANCELLED)
    return Outcome(status=TrajectoryStatus.CANCELLED, trajectories=kept, reason=reason)


def _marked(
    trajectories: Sequence[Trajectory], status: TrajectoryStatus, failure: Failure | None = None
) -> tuple[Trajectory, ...]:
    return tuple(
        [replace(t, status=status, failure=failure, truncation_cause=None) for t in trajectories]
    )


def truncated(trajectories: Sequence[Trajectory], cause: TruncationCause) -> Outcome:
    """A rollout cut short that keeps what was put, with the last good state (FR-074, FR-076)."""
    kept = tuple(
        replace(t, status=TrajectoryStatus.TRUNCATED, truncation_cause=cause)
        if t.status is TrajectoryStatus.COMPLETED
        else t
        for t in trajectories
    )
    return Outcome(status=TrajectoryStatus.TRUNCATED, trajectories=kept)


def describe_failure(error: BaseException, scope: RolloutScope, *, builtin: bool) -> Failure:
    """What an exception out of `step` means.

    A broken invariant inside a custom worker (unequal lengths in a trajectory it builds) is that
    worker's fault and must not stop the run; inside a built-in one it is ours.
    """
    failure_class = classify(error)
    if isinstance(error, InvariantError) and not builtin:
        failure_class = FailureClass.USER_CODE
    cause = innermost_cause(error)
    teller = error if isinstance(error, NexRLError) else cause
    text = str(teller) or repr(teller)
    trace = ""
    if failure_class in (FailureClass.USER_CODE, FailureClass.INVARIANT):
        if (frame := user_frame(error)) not in text:
            text = f"{text} at {frame}"
        trace = "".join(traceback.format_exception(cause))
    # Only infrastructure is retried, and of it only what may succeed another time.
    may_succeed = not isinstance(error, NexRLError) or error.retryable
    return Failure(
        failure_class=failure_class,
        message=f"{text} (item {scope.source.item_id}, member {scope.member})",
        retryable=failure_class is FailureClass.INFRASTRUCTURE and may_succeed,
        where=scope.blames(error) or "step",
        error_type=type(cause).__name__,
        traceback=trace,
    )


def describe_deadline(
    error: BaseException, scope: RolloutScope, *, deadline_s: float, last_failure: Failure | None
) -> Failure:
    """Who used up a rollout's time, from the cancellation that ended it: a service that had failed
    before, a reward call, the policy (a draw in progress), or the worker's own code."""
    service = scope.blames(error)
    message = (
        f"rollout reached its deadline of {deadline_s:g} s (rollout_worker.deadline_s; item "
        f"{scope.source.item_id}, member {scope.member})"
    )
    failure_class = FailureClass.USER_CODE
    if last_failure is not None:
        failure_class = last_failure.failure_class
        message += f" while retrying after {last_failure.error_type}: {last_failure.message}"
    elif service:
        failure_class = (
            FailureClass.POLICY if service == "inference" else FailureClass.INFRASTRUCTURE
        )
        message += f" while waiting for {service}"
    else:
        notes = getattr(error, "__notes__", ())
        message += "".join(f"; {note}" for note in notes) or " inside step()"
    return Failure(
        failure_class=failure_class,
        message=message,
        where=service or "step",
        error_type="DeadlineError",
    )


def identified(trajectories: Sequence[Trajectory], scope: RolloutScope) -> tuple[Trajectory, ...]:
    """The trajectories with every identity field and their provenance."""
    return tuple([_identified(t, i, scope) for i, t in enumerate(trajectories)])


def _identified(trajectory: Trajectory, index: int, scope: RolloutScope) -> Trajectory:
    if trajectory.trajectory_id == f"{scope.rollout_id}.{index}":
        return trajectory
    identity = scope.identity(role=trajectory.role, index=index)
    if trajectory.group_id:
        identity["group_id"] = _inside(scope.source.key, trajectory.group_id)
    if trajectory.policy != DEFAULT_POLICY:
        identity["policy"] = trajectory.policy
    if trajectory.provenance is not EMPTY_PROVENANCE:
        identity["provenance"] = _merged(trajectory.provenance, identity["provenance"])
    if trajectory.reward is not None:
        identity["reward"] = float(trajectory.reward)
    return replace(trajectory, **identity)


def _inside(key: str, own: str) -> str:
    """A worker's own baseline key, kept inside the draw so that it never spans two hand-outs."""
    return own if own == key or own.startswith(f"{key}/") else f"{key}/{own}"


def _merged(own: Provenance, filled: Provenance) -> Provenance:
    """The worker's own statements win where it made any; times and attempts are the runner's."""
    stated: dict[str, Any] = {
        name: value
        for name in ("sampling", "seed", "engine", "capabilities", "reward_contract", "environment")
        if (value := getattr(own, name)) != getattr(EMPTY_PROVENANCE, name)
    }
    return replace(filled, **stated, segments=(*own.segments, *filled.segments))
