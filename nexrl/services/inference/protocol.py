"""What the rest of NexRL knows of inference: drawing tokens, and steering an engine."""

from __future__ import annotations

from typing import Protocol

from nexrl.types import (
    DEFAULT_POLICY,
    Completion,
    EngineInfo,
    FloatArray,
    LoadAck,
    PauseMode,
    PolicyVersion,
    Prompt,
    RowChunk,
    Sampling,
    WeightManifest,
)


class InferenceClient(Protocol):
    """All that a rollout knows of inference."""

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = DEFAULT_POLICY
    ) -> list[Completion]:
        """Draw n completions of one prompt, in choice order.

        Raises ContextOverflowError when the prompt leaves no room, ServiceError on an engine's
        error, DeadlineError when the deadline passes.
        """
        ...


class EngineControl(Protocol):
    """How weights reach an engine. Order of a sync: pause, load_weights, score, activate, resume.

    `score` must work while paused; `generate` calls that arrive while paused wait.
    """

    async def info(self) -> EngineInfo:
        """Name, build, capabilities and the active version of each policy."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens: `keep` running requests with their cache, `recompute` their cache
        on resume, or `abort` them with the tokens so far."""
        ...

    async def resume(self) -> None:
        """Draw tokens again."""
        ...

    async def load_weights(self, manifest: WeightManifest) -> LoadAck:
        """Load a publication; the acknowledgement hashes what the engine really holds."""
        ...

    async def activate(self, version: PolicyVersion) -> None:
        """Stamp tokens with this version from now on; refused unless it was loaded last."""
        ...

    async def score(self, chunk: RowChunk, *, policy: str = DEFAULT_POLICY) -> FloatArray:
        """[N] log probability of each token given those before it; entry 0 of each row is 0."""
        ...


class InferenceService(InferenceClient, EngineControl, Protocol):
    """Both faces of one engine (or of a router in front of several)."""

    async def aclose(self) -> None:
        """Release connections or the engine itself; idempotent."""
        ...
