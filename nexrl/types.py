"""The nouns that cross module borders: frozen dataclasses over numpy, no torch.

Words are those of docs/design.md. Read this file first: a data item is drawn, a rollout turns it
into a `Trajectory` of `TokenRow`s, rollouts of one draw form a `RolloutGroup`, groups a `Batch`,
a batch becomes `RowChunk`s for the train service, and ends in one published `WeightManifest`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nexrl.errors import FailureClass, InvariantError

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

DEFAULT_POLICY = "actor"
SCHEMA_VERSION = 1


# --- versions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, order=False)
class PolicyVersion:
    """One published state of one policy; `number` counts batches consumed."""

    policy: str = DEFAULT_POLICY
    """Name of the model being trained."""
    incarnation: int = 0
    """Counts starts of the run: a resume begins a new one, so old engines cannot be mistaken."""
    number: int = 0
    """Batches consumed before this version was published."""

    def next(self) -> PolicyVersion:
        """The version that the next batch ends in."""
        return replace(self, number=self.number + 1)

    def __str__(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Inverse of `str()`; raises InvariantError on anything else."""
        policy, sep, rest = text.rpartition("@")
        incarnation, dot, number = rest.partition(".")
        if not (sep and dot and policy and incarnation.isdigit() and number.isdigit()):
            raise InvariantError(
                f"not a policy version: {text!r} (expected policy@incarnation.number)"
            )
        return cls(policy=policy, incarnation=int(incarnation), number=int(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """The policy version that drew tokens [start, end) of a row or completion."""

    start: int
    """First token position, inclusive."""
    end: int
    """Last token position, exclusive; greater than start."""
    version: PolicyVersion
    """Version of these tokens; for `bounded` sources the oldest it can have been."""


VersionSource = Literal["engine", "pinned", "bounded"]
LogprobKind = Literal["tempered", "raw", "truncated"]
FinishReason = Literal["eos", "stop_string", "stop_token", "length", "abort", "error"]


# --- inference --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Every field is always sent, so no server default leaks in (FR-085)."""

    max_tokens: int = 256
    """Most tokens to draw for one choice."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """Nucleus mass; 1 is off. Below 1 the logprobs are `truncated` and RL refuses them (FR-083)."""
    top_k: int | None = None
    """Keep the k likeliest tokens; None is off, translated for each back end (FR-086)."""
    stop: tuple[str, ...] = ()
    """Stop strings; their tokens stay in token_ids, the text is cut before them."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop ids beside the model's own end-of-sequence ids; a drawn one stays in token_ids."""
    seed: int | None = None
    """Seed of choice 0; choice i uses `derive_seed(seed, i)` unless `seeds` is given."""
    seeds: tuple[int, ...] = ()
    """One seed for each choice; overrides `seed`. Its length must equal n."""

    @property
    def logprob_kind(self) -> LogprobKind:
        """What a logprob under these parameters is the logarithm of."""
        if self.top_p < 1.0 or self.top_k is not None:
            return "truncated"
        return "tempered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a completion continues: token ids, and the text they came from when it is known."""

    token_ids: IntArray
    """[P] exactly what the engine is fed."""
    text: str = ""
    """For people only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens drawn by one choice of one inference call."""

    token_ids: IntArray
    """[T] in sampling order, the stop token included when drawn; never re-tokenised from text."""
    logprobs: FloatArray | None
    """[T] natural log under the distribution that was sampled from; None when the engine has none."""
    versions: tuple[VersionSpan, ...]
    """Run-length policy versions over [0, T)."""
    text: str
    """Decoded, special tokens and stop strings removed."""
    finish_reason: FinishReason
    """Normalised; only `eos` and `stop_token` end with a trainable terminator."""
    prompt_token_ids: IntArray
    """[P] as the engine was fed."""
    version_source: VersionSource = "engine"
    """Who says so: the engine's stamp, a pinned path, or bounds around the call."""
    temperature: float = 1.0
    """Temperature of the draw."""
    logprob_kind: LogprobKind = "tempered"
    """Which distribution `logprobs` refers to."""
    seed: int | None = None
    """Seed of this choice."""
    raw_finish_reason: str = ""
    """The engine's own word."""

    def __post_init__(self) -> None:
        _check_spans(self.versions, len(self.token_ids), "completion")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise InvariantError(
                f"completion has {len(self.token_ids)} tokens but {len(self.logprobs)} logprobs"
            )

    @property
    def truncated(self) -> bool:
        """The draw ended because of a limit, judged by the finish reason alone (FR-022)."""
        return self.finish_reason in ("length", "abort")

    def to_trajectory(
        self, *, prompt: str = "", reward: float | None = None, **fields: Any
    ) -> Trajectory:
        """A one-row trajectory: prompt tokens untrained, drawn tokens trained.

        Further keywords are fields of `Trajectory`. A draw that ended by length is `truncated`
        with cause `length`.
        """
        if self.finish_reason == "length":
            fields.setdefault("status", TrajectoryStatus.TRUNCATED)
            fields.setdefault("truncation_cause", "length")
        return Trajectory(
            prompt=prompt, response=self.text, reward=reward, rows=(self.to_row(),), **fields
        )

    def to_row(self) -> TokenRow:
        """Prompt and completion as one token row whose mask is 1 exactly on drawn tokens."""
        num_prompt, num_drawn = len(self.prompt_token_ids), len(self.token_ids)
        total = num_prompt + num_drawn
        sampled = np.zeros(total, np.bool_)
        sampled[num_prompt:] = True
        logprobs: FloatArray | None = None
        if self.logprobs is not None:
            logprobs = np.zeros(total, np.float32)
            logprobs[num_prompt:] = self.logprobs
        return TokenRow(
            token_ids=np.concatenate([self.prompt_token_ids, self.token_ids]).astype(
                np.int32, copy=False
            ),
            sampled=sampled,
            loss_mask=sampled,
            behavior_logprobs=logprobs,
            versions=tuple(
                VersionSpan(start=s.start + num_prompt, end=s.end + num_prompt, version=s.version)
                for s in self.versions
            ),
            version_source=self.version_source,
            temperature=self.temperature,
            logprob_kind=self.logprob_kind,
            turns=(Turn(start=num_prompt, end=total, finish_reason=self.finish_reason),),
        )


def _check_spans(spans: tuple[VersionSpan, ...], length: int, what: str) -> None:
    """Spans ascend, do not overlap and stay inside [0, length)."""
    position = 0
    for span in spans:
        if span.start < position or span.end <= span.start or span.end > length:
            raise InvariantError(
                f"{what}: version span [{span.start}, {span.end}) is out of order or outside "
                f"[0, {length})"
            )
        position = span.end


# --- trajectories -----------------------------------------------------------------------------


class TrajectoryStatus(StrEnum):
    """How a rollout ended. `failed` and `cancelled` are never trained."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    FAILED = "failed"
    CANCELLED = "cancelled"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The tokens of one completion within a row."""

    start: int
    """First drawn token, inclusive."""
    end: int
    """Last drawn token, exclusive."""
    finish_reason: FinishReason = "eos"
    """Why this draw ended (FR-077)."""


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
        for name, array in (
            ("loss_mask", self.loss_mask),
            ("sampled", self.sampled),
            ("behavior_logprobs", self.behavior_logprobs),
        ):
            if array is not None and len(array) != length:
                raise InvariantError(
                    f"token row: {name} has length {len(array)}, token_ids has {length}"
                )
        for name, column in self.columns.items():
            if len(column.values) != length:
                raise InvariantError(
                    f"token row: column {name!r} has length {len(column.values)}, "
                    f"token_ids has {length}"
                )
        if self.versions:
            _check_spans(self.versions, length, "token row")
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
            if not math.isfinite(float(np.dot(self.behavior_logprobs, self.sampled))):
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
            if len(self.rows) == 1:
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
        return sum(row.num_trained_tokens for row in self.rows)

    @property
    def trainable(self) -> bool:
        """Completed or truncated, with at least one row."""
        return bool(self.rows) and self.status in (
            TrajectoryStatus.COMPLETED,
            TrajectoryStatus.TRUNCATED,
        )

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


# --- draws, rollouts, groups, batches ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One visit to a data item."""

    item_id: str
    """Stable id of the item."""
    draw: int
    """0 for the first visit, 1 in epoch 2 ..."""
    row: Mapping[str, Any]
    """The item's columns."""
    source: str = ""
    """Name of the data source it came from."""
    order: int = 0
    """Position in the loader's order, from 0; unique in a stage."""

    @property
    def key(self) -> str:
        """`item_id/draw`: the default rollout-group id."""
        return f"{self.item_id}/{self.draw}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One finished run of `RolloutWorker.step` for (item, draw, member); the ledger's unit."""

    rollout_id: str
    """Unique in the run."""
    group_key: str
    """The rollout group (`Draw.key`) it belongs to."""
    member: int
    """Which of the group's rollouts, from 0."""
    status: TrajectoryStatus
    """How it ended; `failed` leaves at most a record, never a training signal."""
    reason: str = ""
    """Ledger reason when failed or cancelled, for example `infrastructure/ServiceError`."""
    trajectories: tuple[Trajectory, ...] = ()
    """What it left; failed and cancelled ones may leave what they had, for the store only."""
    failure: Failure | None = None
    """Why it failed."""
    attempts: int = 1
    """Attempts it took."""
    duration_s: float = 0.0
    """From start to end, retries included, in seconds of the run's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The rollouts of one draw: unit of admission, hand-out and failure policy."""

    group_key: str
    """`Draw.key`."""
    policy: str
    """Policy that the group trains."""
    source: str
    """Data source."""
    admission: int
    """Position in admission order, from 0."""
    admitted_version: int
    """Lowest version number active when it was admitted."""
    records: tuple[RolloutRecord, ...]
    """Kept members in member order."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Trainable trajectories of kept members, in member order."""
        return tuple(t for record in self.records for t in record.trajectories if t.trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rollout groups trained together; ends in exactly one publish."""

    batch_id: int
    """Counts hand-outs, from 0."""
    policy: str
    """Policy to train."""
    version: int
    """Version number that consumes it."""
    groups: tuple[RolloutGroup, ...]
    """In admission order when the mode is sync."""
    num_expected_groups: int
    """B; more than len(groups) when the batch was closed short."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trainable trajectories, group by group."""
        return [t for group in self.groups for t in group.trajectories]


# --- training messages ------------------------------------------------------------------------

OUTPUT_MASK = "output_mask"
"""Optional input of a `RowChunk`: outputs are wanted where it is nonzero and are 0 elsewhere, so
that a service need not score prompts. Without it every token but a row's first is scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChunk:
    """Token rows on their way to a train service: ragged, concatenated, no padding.

    Positions of row i are [offsets[i], offsets[i+1]). Per-token entry t speaks of token t given
    the tokens before it; entry 0 of each row is never trained nor scored.
    """

    lengths: IntArray
    """[R] tokens per row."""
    token_ids: IntArray
    """[N] with N = sum(lengths)."""
    inputs: Mapping[str, Array] = field(default_factory=dict)
    """Per-token loss inputs [N, ...]: weight, advantage, behavior_logprobs, ..."""
    temperature: float = 1.0
    """Logits are divided by it before the log-softmax, so that logprobs match the draw."""

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        for name, array in (("token_ids", self.token_ids), *self.inputs.items()):
            if len(array) != total:
                raise InvariantError(
                    f"row chunk: {name} has {len(array)} entries, lengths sum to {total}"
                )

    @property
    def offsets(self) -> IntArray:
        """[R + 1] start of each row and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def num_rows(self) -> int:
        """R"""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """N"""
        return len(self.token_ids)

    @classmethod
    def from_rows(
        cls,
        token_ids: Sequence[IntArray],
        inputs: Mapping[str, Sequence[Array]] | None = None,
        temperature: float = 1.0,
    ) -> RowChunk:
        """Concatenate rows; each input has one array per row, of that row's length."""
        lengths = np.fromiter((len(t) for t in token_ids), np.int32, len(token_ids))
        empty = np.zeros(0, np.float32)
        return cls(
            lengths=lengths,
            token_ids=(
                np.concatenate(token_ids).astype(np.int32, copy=False)
                if token_ids
                else np.zeros(0, np.int32)
            ),
            inputs={
                name: np.concatenate(arrays) if len(arrays) else empty
                for name, arrays in (inputs or {}).items()
            },
            temperature=temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model that a train service shall host under a policy name."""

    policy: str = DEFAULT_POLICY
    """Name it is addressed by."""
    path: str = ""
    """Hugging Face model folder; empty when `copy_of` is given."""
    copy_of: str = ""
    """Policy whose present weights are copied, for a frozen reference."""
    trainable: bool = True
    """False keeps no gradients and no optimizer state."""
    seed: int = 0
    """Seed of anything random in the model (dropout, new heads)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """A named loss and its settings; a plain sum over tokens of term x weight."""

    name: str
    """Name in `nexrl.algorithms.losses`."""
    config: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)
    """Settings by name, for example clip_low and clip_high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Named per-token outputs of a forward pass."""

    lengths: IntArray
    """[R] as sent."""
    outputs: Mapping[str, FloatArray]
    """[N, ...] by name (logprobs, entropy ...); entry 0 of each row is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOutput:
    """What a backward pass reports; the gradients stay with the service."""

    loss: float
    """Sum over tokens of term x weight; 0 for `backward` from given gradients."""
    outputs: Mapping[str, FloatArray]
    """[N] per-token outputs at the weights used (logprobs, and entropy where asked)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimParams:
    """AdamW settings of one optimizer step; the trainer owns the schedule."""

    lr: float
    """Learning rate of this step."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled, on matrices only."""
    grad_clip_norm: float = 0.0
    """Global norm bound; 0 is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    """What an optimizer step did."""

    grad_norm: float
    """Global norm before clipping."""
    applied: bool
    """False when the gradient was not finite and the step was skipped."""
    optimizer_step: int
    """Optimizer steps applied so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInfo:
    """What a train service says of one policy."""

    policy: str
    """Name."""
    num_parameters: int
    """Trainable parameters."""
    vocab_size: int
    """V"""
    max_positions: int
    """Longest row in tokens."""
    dtype: str
    """Compute dtype."""
    optimizer_step: int
    """Optimizer steps applied so far."""
    device: str = "cpu"
    """Where it runs."""
    losses: tuple[str, ...] = ()
    """Named losses on offer."""
    outputs: tuple[str, ...] = ()
    """Named outputs of forward."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Cumulative seconds inside forward, backward, optimizer, for time shares."""


# --- weights ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a publication."""

    name: str
    """Hugging Face parameter name."""
    shape: tuple[int, ...]
    """Shape."""
    dtype: str
    """safetensors dtype name, for example F32 or BF16."""
    checksum: str
    """blake2b-128 of the little-endian bytes, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """A publication: where the weights of one version lie and what they must hash to."""

    version: PolicyVersion
    """What was published."""
    path: str
    """Folder with the safetensors files and manifest.json; a Hugging Face model folder."""
    tensors: tuple[TensorInfo, ...]
    """Every tensor, sorted by name."""
    num_bytes: int
    """Sum of tensor sizes."""
    unchanged: bool = False
    """True when the batch's optimizer steps were all skipped."""

    @property
    def checksum(self) -> str:
        """blake2b-128 over names, dtypes, shapes and checksums; equal exactly for equal weights."""
        digest = hashlib.blake2b(digest_size=16)
        for t in self.tensors:
            digest.update(f"{t.name}|{t.dtype}|{t.shape}|{t.checksum}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAck:
    """An engine's acknowledgement of a load."""

    version: PolicyVersion
    """Version it loaded."""
    checksum: str
    """Manifest checksum recomputed from what the engine really holds; "" when it cannot."""


PauseMode = Literal["keep", "recompute", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an inference engine says of itself."""

    name: str
    """builtin, vllm, sglang ..."""
    build: str
    """Version of the engine."""
    model: str
    """Served model name."""
    versions: Mapping[str, PolicyVersion]
    """Active version by policy."""
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    """token_ids, logprobs, version_stamps, checksum_echo, pause, deterministic ..."""
    max_context: int = 0
    """Longest prompt plus completion in tokens; 0 when unknown."""
    healthy: bool = True
    """False when it must not get traffic."""


# --- ledger -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """Rollout counts by outcome; `admitted` equals the sum of all others."""

    admitted: int
    """Rollouts admitted so far."""
    in_flight: int
    """Started or about to start."""
    ready: int
    """Ended, all needs met, waiting."""
    handed_out: int
    """With the trainer."""
    trained: int
    """Consumed by a batch whose publish is done."""
    filtered: Mapping[str, int]
    """By reason."""
    failed: Mapping[str, int]
    """By reason."""
    stale: Mapping[str, int]
    """By reason."""
    cancelled: Mapping[str, int]
    """By reason."""

    @property
    def balanced(self) -> bool:
        """Whether the counts add up."""
        ended = (self.filtered, self.failed, self.stale, self.cancelled)
        parts = self.in_flight + self.ready + self.handed_out + self.trained
        return self.admitted == parts + sum(sum(m.values()) for m in ended)

    @classmethod
    def sum(cls, ledgers: Sequence[LedgerSnapshot]) -> LedgerSnapshot:
        """One ledger over several, for example over the stages of a run."""
        plain = ("admitted", "in_flight", "ready", "handed_out", "trained")
        counts: dict[str, Any] = {name: sum(getattr(one, name) for one in ledgers) for name in plain}
        for name in ("filtered", "failed", "stale", "cancelled"):
            reasons: dict[str, int] = {}
            for ledger in ledgers:
                for reason, count in getattr(ledger, name).items():
                    reasons[reason] = reasons.get(reason, 0) + count
            counts[name] = reasons
        return cls(**counts)


# --- randomness -------------------------------------------------------------------------------


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts; the same on every machine and Python.

    seed of a call = derive_seed(run seed, policy, item_id, draw, member, call index).
    """
    text = "\x1f".join(str(p) for p in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
