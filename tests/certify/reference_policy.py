"""Policy losses of single tokens once more: one token at a time, from the papers.

Each function is (token, settings) -> (term, its derivative with respect to the token's logprob).
A token holds `logprobs`, `proximal_logprobs`, `advantage` ... and `frozen`: the logprob as it
stands inside a stop-gradient. Both are equal; finite differences move the first alone, which is
what a gradient that honours stop-gradients must agree with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Token = Mapping[str, float]
Settings = Mapping[str, Any]
Graded = tuple[float, float]


def ratio(token: Token, which: str = "logprobs") -> float:
    """rho = exp(logprob - proximal logprob)."""
    return math.exp(token[which] - token["proximal_logprobs"])


def cross_entropy(token: Token, s: Settings) -> Graded:
    """-logp."""
    return -token["logprobs"], -1.0


def reinforce(token: Token, s: Settings) -> Graded:
    """Williams 1992: -A logp."""
    return -token["advantage"] * token["logprobs"], -token["advantage"]


def importance_sampling(token: Token, s: Settings) -> Graded:
    """-rho A; d rho = rho."""
    return -ratio(token) * token["advantage"], -ratio(token) * token["advantage"]


def surrogate(rho: float, advantage: float, s: Settings) -> Graded:
    """PPO, Schulman et al. 2017, eq. 7, and its derivative by log rho.

    The objective is min(rho A, clip(rho, 1 - low, 1 + high) A), constant where the clipped one is
    smaller. Dual clip c, Ye et al. 2019: at A < 0 it is at least c A.
    """
    bounded = min(max(rho, 1.0 - s["clip_low"]), 1.0 + s["clip_high"])
    objective, slope = rho * advantage, rho * advantage
    if bounded * advantage < objective:
        objective, slope = bounded * advantage, 0.0
    dual = s.get("dual_clip")
    if dual is not None and advantage < 0 and objective < dual * advantage:
        objective, slope = dual * advantage, 0.0
    return -objective, -slope


def ppo(token: Token, s: Settings) -> Graded:
    """Clipped surrogate of the token's own ratio."""
    return surrogate(ratio(token), token["advantage"], s)


def bapo_bounds(tokens: Sequence[Token], s: Settings) -> tuple[float, float]:
    """BAPO 2025, eq. 8 and algorithm 1: (clip_low, clip_high) of a step, as distances from 1.

    The upper bound rises, then the lower one, until positive tokens give their share of the loss.
    """
    low, high = 1.0 - s["clip_low"], 1.0 + s["clip_high"]
    highest, nearest = 1.0 + s["clip_high_end"], 1.0 - s["clip_low_end"]

    def share() -> float:
        positive = negative = 0.0
        for token in tokens:
            weight = token["weight"] * token.get("correction", 1.0)
            capped = min(ratio(token), s["dual_clip"] or math.inf)
            if token["advantage"] > 0:
                positive += weight * min(ratio(token), high) * token["advantage"]
            else:
                negative -= weight * max(capped, low) * token["advantage"]
        return positive / (positive + negative) if positive and negative else 1.0

    while share() < s["positive_share"]:
        if high + s["clip_high_step"] <= highest + 1e-9:
            high += s["clip_high_step"]
        elif low + s["clip_low_step"] <= nearest + 1e-9:
            low += s["clip_low_step"]
        else:
            break
    return 1.0 - low, high - 1.0


def cispo(token: Token, s: Settings) -> Graded:
    """MiniMax-M1 2025, eqs. 4 and 5: -sg(clip(rho)) A logp."""
    weight = min(ratio(token, "frozen"), 1.0 + s["clip_high"])
    if s.get("clip_low") is not None:
        weight = max(weight, 1.0 - s["clip_low"])
    slope = -weight * token["advantage"]
    return slope * token["logprobs"], slope


def dppo(token: Token, s: Settings) -> Graded:
    """DPPO 2026, Binary-TV: no gradient where A > 0 and pi - mu exceeds its bound, or A < 0 and
    mu - pi does; pi and mu are the drawn token's probabilities now and when it was drawn.
    """
    drawn = token.get("behavior_logprobs", token["proximal_logprobs"])
    moved = math.exp(token["frozen"]) - math.exp(drawn)
    if token["advantage"] > 0 and moved > s["clip_high"]:
        return 0.0, 0.0
    if token["advantage"] < 0 and -moved > s["clip_low"]:
        return 0.0, 0.0
    return importance_sampling(token, s)


