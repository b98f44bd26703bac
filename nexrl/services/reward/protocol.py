"""What the rest of NexRL knows of rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nexrl.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """The judgement of one completion."""

    value: float | None
    """Finite number, or None for abstain."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components; `value` is their sum unless the function says otherwise."""


class RewardService(Protocol):
    """Scores one completion against the data item it answers."""

    @property
    def contract(self) -> str:
        """Identity stored with the trajectory: path, name and content hash."""
        ...

    async def score(
        self, completion_text: str, row: Mapping[str, Any], completion: Completion | None = None
    ) -> RewardResult:
        """Raises RewardError when the function raises or returns nonsense, DeadlineError when it
        takes too long; never answers 0 instead."""
        ...

    async def aclose(self) -> None:
        """End worker processes; idempotent."""
        ...
