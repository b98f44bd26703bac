"""One maker per noun, for tests of NexRL and of recipes: valid by default, any field by keyword.

Example: `make_group(rewards=[1.0, 0.0])` is a complete rollout group of two scored rollouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from nexrl.errors import FailureClass
from nexrl.types import (
    DEFAULT_POLICY,
    Batch,
    Completion,
    Draw,
    Failure,
    FinishReason,
    PolicyVersion,
    RolloutGroup,
    RolloutRecord,
    TokenRow,
    Trajectory,
    TrajectoryStatus,
    Turn,
    VersionSpan,
)

if TYPE_CHECKING:
    from nexrl.pool.trajectory_pool import TrajectoryPool


def make_version(
    number: int = 0, *, policy: str = DEFAULT_POLICY, incarnation: int = 0
) -> PolicyVersion:
    """A policy version."""
    return PolicyVersion(policy=policy, incarnation=incarnation, number=number)


def make_row(
    *,
    prompt_ids: Sequence[int] = (11, 12),
    response_ids: Sequence[int] = (5, 6, 2),
    logprobs: Sequence[float] | None = (-0.1, -0.2, -0.3),
    version: int | None = 0,
    policy: str = DEFAULT_POLICY,
    incarnation: int = 0,
    **fields: Any,
) -> TokenRow:
    """A row whose response tokens are sampled and trained; `logprobs=None` or `version=None` leave
    those out. When `response_ids` is given without matching logprobs, every one is -0.1."""
    num_prompt, num_drawn = len(prompt_ids), len(response_ids)
    total = num_prompt + num_drawn
    sampled = np.zeros(total, np.bool_)
    sampled[num_prompt:] = True
    if logprobs is not None:
        drawn = list(logprobs) if len(logprobs) == num_drawn else [-0.1] * num_drawn
        fields.setdefault("behavior_logprobs", np.array([0.0] * num_prompt + drawn, np.float32))
    if version is not None and num_drawn:
        spans = (
            VersionSpan(
                start=num_prompt,
                end=total,
                version=make_version(version, policy=policy, incarnation=incarnation),
            ),
        )
        fields.setdefault("versions", spans)
    if num_drawn:
        fields.setdefault("turns", (Turn(start=num_prompt, end=total),))
    fields.setdefault("sampled", sampled)
    fields.setdefault("loss_mask", sampled)
    return TokenRow(token_ids=np.array([*prompt_ids, *response_ids], np.int32), **fields)


def make_completion(
    token_ids: Sequence[int] = (5, 6, 2),
    *,
    prompt_ids: Sequence[int] = (11, 12),
    logprobs: Sequence[float] | None = (-0.1, -0.2, -0.3),
    version: int = 0,
    policy: str = DEFAULT_POLICY,
    incarnation: int = 0,
    text: str = "4",
    finish_reason: FinishReason = "eos",
    **fields: Any,
) -> Completion:
    """A completion drawn by one version."""
    values: np.ndarray[Any, np.dtype[np.float32]] | None = None
    if logprobs is not None:
        drawn = list(logprobs) if len(logprobs) == len(token_ids) else [-0.1] * len(token_ids)
        values = np.array(drawn, np.float32)
    span = VersionSpan(
        start=0,
        end=len(token_ids),
        version=make_version(version, policy=policy, incarnation=incarnation),
    )
    fields.setdefault("versions", (span,) if token_ids else ())
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=values,
        text=text,
        finish_reason=finish_reason,
        prompt_token_ids=np.array(prompt_ids, np.int32),
        **fields,
    )


def make_trajectory(
    *,
    reward: float | None = 1.0,
    version: int | None = 0,
    policy: str = DEFAULT_POLICY,
    incarnation: int = 0,
    prompt_ids: Sequence[int] = (11, 12),
    response_ids: Sequence[int] = (5, 6, 2),
    logprobs: Sequence[float] | None = (-0.1, -0.2, -0.3),
    **fields: Any,
) -> Trajectory:
    """A completed one-row trajectory; give `rows=` for other rows."""
    if "rows" not in fields and "tokens" not in fields:
        fields["rows"] = (
            make_row(
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                logprobs=logprobs,
                version=version,
                policy=policy,
                incarnation=incarnation,
            ),
        )
    fields.setdefault("prompt", "2+2=")
    fields.setdefault("response", "4")
    return Trajectory(reward=reward, policy=policy, **fields)


def make_failure(message: str = "engine answered 500", **fields: Any) -> Failure:
    """An exhausted infrastructure failure."""
    fields.setdefault("failure_class", FailureClass.INFRASTRUCTURE)
    fields.setdefault("where", "inference")
    fields.setdefault("error_type", "ServiceError")
    return Failure(message=message, **fields)


def make_draw(item: int | str = 0, *, draw: int = 0, **fields: Any) -> Draw:
    """A draw of item `i0`, `i1` ...; its order is the item's number."""
    item_id = f"i{item}" if isinstance(item, int) else item
    fields.setdefault("order", item if isinstance(item, int) else 0)
    fields.setdefault("row", {"prompt": "2+2=", "answer": "4"})
    return Draw(item_id=item_id, draw=draw, **fields)