def sapo(token: Token, s: Settings) -> Graded:
    """SAPO 2025, eq. 5: -A 4/tau sigma(tau (rho - 1)), tau by the sign of A."""
    tau = s["tau_positive"] if token["advantage"] > 0 else s["tau_negative"]
    gate = 1.0 / (1.0 + math.exp(-tau * (ratio(token) - 1.0)))
    missing = 1.0 / (1.0 + math.exp(tau * (ratio(token) - 1.0)))
    term = -token["advantage"] * 4.0 / tau * gate
    return term, term * tau * missing * ratio(token)


def clip_cov(token: Token, s: Settings) -> Graded:
    """Clip-Cov, the entropy mechanism 2025: ppo, cut off at selected tokens."""
    return (0.0, 0.0) if token["selected"] else ppo(token, s)


def kl_cov(token: Token, s: Settings) -> Graded:
    """KL-Cov of the same: -rho A, plus penalty |log rho| at selected tokens."""
    term, slope = importance_sampling(token, s)
    if token["selected"]:
        difference = token["logprobs"] - token["proximal_logprobs"]
        term += s["penalty"] * abs(difference)
        slope += s["penalty"] * ((difference > 0) - (difference < 0))
    return term, slope


def drawable(tokens: Sequence[Token], s: Settings) -> tuple[list[int], int]:
    """Clip-Cov: tokens whose covariance lies between the bounds and which ppo lets through, and how
    many of them are drawn: a share of all tokens, at least one, as far as there are any.
    """
    products = _covariances(tokens)
    found = []
    for t, token in enumerate(tokens):
        term, slope = ppo(token, s)
        cut_off = slope == 0.0 and term != 0.0
        if s["covariance_low"] < products[t] < s["covariance_high"] and not cut_off:
            found.append(t)
    found.sort(key=lambda t: products[t])
    return found, min(len(found), max(1, int(s["fraction"] * len(tokens))))


def _covariances(tokens: Sequence[Token]) -> list[float]:
    """(logp - mean logp) (A - mean A) of each token, means over the step."""
    n = max(len(tokens), 1)
    mean_logprob = math.fsum(t["logprobs"] for t in tokens) / n
    mean_advantage = math.fsum(t["advantage"] for t in tokens) / n
    return [(t["logprobs"] - mean_logprob) * (t["advantage"] - mean_advantage) for t in tokens]


def most_covariant(tokens: Sequence[Token], s: Settings) -> list[bool]:
    """The same: the share of tokens with the largest
    (logp - mean logp) (A - mean A); at least one.
    """
    n, products = len(tokens), _covariances(tokens)
    chosen = sorted(range(n), key=lambda t: -products[t])[: max(1, int(s["fraction"] * n))]
    return [t in chosen for t in range(n)]


def reverse_kl(token: Token, s: Settings) -> Graded:
    """On-policy distillation: log s - log t of the drawn token with the gradient of half its square,
    times sg(rho) off-policy.
    """
    weight = ratio(token, "frozen") if "proximal_logprobs" in token else 1.0
    gap = token["logprobs"] - token["teacher_logprobs"]
    held = token["frozen"] - token["teacher_logprobs"]
    return weight * (held + gap * gap / 2.0 - held * held / 2.0), weight * gap


# --- critics --------------------------------------------------------------------------------------


def value(token: Token, s: Settings) -> Graded:
    """Clipped value loss of PPO (Schulman et al. 2017, reference implementation of OpenAI baselines):
    half the larger of (v - R)^2 and (v_old + clip(v - v_old) - R)^2.
    """
    miss = token["values"] - token["returns"]
    if s.get("clip") is None:
        return 0.5 * miss * miss, miss
    move = token["values"] - token["old_values"]
    bounded = token["old_values"] + min(max(move, -s["clip"]), s["clip"]) - token["returns"]
    if miss * miss >= bounded * bounded:
        return 0.5 * miss * miss, miss
    return 0.5 * bounded * bounded, 0.0 if abs(move) > s["clip"] else bounded


VALUES: dict[str, Callable[[Token, Settings], Graded]] = {"value": value}
