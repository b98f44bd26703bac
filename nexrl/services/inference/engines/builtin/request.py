"""A call on its way through the engine: the request, its choices, and the events they cause."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from nexrl.services.inference.engines.builtin.stop_text import StopText
from nexrl.services.inference.messages import Call
from nexrl.types import FinishReason, FloatArray, IntArray, PolicyVersion, VersionSpan


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One call and its choices.

    Owned by the engine's thread from `Engine.submit` until its last event is delivered.
    """

    call: Call
    """As asked; its prompt has at least one token."""
    streamed: bool = False
    """Deliver every token when it is drawn."""
    inbox: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    """Where its events go, on the event loop."""
    choices: list[Choice] = field(default_factory=list)
    """One for each seed, once the engine has it."""
    num_open: int = 0
    """Choices that have not ended."""
    started: bool = False
    """Whether any choice has been prefilled."""
    ended: bool = False
    """Whether its last event is out: finished, failed or cancelled."""


@dataclass(eq=False, slots=True, kw_only=True)
class Choice:
    """One sequence of a request: waiting, or running in a slot.

    Invariant: `token_ids` and `logprobs` are complete while it waits and when it has ended; while
    it runs the batch holds them.
    """

    request: Request
    """The call it belongs to."""
    index: int
    """Which of the request's choices."""
    limit: int
    """Most tokens to draw, within max_tokens and the context."""
    token_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """[T] drawn so far, the stop token included."""
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    """[T] natural log, aligned with token_ids."""
    marks: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    """(first token, version): the version from that token on."""
    stop_text: StopText | None = None
    """Looks for stop strings; None without any."""
    finish_reason: FinishReason | None = None
    """Why it ended; None before."""

    @property
    def context(self) -> IntArray:
        """What a prefill feeds: the prompt and the tokens drawn so far."""
        if not len(self.token_ids):
            return self.request.call.prompt
        return np.concatenate([self.request.call.prompt, self.token_ids])

    def mark(self, position: int, version: PolicyVersion) -> None:
        """Tokens from `position` on come from `version`."""
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((position, version))

    def spans(self) -> tuple[VersionSpan, ...]:
        """The marks as run-length spans over [0, T), without empty ones; none for a choice that
        never ran."""
        ends = [*(start for start, _ in self.marks), len(self.token_ids)][1:]
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
