"""A configuration beside the origins of its values: what rules and the plan speak from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nexrl.config.nodes import Origin
from nexrl.config.problems import origin_of
from nexrl.config.schema import RunConfig

RL_TRAINERS = ("grpo",)
"""Built-in trainers that learn from rewards on sampled tokens."""


@dataclass(frozen=True, slots=True)
class Values:
    """A checked configuration and where its values were written."""

    config: RunConfig
    """Types and ranges are right."""
    origins: Mapping[str, Origin]
    """By key path; keys that are written nowhere are absent."""

    def at(self, *keys: str) -> str:
        """` (rl_train.yaml:41)` of the first key that is written, else nothing: ends a sentence."""
        for key in keys:
            if self.is_written(key):
                return origin_of(tuple(key.split(".")), self.origins)
        return ""

    def is_written(self, key: str) -> bool:
        """Whether the recipe or the command line sets the key itself."""
        return key in self.origins

    @property
    def is_rl(self) -> bool:
        """Whether the built-in trainer learns from rewards on sampled tokens."""
        return self.config.trainer.type in RL_TRAINERS
