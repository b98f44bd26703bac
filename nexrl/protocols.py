"""Protocols at which the modules meet; handed in through constructors.

Modules (data, rollout, pool, trainer, weight_sync, activity) never import each other. What one
needs of another is written here, or as a Protocol beside its use. Service protocols are in
`services/*/protocol.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from nexrl.types import IntArray, RolloutGroup, RolloutRecord, Trajectory


class Tracker(Protocol):
    """What modules tell the ActivityTracker. Cheap enough to call for every rollout."""

    def activity(self, kind: str, name: str) -> AbstractContextManager[None]:
        """A span of in-flight work; a hang names the oldest open one. `kind` is rollout, train,
        sync, validation, wait ...; `wait` spans say who waits for whom."""
        ...

    def observe(self, metric: str, value: float) -> None:
        """One observation; logged at the next step as the mean of those since the last."""
        ...

    def count(self, metric: str, amount: float = 1.0) -> None:
        """Add to a running total, logged as such."""
        ...

    def rollout_ended(self, record: RolloutRecord) -> None:
        """A rollout ended; feeds the failure-rate policy and rollout metrics."""
        ...

    def warn(self, message: str) -> None:
        """A line for people: terminal and log; the same text is not repeated within a minute."""
        ...


class Annotator(Protocol):
    """Adds what the trainer needs to a rollout that has ended, before its group is ready."""

    @property
    def provides(self) -> str:
        """The need it meets: reward, teacher, reference ..."""
        ...

    @property
    def deadline_s(self) -> float:
        """Seconds for one trajectory."""
        ...

    async def annotate(self, trajectory: Trajectory) -> Trajectory:
        """A new trajectory with the annotation in place."""
        ...


class GroupFilter(Protocol):
    """Decides whether a complete group goes into a batch."""

    def __call__(self, group: RolloutGroup) -> str | None:
        """A short reason to drop the group, or None to keep it."""
        ...


@runtime_checkable
class Evaluator(Protocol):
    """Judges held-out rows by the present weights; a trainer that has it is validated by it."""

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Numbers by name, for example accuracy and margin; trains nothing."""
        ...


class Renderer(Protocol):
    """Messages and text to token ids and back; one tokenizer for a whole run."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> IntArray:
        """Chat messages as ids; ConfigError when the tokenizer has no chat template."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> IntArray:
        """Text as ids; never two BOS."""
        ...

    def decode(self, token_ids: IntArray, *, skip_special_tokens: bool = True) -> str:
        """Ids as text."""
        ...
