"""Distillation losses once more: one position at a time, from the papers.

Those over candidates see K + 1 buckets: the candidates and everything else together, whose
probability is 1 minus theirs. With s_j = exp(L_j), d s_j / d L_j = s_j and d s_rest / d L_j = -s_j.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Position = Mapping[str, Any]
Graded = tuple[float, list[float]]
SMALLEST_REST = 1e-6


def _buckets(logprobs: list[float]) -> list[float]:
    """K + 1 probabilities; the rest is at least 1e-6."""
    probabilities = [math.exp(x) for x in logprobs]
    return [*probabilities, max(1.0 - math.fsum(probabilities), SMALLEST_REST)]


def _kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def _slopes(student: list[float], by_bucket: list[float]) -> list[float]:
    """[K] by candidate logprob, from derivatives by bucket probability. A rest that is held at its
    smallest does not move."""
    by_rest = 0.0 if student[-1] == SMALLEST_REST else by_bucket[-1]
    return [s * (d - by_rest) for s, d in zip(student[:-1], by_bucket, strict=False)]


def _both(position: Position) -> tuple[list[float], list[float]]:
    student = _buckets(position["candidate_logprobs"])
    return student, _buckets(position["teacher_candidate_logprobs"])


def reverse_kl_top_k(position: Position, settings: Mapping[str, Any]) -> Graded:
    """MiniLLM 2024: KL(s || t); d / d s_b = log(s_b / t_b) + 1."""
    s, t = _both(position)
    return _kl(s, t), _slopes(s, [math.log(a / b) + 1.0 for a, b in zip(s, t, strict=True)])


def forward_kl_top_k(position: Position, settings: Mapping[str, Any]) -> Graded:
    """Hinton et al. 2015: KL(t || s); d / d s_b = -t_b / s_b."""
    s, t = _both(position)
    return _kl(t, s), _slopes(s, [-b / a for a, b in zip(s, t, strict=True)])


def jsd_top_k(position: Position, settings: Mapping[str, Any]) -> Graded:
    """GKD 2024, eq. 1: beta KL(t || m) + (1 - beta) KL(s || m), m = beta t + (1 - beta) s;
    d / d s_b = (1 - beta) log(s_b / m_b).
    """
    s, t = _both(position)
    beta = settings["beta"]
    m = [beta * b + (1.0 - beta) * a for a, b in zip(s, t, strict=True)]
    slopes = [(1.0 - beta) * math.log(a / c) for a, c in zip(s, m, strict=True)]
    return beta * _kl(t, m) + (1.0 - beta) * _kl(s, m), _slopes(s, slopes)


CANDIDATES: dict[str, Callable[[Position, Mapping[str, Any]], Graded]] = {
    "reverse_kl_top_k": reverse_kl_top_k,
    "forward_kl_top_k": forward_kl_top_k,
    "jsd_top_k": jsd_top_k,
}
