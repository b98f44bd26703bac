"""Per-token estimators of KL(policy || reference) from the logprobs of the drawn tokens.

Source: Schulman, "Approximating KL divergence" (2020). With d = logprob - reference logprob and
tokens drawn from the policy, k1 and k3 are unbiased for the value, k2 has small bias; in a loss
the gradient of k2 is the unbiased one, that of k1 is zero in expectation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nexrl.algorithms.array_namespace import log_difference, namespace


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


KL_ESTIMATORS: Mapping[str, Callable[[Any, Any], Any]] = {"k1": k1, "k2": k2, "k3": k3}
KL_IN_LOSS: tuple[str, ...] = ("k2", "k3")
