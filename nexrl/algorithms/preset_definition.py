"""What a preset is: a published algorithm as settings of the composable parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal["rl", "sft", "preference", "reward_model"]
"""Which built-in trainer runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One name of `trainer.algorithm`."""

    name: str
    """As written in configuration."""
    family: Family
    """Which built-in trainer runs it."""
    summary: str
    """One line for the list."""
    formula: str
    """What is minimised, over the whole optimizer step, with its denominators; lines of text in
    the words of `FORMULA_WORDS`."""
    source: str
    """Paper, year, equation."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Nested settings from the root of the configuration."""
    shares: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Setting -> (another setting, share): the whole number that is that share of the other."""
    needs: tuple[str, ...] = ()
    """What it needs beyond a reward, in words: critic, reference, teacher, greedy baseline ..."""
    experimental: bool = False
    """Labelled so where it is listed, in the certificate too."""


FORMULA_WORDS = """\
Sums run over the trained tokens of a whole optimizer step, whatever its chunks, packing or ranks:
N tokens in all, in R rows (n in a token's row) of T trajectories; P is the number of pairs,
responses or step ends. logp is under the policy being trained, rho = exp(logp - proximal logp),
ref the frozen reference, sg(x) is x without gradient, r the reward, mu and sd mean and deviation
of the group's rewards; w and l are the chosen and the rejected response, |y| a response's tokens."""
"""What the symbols of every formula mean."""


def policy(*, pool: Mapping[str, Any] | None = None, **algorithm: Any) -> dict[str, Any]:
    """Settings of an algorithm that samples: its sections, and those of the trajectory pool."""
    settings: dict[str, Any] = {"trainer": {"algorithm": algorithm}}
    return {**settings, "trajectory_pool": pool} if pool else settings


def offline(worker: str, loss: str, **preference: float) -> dict[str, Any]:
    """Settings of a loss on rows that are only read: each is trained once a visit."""
    algorithm: dict[str, Any] = {"loss": {"name": loss}}
    if preference:
        algorithm["preference"] = preference
    return {
        "trainer": {"algorithm": algorithm},
        "rollout_worker": {"type": worker},
        "data": {"rollout_repeat_n": 1},
    }