def make_record(
    draw: Draw | None = None,
    member: int = 0,
    *,
    status: TrajectoryStatus | str = TrajectoryStatus.COMPLETED,
    reward: float | None = 1.0,
    trajectories: Sequence[Trajectory] | None = None,
    **fields: Any,
) -> RolloutRecord:
    """The end of one rollout. Keywords of `make_trajectory` (version, policy, prompt_ids ...) shape
    its trajectory; a failed or cancelled record leaves none and has a reason."""
    draw = draw or make_draw()
    status = TrajectoryStatus(status)
    rollout_id = fields.pop("rollout_id", f"{draw.key}/{member}")
    own = ("reason", "failure", "attempts", "duration_s")
    record_fields = {name: fields.pop(name) for name in own if name in fields}
    if status is TrajectoryStatus.FAILED:
        record_fields.setdefault("failure", make_failure())
        record_fields.setdefault("reason", "infrastructure/ServiceError")
    elif status is TrajectoryStatus.CANCELLED:
        record_fields.setdefault("reason", "shutdown")
    elif trajectories is None:
        if status is TrajectoryStatus.TRUNCATED:
            fields.setdefault("truncation_cause", "length")
        identity = {
            "trajectory_id": f"{rollout_id}/t0",
            "rollout_id": rollout_id,
            "group_id": draw.key,
            "item_id": draw.item_id,
            "draw": draw.draw,
            "member": member,
        }
        trajectories = (make_trajectory(reward=reward, status=status, **{**identity, **fields}),)
    return RolloutRecord(
        rollout_id=rollout_id,
        group_key=draw.key,
        member=member,
        status=status,
        trajectories=tuple(trajectories or ()),
        **record_fields,
    )


def make_group(
    rewards: Sequence[float | None] = (1.0, 0.0),
    *,
    item: int | str = 0,
    admission: int = 0,
    admitted_version: int = 0,
    policy: str = DEFAULT_POLICY,
    source: str = "",
    records: Sequence[RolloutRecord] | None = None,
    **fields: Any,
) -> RolloutGroup:
    """A complete rollout group with one member per reward; further keywords go to `make_record`."""
    draw = make_draw(item)
    if records is None:
        records = tuple(
            make_record(draw, member, reward=reward, policy=policy, **fields)
            for member, reward in enumerate(rewards)
        )
    return RolloutGroup(
        group_key=draw.key,
        policy=policy,
        source=source,
        admission=admission,
        admitted_version=admitted_version,
        records=tuple(records),
    )


def make_batch(
    groups: Sequence[RolloutGroup] | None = None, *, version: int = 0, **fields: Any
) -> Batch:
    """A batch; two groups of two by default."""
    if groups is None:
        groups = (make_group(item=0, admission=0), make_group(item=1, admission=1))
    fields.setdefault("batch_id", version)
    fields.setdefault("policy", DEFAULT_POLICY)
    fields.setdefault("num_expected_groups", len(groups))
    return Batch(version=version, groups=tuple(groups), **fields)


class RecordingTracker:
    """A Tracker that keeps everything it is told, for assertions."""

    def __init__(self) -> None:
        self.observations: dict[str, list[float]] = {}
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.records: list[RolloutRecord] = []
        self.warnings: list[str] = []
        self.open_activities: list[tuple[str, str]] = []
        self.past_activities: list[tuple[str, str]] = []

    @contextmanager
    def activity(self, kind: str, name: str) -> Iterator[None]:
        """Listed in `open_activities` while it lasts, then in `past_activities`."""
        self.open_activities.append((kind, name))
        try:
            yield
        finally:
            self.open_activities.remove((kind, name))
            self.past_activities.append((kind, name))

    def observe(self, metric: str, value: float) -> None:
        """Kept in order, by metric."""
        self.observations.setdefault(metric, []).append(value)

    def count(self, metric: str, amount: float = 1.0) -> None:
        """Summed in `counts`."""
        self.counts[metric] += amount

    def rollout_ended(self, record: RolloutRecord) -> None:
        """Kept in order."""
        self.records.append(record)

    def warn(self, message: str) -> None:
        """Kept in order, repeats included."""
        self.warnings.append(message)


def make_tracker() -> RecordingTracker:
    """A fresh recording tracker."""
    return RecordingTracker()


def make_pool(**fields: Any) -> TrajectoryPool:
    """A pool of one group of two rollouts per batch; any constructor keyword of TrajectoryPool."""
    from nexrl.pool.trajectory_pool import TrajectoryPool

    defaults: Mapping[str, Any] = {
        "policy": DEFAULT_POLICY,
        "batch_size": 1,
        "rollout_repeat_n": 2,
        "take_deadline_s": 5.0,
    }
    if "tracker" not in fields:
        fields["tracker"] = make_tracker()
    return TrajectoryPool(**{**defaults, **fields})
