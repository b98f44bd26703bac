"""A call on its way through the engine: the request, its choices, and what is handed back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nexrl.services.inference.engines.builtin.stop_text import StopText
from nexrl.types import (
    FinishReason,
    FloatArray,
    IntArray,
    PolicyVersion,
    Sampling,
    VersionSpan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What one choice ended with."""

    token_ids: IntArray
    """[T] the stop token included."""
    logprobs: FloatArray
    """[T] natural log."""
    versions: tuple[VersionSpan, ...]
    """Run-length versions over [0, T)."""
    finish_reason: FinishReason
    """Why it ended."""
    stop: int | str | None = None
    """The stop token or stop string that ended it; None for an end-of-sequence token."""


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One prompt and its choices.

    Owned by the engine's thread from `Engine.submit` until its last event is delivered.
    """

    prompt: IntArray
    """[P] at least one token."""
    sampling: Sampling
    """As asked."""
    seeds: tuple[int, ...]
    """One for each choice."""
    streamed: bool = False
    """Deliver every token when it is drawn."""
    results: list[Drawn | None] = field(default_factory=list)
    """By choice; None while it runs."""
    num_open: int = 0
    """Choices that have not ended."""
    started: bool = False
    """Whether any choice has been prefilled."""
    ended: bool = False
    """Whether its last event is out: finished, failed or cancelled."""

    def __post_init__(self) -> None:
        self.results = [None] * len(self.seeds)
        self.num_open = len(self.seeds)


@dataclass(eq=False, slots=True, kw_only=True)
class Choice:
    """One sequence of a request: waiting, or running in a slot.

    Invariant: `token_ids` and `logprobs` are complete while it waits; while it runs the batch
    holds them.
    """

    request: Request
    """The call it belongs to."""
    index: int
    """Which of the request's choices."""
    limit: int
    """Most tokens to draw, within max_tokens and the context."""
    token_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """[T] drawn before it was put back to waiting."""
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    """[T] aligned with token_ids."""
    marks: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    """(first token, version): the version from that token on."""
    stop_text: StopText | None = None
    """Looks for stop strings; None without any."""

    @property
    def context(self) -> IntArray:
        """What a prefill feeds: the prompt and the tokens drawn so far."""
        if not len(self.token_ids):
            return self.request.prompt
        return np.concatenate([self.request.prompt, self.token_ids])

    def mark(self, position: int, version: PolicyVersion) -> None:
        """Tokens from `position` on come from `version`."""
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((position, version))

    def spans(self, length: int) -> tuple[VersionSpan, ...]:
        """The marks as spans over [0, length), without empty ones."""
        ends = [start for start, _ in self.marks[1:]] + [length]
        return tuple(
            VersionSpan(start=start, end=end, version=version)
            for (start, version), end in zip(self.marks, ends, strict=True)
            if end > start
        )


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token of a streamed request."""

    request: Request
    choice: int
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class EndEvent:
    """A choice of a streamed request has ended, or (choice None) a whole request has.

    `error` is set when the request failed.
    """

    request: Request
    choice: int | None
    error: Exception | None = None


Event = TokenEvent | EndEvent
