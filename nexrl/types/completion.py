"""Completion: tokens drawn by one choice of one inference call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nexrl.errors import InvariantError
from nexrl.types.quick import quick
from nexrl.types.trajectory import TokenRow, Trajectory, TrajectoryStatus, Turn
from nexrl.types.versions import (
    FinishReason,
    FloatArray,
    IntArray,
    LogprobKind,
    VersionSource,
    VersionSpan,
    check_spans,
)


@quick
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
        check_spans(self.versions, len(self.token_ids), "completion")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise InvariantError(
                f"completion has {len(self.token_ids)} tokens but {len(self.logprobs)} logprobs"
            )

    @property
    def truncated(self) -> bool:
        """The draw ended because of a limit, judged by the finish reason alone (FR-022)."""
        return self.finish_reason in ("length", "abort")

    def to_trajectory(
        self,
        *,
        prompt: str = "",
        reward: float | None = None,
        turn_reward: float | None = None,
        anchor: str = "",
        **fields: Any,
    ) -> Trajectory:
        """A one-row trajectory: prompt tokens untrained, drawn tokens trained.

        `turn_reward` and `anchor` belong to its one turn. Further keywords are fields of
        `Trajectory`. A draw that ended by length is `truncated` with cause `length`.
        """
        if self.finish_reason == "length":
            fields.setdefault("status", TrajectoryStatus.TRUNCATED)
            fields.setdefault("truncation_cause", "length")
        row = self.to_row(turn_reward=turn_reward, anchor=anchor)
        return Trajectory(prompt=prompt, response=self.text, reward=reward, rows=(row,), **fields)

    def to_row(self, *, turn_reward: float | None = None, anchor: str = "") -> TokenRow:
        """Prompt and completion as one token row whose mask is 1 exactly on drawn tokens."""
        num_prompt = len(self.prompt_token_ids)
        token_ids = np.concatenate([self.prompt_token_ids, self.token_ids], dtype=np.int32)
        total = len(token_ids)
        sampled = np.zeros(total, np.bool_)
        sampled[num_prompt:] = True
        logprobs: FloatArray | None = None
        if self.logprobs is not None:
            logprobs = np.zeros(total, np.float32)
            logprobs[num_prompt:] = self.logprobs
        return TokenRow(
            token_ids=token_ids,
            sampled=sampled,
            loss_mask=sampled,
            behavior_logprobs=logprobs,
            versions=tuple(
                [
                    VersionSpan(
                        start=s.start + num_prompt, end=s.end + num_prompt, version=s.version
                    )
                    for s in self.versions
                ]
            ),
            version_source=self.version_source,
            temperature=self.temperature,
            logprob_kind=self.logprob_kind,
            turns=(
                Turn(
                    start=num_prompt,
                    end=total,
                    finish_reason=self.finish_reason,
                    reward=turn_reward,
                    anchor=anchor,
                ),
            ),
        )
