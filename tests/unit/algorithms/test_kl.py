"""KL estimators: values, gradients and signs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nexrl.algorithms.kl import KL_ESTIMATORS, KL_IN_LOSS
from nexrl.algorithms.loss_definition import Settings
from nexrl.algorithms.losses import LOSSES

D = math.log(2.0)
VALUES = {"k1": D, "k2": D * D / 2, "k3": 0.5 - 1 + D, "k1+": D, "k3+": 0.5 - 1 + D}
SLOPES = {"k1": 1.0, "k2": D, "k3": 1 - 0.5, "k1+": D, "k3+": D}


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
def test_values_and_gradients_by_hand(name: str) -> None:
    """`+` has the value of the one it is named after and the gradient of k2."""
    logprobs = torch.tensor([D - 1.0], dtype=torch.float64, requires_grad=True)
    found = KL_ESTIMATORS[name](logprobs, torch.tensor([-1.0], dtype=torch.float64))
    found.sum().backward()
    assert found.item() == pytest.approx(VALUES[name])
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(SLOPES[name])
    assert KL_ESTIMATORS[name](np.array([D - 1.0]), np.array([-1.0])) == pytest.approx(VALUES[name])


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
@pytest.mark.parametrize("difference", [80.0, -80.0])
def test_estimators_stay_finite_at_any_distance(name: str, difference: float) -> None:
    logprobs = torch.full((2,), difference - 100.0, requires_grad=True)
    found = KL_ESTIMATORS[name](logprobs, torch.full((2,), -100.0))
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def exact_gradient(name: str, logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Expectation of the estimator's gradient over tokens drawn from the policy."""
    logprobs = torch.log_softmax(logits, -1)
    drawn = logprobs.detach().exp()
    (found,) = torch.autograd.grad((drawn * KL_ESTIMATORS[name](logprobs, reference)).sum(), logits)
    return found


@pytest.mark.parametrize("name", ["k2", "k1+", "k3+"])
def test_the_gradient_in_the_loss_is_that_of_the_divergence(name: str) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.3, 0.0, 0.5], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    torch.testing.assert_close(exact_gradient(name, logits, reference), true)


def test_k1_in_the_loss_would_push_nowhere() -> None:
    """Why it is refused there."""
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.zeros(3, dtype=torch.float64), -1)
    assert exact_gradient("k1", logits, reference).abs().max() < 1e-15
    assert "k1" not in KL_IN_LOSS


@pytest.mark.parametrize("estimator", KL_IN_LOSS)
def test_a_step_down_the_kl_gradient_brings_the_policy_nearer_the_reference(estimator: str) -> None:
    """FR-097: the sign of the KL term."""
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.zeros(3, dtype=torch.float64), -1)
    config: Settings = {"kl_coefficient": 1.0, "kl_estimator": estimator}
    logprobs = torch.log_softmax(logits, -1)
    given = {"advantage": torch.zeros(3), "reference_logprobs": reference}
    term = LOSSES["reinforce"].term({"logprobs": logprobs}, given, config)
    (gradient,) = torch.autograd.grad((term * logprobs.detach().exp()).sum(), logits)
    after = torch.log_softmax(logits.detach() - 0.5 * gradient, -1)

    def kl(p: torch.Tensor) -> float:
        return float((p.exp() * (p - reference)).sum())

    assert kl(after) < kl(logprobs.detach())
