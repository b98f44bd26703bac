"""Filters, shaping, entropy and learning rates once more: plain loops in float64, from the papers.

Independent of `nexrl.algorithms`: groups are lists of (baseline key, reward or None), responses are
lengths, distributions are lists of logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Scored = tuple[str, float | None]
"""Baseline key and reward of a trajectory; None abstains."""

# --- filters: is the group dropped? -----------------------------------------------------------------


def without_signal(rewards: Sequence[float]) -> bool:
    """semantics.md, "Denominators": one member, or max - min <= 1e-8 max(1, |r|)."""
    largest = max(1.0, *(abs(reward) for reward in rewards))
    return len(rewards) < 2 or max(rewards) - min(rewards) <= 1e-8 * largest


def constant_reward(members: Sequence[Scored], truncated: Sequence[bool]) -> bool:
    """DAPO 2025, the condition of eq. 11 (some right, some wrong), for any rewards and several
    baselines: dropped where none of them tells two members apart. Who abstains is not compared.
    """
    by_key: dict[str, list[float]] = {}
    for key, reward in members:
        if reward is not None:
            by_key.setdefault(key, []).append(reward)
    return all(without_signal(rewards) for rewards in by_key.values())


def all_truncated(members: Sequence[Scored], truncated: Sequence[bool]) -> bool:
    """Dropped where nobody reached an end."""
    return all(truncated)


FILTERS: dict[str, Callable[[Sequence[Scored], Sequence[bool]], bool]] = {
    "constant_reward": constant_reward,
    "all_truncated": all_truncated,
}

# --- shaping ----------------------------------------------------------------------------------------


def punishment(length: int, longest: int, cache: int) -> float:
    """DAPO 2025, eq. 13: 0 to longest - cache, then linear to -1 at the longest, -1 beyond."""
    free = longest - cache
    if length <= free:
        return 0.0
    if length <= longest:
        return (free - length) / cache
    return -1.0


def shaped(
    reward: float,
    length: int,
    *,
    longest: int,
    cache: int | None,
    overlong_penalty: float,
    length_penalty: float,
) -> float:
    """Reward, plus the weighted punishment, less a price for each trained token."""
    found = reward - length_penalty * length
    return found if cache is None else found + overlong_penalty * punishment(length, longest, cache)


# --- entropy ----------------------------------------------------------------------------------------


def entropy(logits: Sequence[float], temperature: float) -> tuple[float, list[float]]:
    """H = -sum p log p of softmax(logits / temperature), and dH / dlogit = -p (log p + H) / T."""
    scaled = [z / temperature for z in logits]
    top = max(scaled)
    total = math.fsum(math.exp(z - top) for z in scaled)
    logs = [z - top - math.log(total) for z in scaled]
    value = -math.fsum(math.exp(x) * x for x in logs)
    return value, [-math.exp(x) * (x + value) / temperature for x in logs]


def held_coefficients(
    entropies: Sequence[float], *, start: float, target: float | None, rate: float
) -> list[float]:
    """Skywork-OR1 2025, adaptive entropy control: the coefficient that each batch is trained with,
    and the next one. After a batch below the target it rises by the rate, above it falls; it is
    never negative, and at most 0.1, or where it started if that is more.
    """
    found = [start]
    for seen in entropies:
        present = found[-1]
        if target is not None and seen < target:
            present = min(present + rate, max(0.1, start))
        elif target is not None and seen > target:
            present = max(present - rate, 0.0)
        found.append(present)
    return found


# --- learning rates ---------------------------------------------------------------------------------


def learning_rate(
    step: int, *, peak: float, warmup: int, total: int, schedule: str, min_ratio: float
) -> float:
    """Linear warm-up that reaches the peak at its last step, then constant, linear, or half a
    cosine down to min_ratio x peak, which step `total` would have."""
    if step < warmup:
        return peak * (step + 1) / warmup
    lowest, left = min_ratio * peak, max(total - step, 0) / max(total - warmup, 1)
    falling = {
        "constant": peak,
        "linear": lowest + (peak - lowest) * left,
        "cosine": lowest + (peak - lowest) * math.sin(math.pi * left / 2.0) ** 2,
    }
    return falling[schedule]


SCHEDULES = ("constant", "linear", "cosine")
SHAPING = ("overlong_cache", "overlong_penalty", "mask_truncated", "length_penalty")
ENTROPY = ("coefficient", "target", "rate")
