"""What stands in the place of an engine in a run that draws nothing.

A policy with a value head has no distribution over tokens: a run that trains one starts no engine,
and its publications are for others to use.
"""

from __future__ import annotations

from nexrl.errors import ConfigError
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


class AbsentInference:
    """InferenceService that serves nothing and says so when it is asked to draw."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = DEFAULT_POLICY
    ) -> list[Completion]:
        """Raises ConfigError."""
        raise self._refusal("draw tokens")

    async def info(self) -> EngineInfo:
        """No engine, no versions."""
        return EngineInfo(name="none", build="", model="", versions={})

    async def pause(self, mode: PauseMode) -> None:
        """Nothing runs."""

    async def resume(self) -> None:
        """Nothing runs."""

    async def load_weights(self, manifest: WeightManifest) -> LoadAck:
        """Raises ConfigError."""
        raise self._refusal("load weights")

    async def activate(self, version: PolicyVersion) -> None:
        """Raises ConfigError."""
        raise self._refusal("serve a version")

    async def score(self, chunk: RowChunk, *, policy: str = DEFAULT_POLICY) -> FloatArray:
        """Raises ConfigError."""
        raise self._refusal("score rows")

    async def aclose(self) -> None:
        """Nothing to release."""

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(f"this run has no inference engine to {what}: {self._reason}")
