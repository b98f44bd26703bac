"""The critic's loss and the losses from a teacher, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.algorithms.losses import LOSSES

# --- value --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "old", "target", "expected"),
    [
        (1.0, 1.0, 3.0, 2.0),  # 1/2 (1 - 3)^2
        (2.0, 1.0, 3.0, 0.5 * 1.8**2),  # moved towards the return by 1: held at 1.2
        (0.0, 1.0, 3.0, 0.5 * 9.0),  # moved away: not held
        (1.1, 1.0, 3.0, 0.5 * 1.9**2),  # within the clip
    ],
)
def test_the_value_loss_takes_the_larger_error(
    value: float, old: float, target: float, expected: float
) -> None:
    inputs = {"returns": np.array([target]), "old_values": np.array([old])}
    assert LOSSES["value"].term({"values": np.array([value])}, inputs, {}) == pytest.approx(
        [expected]
    )


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    inputs = {"returns": np.array([3.0]), "old_values": np.array([1.0])}
    term = LOSSES["value"].term({"values": np.array([2.0])}, inputs, {"clip": None})
    assert term == pytest.approx([0.5])


def test_clipped_values_are_those_without_gradient() -> None:
    values = torch.tensor([2.0, 0.0, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    inputs = {"returns": np.array([3.0, 3.0, 3.0, -1.0]), "old_values": np.ones(4)}
    tensors = {k: torch.tensor(v) for k, v in inputs.items()}
    LOSSES["value"].term({"values": values}, tensors, {}).sum().backward()
    clips = LOSSES["value"].clips
    assert clips is not None
    assert values.grad is not None
    low, high = clips({"values": values.detach().numpy()}, inputs, {"clip": 0.2})
    assert (
        (values.grad.numpy() == 0).tolist() == (low | high).tolist() == [True, False, False, True]
    )
    assert low.tolist() == [False, False, False, True]


# --- sampled reverse KL -------------------------------------------------------------------------


def test_reverse_kl_has_the_value_of_k1_and_the_gradient_of_the_divergence() -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    inputs = {"teacher_logprobs": torch.tensor([-1.5], dtype=torch.float64)}
    term = LOSSES["reverse_kl"].term({"logprobs": logprobs}, inputs, {})
    term.sum().backward()
    assert term.item() == pytest.approx(0.5)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.5)


def test_reverse_kl_of_stale_tokens_is_weighted_by_their_ratio() -> None:
    inputs = {
        "teacher_logprobs": np.array([-1.5]),
        "proximal_logprobs": np.array([-1.0 - math.log(2)]),
    }
    term = LOSSES["reverse_kl"].term({"logprobs": np.array([-1.0])}, inputs, {})
    assert term == pytest.approx([1.0])


def test_a_sampled_gradient_is_that_of_the_full_divergence_on_average() -> None:
    """Exact expectation over a vocabulary of 3."""
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([0.0, 0.5, 0.2], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits)
    logprobs = torch.log_softmax(logits, -1)
    term = LOSSES["reverse_kl"].term({"logprobs": logprobs}, {"teacher_logprobs": teacher}, {})
    (sampled,) = torch.autograd.grad((logprobs.detach().exp() * term).sum(), logits)
    torch.testing.assert_close(sampled, exact)


# --- candidates ---------------------------------------------------------------------------------


def top_k(name: str, student: list[float], teacher: list[float], **config: Any) -> float:
    """The term at one position from probabilities of the candidates."""
    outputs = {"candidate_logprobs": np.log([student])}
    inputs = {"teacher_candidate_logprobs": np.log([teacher])}
    return float(LOSSES[name].term(outputs, inputs, config)[0])


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_divergences_have_a_bucket_for_all_other_tokens() -> None:
    """Student 0.5, 0.3 and 0.2 elsewhere; teacher 0.6, 0.3 and 0.1 elsewhere."""
    student, teacher = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]
    mixture = [0.3 * t + 0.7 * s for s, t in zip(student, teacher, strict=True)]
    found = {
        "reverse_kl_top_k": kl(student, teacher),
        "forward_kl_top_k": kl(teacher, student),
    }
    for name, expected in found.items():
        assert top_k(name, student[:2], teacher[:2]) == pytest.approx(expected, rel=1e-12)
    jsd = 0.3 * kl(teacher, mixture) + 0.7 * kl(student, mixture)
    assert top_k("jsd_top_k", student[:2], teacher[:2], beta=0.3) == pytest.approx(jsd, rel=1e-12)


@pytest.mark.parametrize("name", ["reverse_kl_top_k", "forward_kl_top_k", "jsd_top_k"])
def test_a_divergence_is_0_only_where_both_agree_and_never_negative(name: str) -> None:
    assert top_k(name, [0.6, 0.3], [0.6, 0.3]) == pytest.approx(0.0, abs=1e-15)
    # The candidates alone would call this an improvement: all of them became less likely.
    assert top_k(name, [0.1, 0.05], [0.6, 0.3]) > 0.1


@pytest.mark.parametrize("name", ["reverse_kl_top_k", "forward_kl_top_k", "jsd_top_k"])
def test_candidates_that_cover_the_vocabulary_give_the_full_divergence(name: str) -> None:
    student, teacher = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]
    whole, merged = top_k(name, student, teacher), top_k(name, student[:2], teacher[:2])
    assert whole == pytest.approx(merged, rel=1e-9)  # merging one token loses nothing
    assert top_k(name, student[:1], teacher[:1]) < whole


@pytest.mark.parametrize("name", ["reverse_kl_top_k", "forward_kl_top_k", "jsd_top_k"])
def test_descending_the_gradient_brings_the_student_to_the_teacher(name: str) -> None:
    logits = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]).double(), -1)
    inputs = {"teacher_candidate_logprobs": teacher[None, :2]}
    for _ in range(3000):
        outputs = {"candidate_logprobs": torch.log_softmax(logits, -1)[None, :2]}
        LOSSES[name].term(outputs, inputs, {}).sum().backward()
        assert logits.grad is not None
        logits = (logits - logits.grad).detach().requires_grad_()
    found = torch.log_softmax(logits.detach(), -1)[:2]
    torch.testing.assert_close(found, teacher[:2], rtol=1e-4, atol=1e-4)
