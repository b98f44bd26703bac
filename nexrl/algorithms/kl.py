"""Per-token estimators of KL(policy || reference) from the logprobs of the drawn tokens.

Source: Schulman, "Approximating KL divergence" (2020). With d = logprob - reference logprob and
tokens drawn from the policy, k1 and k3 are unbiased for the value, k2 has small bias; in a loss
the gradient of k2 is the unbiased one (d times that of the logprob), that of k1 is zero in
expectation, and that of k3 is the one of the KL in the other direction. `k1+` and `k3+` are
straight-through: unbiased value and unbiased gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nexrl.algorithms.array_namespace import constant, log_difference, namespace

Estimator = Callable[[Any, Any], Any]


def k1(logprobs: Any, reference_logprobs: Any) -> Any:
    """d, same shape as the arguments; may be negative for a token."""
    return log_difference(logprobs, reference_logprobs)


def k2(logprobs: Any, reference_logprobs: Any) -> Any:
    """d^2 / 2, same shape as the arguments."""
    difference = log_difference(logprobs, reference_logprobs)
    return 0.5 * difference * difference


def k3(logprobs: Any, reference_logprobs: Any) -> Any:
    """exp(-d) - 1 + d, same shape as the arguments; never negative."""
    difference = log_difference(logprobs, reference_logprobs)
    return namespace(difference).expm1(-difference) + difference


def _straight_through(estimator: Estimator) -> Estimator:
    """The value of `estimator` with the gradient of k2."""

    def straight_through(logprobs: Any, reference_logprobs: Any) -> Any:
        value = constant(estimator(logprobs, reference_logprobs))
        slope = k2(logprobs, reference_logprobs)
        # The bracket is exactly 0, also in float32; only its gradient counts.
        return value + (slope - constant(slope))

    return straight_through


KL_ESTIMATORS: Mapping[str, Estimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1+": _straight_through(k1),
    "k3+": _straight_through(k3),
}
KL_IN_LOSS: tuple[str, ...] = ("k2", "k3", "k1+", "k3+")
KL_IN_REWARD: tuple[str, ...] = ("k1", "k2", "k3")
"""A reward has no gradient for `+` to replace."""
