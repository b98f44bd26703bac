"""Trajectory and TokenRow: what a rollout leaves, checked at construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from nexrl.errors import FailureClass, InvariantError
from nexrl.types.quick import quick
from nexrl.types.sampling import Sampling
from nexrl.types.versions import (
    DEFAULT_POLICY,
    Array,
    BoolArray,
    FinishReason,
    FloatArray,
    IntArray,
    LogprobKind,
    PolicyVersion,
    VersionSource,
    VersionSpan,
    check_spans,
)


class TrajectoryStatus(StrEnum):
    """How a rollout ended. `failed` and `cancelled` are never trained."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDED_WELL = (TrajectoryStatus.COMPLETED, TrajectoryStatus.TRUNCATED)
TruncationCause = Literal["length", "context", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rollout did not complete."""

    failure_class: FailureClass
    """Who is to blame."""
    message: str
    """In words, with file and line where user code is to blame."""
    retryable: bool = False
    """True when another attempt may succeed."""
    where: str = ""
    """Component that failed: inference, reward, step, environment ..."""
    error_type: str = ""
    """Name of the innermost exception class."""
    traceback: str = ""
    """Formatted traceback of the innermost cause, for user code."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The tokens of one completion within a row."""

    start: int
    """First drawn token, inclusive."""
    end: int
    """Last drawn token, exclusive."""
    finish_reason: FinishReason = "eos"
    """Why this draw ended (FR-077)."""
    reward: float | None = None
    """What the turn itself earned, beside the trajectory's reward; None means nothing is known, and
    counts as 0. A turn of which no token is trained takes no part, its reward neither."""
    anchor: str = ""
    """Key of the state that the turn started from, for example a hash of the observation: equal keys
    within a baseline group mean the same state. Empty when unknown."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.end < self.start:
            raise InvariantError(f"turn [{self.start}, {self.end}) is no range of tokens")
        if self.reward is not None and not math.isfinite(self.reward):
            raise InvariantError(f"turn reward must be finite or None, got {self.reward!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpan:
    """Tokens that stand for an image or another blob."""

    blob_hash: str
    """Content hash of the blob."""
    start: int
    """First placeholder token, inclusive."""
    end: int
    """Last placeholder token, exclusive."""
    processor: str = ""
    """Name and version of the processor that chose the number of placeholders."""


Alignment = Literal["token_given_prefix", "state_at_token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A further per-token array of a row: teacher top-k, routed experts, values ..."""

    values: Array
    """[T, ...], aligned with token_ids."""
    alignment: Alignment = "token_given_prefix"
    """Whether entry t speaks of token t given the tokens before it, or of the state after it."""
    pad_value: float = 0.0
    """What a padded position holds."""


def _check_turns(turns: tuple[Turn, ...], length: int) -> None:
    """Turns ascend, do not overlap and stay inside [0, length)."""
    position = 0
    for turn in turns:
        if turn.start < position or turn.end > length:
            raise InvariantError(
                f"token row: turn [{turn.start}, {turn.end}) is out of order or outside "
                f"[0, {length})"
            )
        position = turn.end


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One token sequence with aligned arrays; never split.

    Equal lengths, `loss_mask` a subset of `sampled` (where the policy drew anything), finite
    logprobs wherever sampled: checked here, at the door, not later in the loss.
    """

    token_ids: IntArray
    """[T]"""
    loss_mask: BoolArray
    """[T] choice of what to train."""
    sampled: BoolArray | None = None
    """[T] fact of what the policy drew; None means nothing is known to be drawn (SFT, pushed rows)."""
    behavior_logprobs: FloatArray | None = None
    """[T] natural log of token t given the tokens before it; 0 where not sampled."""
    versions: tuple[VersionSpan, ...] = ()
    """Run-length versions over the sampled tokens."""
    version_source: VersionSource = "engine"
    """Who says which version drew the tokens."""
    temperature: float = 1.0
    """Temperature of the draw."""
    logprob_kind: LogprobKind = "tempered"
    """Which distribution behavior_logprobs refers to."""
    turns: tuple[Turn, ...] = ()
    """The completions inside the row, in order."""
    media: tuple[MediaSpan, ...] = ()
    """Placeholders of images and other blobs."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Further aligned arrays by name."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        aligned: list[tuple[str, Array | None]] = [
            ("loss_mask", self.loss_mask),
            ("sampled", self.sampled),
            ("behavior_logprobs", self.behavior_logprobs),
        ]
        aligned += [(f"column {name!r}", column.values) for name, column in self.columns.items()]
        for name, array in aligned:
            if array is not None and len(array) != length:
                raise InvariantError(
                    f"token row: {name} has length {len(array)}, token_ids has {length}"
                )
        if self.versions:
            check_spans(self.versions, length, "token row")
        if self.turns:
            _check_turns(self.turns, length)
        if (
            self.sampled is not None
            and self.loss_mask is not self.sampled
            and bool(np.any(self.loss_mask & ~self.sampled))
        ):
            raise InvariantError(
                "token row: loss_mask trains tokens that the policy did not sample"
            )
        if self.behavior_logprobs is not None:
            if self.sampled is None:
                raise InvariantError("token row: behavior_logprobs given without `sampled`")
            # Squares are finite where the logprobs are; only their sum may overflow, in which case
            # each is looked at. One product is a fifth of the cost of `np.isfinite(...).all()`.
            logprobs = self.behavior_logprobs
            if not math.isfinite(np.dot(logprobs, logprobs)) and not np.isfinite(logprobs).all():
                raise InvariantError("token row: behavior_logprobs has a NaN or infinite entry")

    @property
    def num_tokens(self) -> int:
        """T"""
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens with loss_mask 1."""
        return int(np.count_nonzero(self.loss_mask))

    def oldest_trained_version(self) -> PolicyVersion | None:
        """The lowest version number among trained tokens; None when no span is known."""
        oldest: PolicyVersion | None = None
        for span in self.versions:
            if (oldest is None or span.version.number < oldest.number) and bool(
                self.loss_mask[span.start : span.end].any()
            ):
                oldest = span.version
        return oldest


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Time that one call of a rollout spent with one service, in seconds of the run's clock."""

    kind: str
    """inference, reward, environment or teacher."""
    queued_s: float
    """When the call was made."""
    started_s: float
    """When the service began; equals queued_s when unknown."""
    finished_s: float
    """When the answer arrived."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a trajectory came from, enough to repeat it."""

    sampling: Sampling | None = None
    """Parameters of the (last) draw."""
    seed: int | None = None
    """Seed of the first call."""
    engine: str = ""
    """Engine name and build."""
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    """The engine's capability record at the time."""
    reward_contract: str = ""
    """Identity of the reward function: path, name and content hash."""
    environment: str = ""
    """Environment name and version."""
    segments: tuple[Segment, ...] = ()
    """Calls to services in order."""
    attempts: int = 1
    """Attempts it took, this one included."""
    started_s: float = 0.0
    """When the rollout started, in seconds of the run's clock."""
    finished_s: float = 0.0
    """When it ended."""


EMPTY_PROVENANCE = Provenance()


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What a rollout leaves: rows, status, rewards and provenance.

    Build it from five fields (`prompt`, `response`, `tokens`, `loss_mask`, `reward`) or from a
    completion (`Completion.to_trajectory`). Identity is filled in by the runner.

    Example: `Trajectory(prompt="2+2=", response="4", tokens=[5, 6, 7], loss_mask=[0, 0, 1], reward=1.0)`
    """

    prompt: str = ""
    """Text, for people."""
    response: str = ""
    """Text, for people."""
    tokens: IntArray | None = None
    """[T] of the only row; None when there are several rows. A list is accepted."""
    loss_mask: BoolArray | None = None
    """[T] of the only row. A list of 0 and 1 is accepted."""
    reward: float | None = None
    """Scalar reward; None means not scored. A failure never becomes 0."""
    rows: tuple[TokenRow, ...] = ()
    """Token rows; usually one, several when an agent forks or compacts."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Named components before weighting."""
    status: TrajectoryStatus = TrajectoryStatus.COMPLETED
    """How it ended."""
    truncation_cause: TruncationCause | None = None
    """Why it was truncated; set exactly when status is `truncated`."""
    failure: Failure | None = None
    """Set exactly when status is `failed`."""
    trajectory_id: str = ""
    """Unique in the run."""
    rollout_id: str = ""
    """The rollout that left it."""
    group_id: str = ""
    """Baseline key: which trajectories are compared."""
    item_id: str = ""
    """Data item."""
    draw: int = 0
    """Which visit to the item."""
    member: int = 0
    """Which of the group's rollouts, from 0."""
    role: str = ""
    """Role in a multi-role rollout; empty for one role."""
    run_id: str = ""
    """Run that made it."""
    policy: str = DEFAULT_POLICY
    """Model that drew it."""
    provenance: Provenance = EMPTY_PROVENANCE
    """Where it came from."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The worker's own numbers, logged as rollout/<name> averaged over trajectories."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Data-item columns a trainer wants, and fields of newer schema versions."""

    def __post_init__(self) -> None:
        if self.rows:
            if len(self.rows) == 1 and self.tokens is not self.rows[0].token_ids:
                object.__setattr__(self, "tokens", self.rows[0].token_ids)
                object.__setattr__(self, "loss_mask", self.rows[0].loss_mask)
        elif self.tokens is not None:
            tokens = np.asarray(self.tokens, dtype=np.int32)
            mask = (
                np.ones(len(tokens), np.bool_)
                if self.loss_mask is None
                else np.asarray(self.loss_mask).astype(np.bool_)
            )
            object.__setattr__(self, "tokens", tokens)
            object.__setattr__(self, "loss_mask", mask)
            object.__setattr__(self, "rows", (TokenRow(token_ids=tokens, loss_mask=mask),))
        if self.reward is not None and not math.isfinite(self.reward):
            raise InvariantError(f"trajectory reward must be finite or None, got {self.reward!r}")
        if (self.status is TrajectoryStatus.FAILED) != (self.failure is not None):
            raise InvariantError("a trajectory has a failure exactly when its status is `failed`")

    @property
    def num_response_tokens(self) -> int:
        """Trained tokens over all rows."""
        if len(self.rows) == 1:
            return self.rows[0].num_trained_tokens
        return sum(row.num_trained_tokens for row in self.rows)

    @property
    def trainable(self) -> bool:
        """Completed or truncated, with at least one row."""
        return bool(self.rows) and self.status in _ENDED_WELL

    def oldest_version(self) -> PolicyVersion | None:
        """The lowest version among all trained tokens; None when unknown."""
        versions = [v for row in self.rows if (v := row.oldest_trained_version()) is not None]
        return min(versions, key=lambda v: v.number, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A later judgement about a trajectory: reward, teacher column, advantage. Append-only.

    Keyed by (trajectory, kind, producer, version): a replay with another reward adds one.
    """

    trajectory_id: str
    """Which trajectory."""
    kind: str
    """reward, teacher, reference, advantage ..."""
    producer: str
    """Who made it, for example a reward contract."""
    version: str
    """The producer's version."""
    value: Any
    """A number, a mapping of numbers, or an array."""
