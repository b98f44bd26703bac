"""Losses that pull the student towards a teacher, from logprobs alone.

n trained tokens, K candidates at each. All take the student's own rows (on-policy distillation) or
any others (off-policy): the top-K losses compare two distributions at a position and need no ratio.

    reverse_kl        log s - log t at the drawn token, with the gradient of half its square
    reverse_kl_top_k  sum_j s_j (log s_j - log t_j)
    forward_kl_top_k  sum_j t_j (log t_j - log s_j)
    jsd_top_k         beta KL(t || m) + (1 - beta) KL(s || m), m = beta t + (1 - beta) s

The sums run over K + 1 buckets: the candidates, usually the teacher's most likely tokens, and one
for all other tokens together. Its probability is 1 minus that of the candidates. Merging tokens
cannot raise a divergence, so each is a lower bound of the one over the whole vocabulary, equal to it
where K covers it, and 0 only where candidates and remainder agree. Without that bucket a student
would lower a reverse KL by moving mass away from the candidates.
"""

from __future__ import annotations

import math
from typing import Any

from nexrl.algorithms.array_namespace import constant, log_difference, namespace
from nexrl.algorithms.loss_definition import (
    REGULARISERS,
    Inputs,
    LossDefinition,
    Outputs,
    Settings,
    number,
    policy_ratio,
)
from nexrl.errors import ConfigError

SMALLEST_TAIL = 1e-6
"""Smallest probability of the bucket of other tokens, for both. Below it, float32 logprobs do not
know the remainder, and its gradient, which goes with 1 / remainder, would be noise."""


def reverse_kl(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """[n] log s - log t of the drawn token, straight-through: gradient (log s - log t) grad log s.

    On tokens that the student drew, value and gradient are unbiased for KL(s || t). Times sg(rho)
    where `proximal_logprobs` are given, unbounded. On-policy distillation, Agarwal et al. 2024
    (reverse KL); Thinking Machines 2025 (sampled tokens).
    """
    difference = log_difference(outputs["logprobs"], inputs["teacher_logprobs"])
    slope = 0.5 * difference * difference
    term = constant(difference) + (slope - constant(slope))
    if "proximal_logprobs" in inputs:
        term = policy_ratio(constant(outputs["logprobs"]), inputs) * term
    return term


def _with_tail(logprobs: Any) -> tuple[Any, Any, Any]:
    """Logprobs [n, K], log of the remainder [n] and the remainder [n] = 1 - sum of probabilities."""
    xp = namespace(logprobs)
    tail = xp.clip(1.0 - xp.exp(logprobs).sum(-1), SMALLEST_TAIL, 1.0)
    return logprobs, xp.log(tail), tail


def _divergence(p: tuple[Any, Any, Any], q: tuple[Any, Any]) -> Any:
    """[n] KL(p || q) over the K + 1 buckets."""
    (logs, log_tail, tail), (other_logs, other_log_tail) = p, q
    inside = namespace(logs).exp(logs) * (logs - other_logs)
    return inside.sum(-1) + tail * (log_tail - other_log_tail)


def _student_and_teacher(outputs: Outputs, inputs: Inputs) -> tuple[Any, Any]:
    student, teacher = outputs["candidate_logprobs"], inputs["teacher_candidate_logprobs"]
    return _with_tail(student), _with_tail(teacher)


def reverse_kl_top_k(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """[n] KL(student || teacher) over candidates and remainder. MiniLLM, Gu et al. 2024."""
    student, teacher = _student_and_teacher(outputs, inputs)
    return _divergence(student, teacher[:2])


def forward_kl_top_k(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """[n] KL(teacher || student) over candidates and remainder. Hinton et al. 2015."""
    student, teacher = _student_and_teacher(outputs, inputs)
    return _divergence(teacher, student[:2])


def jsd_top_k(outputs: Outputs, inputs: Inputs, settings: Settings) -> Any:
    """[n] beta KL(t || m) + (1 - beta) KL(s || m), m = beta t + (1 - beta) s, by bucket.

    Generalized Jensen-Shannon divergence, GKD, Agarwal et al. 2024, eq. 1. Divided by beta it tends
    to the forward KL for beta -> 0, by 1 - beta to the reverse one for beta -> 1.
    """
    student, teacher = _student_and_teacher(outputs, inputs)
    xp, beta = namespace(student[0]), number(settings, "beta")
    near, far = math.log(beta), math.log1p(-beta)
    mixture = (
        xp.logaddexp(teacher[0] + near, student[0] + far),
        xp.logaddexp(teacher[1] + near, student[1] + far),
    )
    return beta * _divergence(teacher, mixture) + (1.0 - beta) * _divergence(student, mixture)


def _check_beta(settings: Settings) -> None:
    if not 0 < number(settings, "beta") < 1:
        raise ConfigError(
            f"loss setting beta must be between 0 and 1, both excluded, got {settings['beta']!r} "
            "(the ends are forward_kl_top_k and reverse_kl_top_k)"
        )


_CANDIDATES = ("weight", "candidate_ids", "teacher_candidate_logprobs")
_OPTIONAL = ("reference_logprobs", "correction", "proximal_logprobs")

DISTILLATION_LOSSES: tuple[LossDefinition, ...] = (
    LossDefinition(
        name="reverse_kl",
        required=("weight", "teacher_logprobs"),
        optional=_OPTIONAL,
        config=REGULARISERS,
        bounded=False,
        term_of=reverse_kl,
    ),
    LossDefinition(
        name="reverse_kl_top_k",
        required=_CANDIDATES,
        optional=_OPTIONAL,
        config=REGULARISERS,
        bounded=True,
        term_of=reverse_kl_top_k,
        needs=("candidate_logprobs",),
    ),
    LossDefinition(
        name="forward_kl_top_k",
        required=_CANDIDATES,
        optional=_OPTIONAL,
        config=REGULARISERS,
        bounded=True,
        term_of=forward_kl_top_k,
        needs=("candidate_logprobs",),
    ),
    LossDefinition(
        name="jsd_top_k",
        required=_CANDIDATES,
        optional=_OPTIONAL,
        config={**REGULARISERS, "beta": 0.5},
        bounded=True,
        term_of=jsd_top_k,
        needs=("candidate_logprobs",),
        check=_check_beta,
    ),
)
