"""Log-probability and entropy from logits."""

from __future__ import annotations

import pytest
import torch

from nexrl.services.train.backends import token_scores as module
from nexrl.services.train.backends.token_scores import token_scores


def make_logits(num: int = 6, vocab: int = 5) -> torch.Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(0)) * 2


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.stack([log_p.gather(1, targets[:, None])[:, 0], entropy])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_scores_and_gradients_equal_log_softmax(temperature: float) -> None:
    logits, targets = make_logits(), torch.tensor([0, 1, 2, 3, 4, 0])
    mix = torch.randn(2, 6, generator=torch.Generator().manual_seed(1)).double()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropy = token_scores(ours, targets, temperature=temperature, with_entropy=True)
    assert entropy is not None
    found = torch.stack([logprobs, entropy]).double()
    expected = reference(theirs, targets, temperature)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.autograd.backward((found * mix).sum())
    torch.autograd.backward((expected * mix).sum())
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)


def test_blocks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for elements in (module.BLOCK_ELEMENTS, 5):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)
        logits = make_logits().requires_grad_()
        logprobs, _ = token_scores(
            logits, torch.zeros(6, dtype=torch.long), temperature=1.0, with_entropy=False
        )
        torch.autograd.backward(logprobs.sum())
        found.append((logprobs.detach(), logits.grad))
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


def test_tokens_that_cannot_occur_leave_everything_finite() -> None:
    logits = make_logits()
    logits[:, 3] = -torch.inf
    logits.requires_grad_()
    logprobs, entropy = token_scores(
        logits, torch.zeros(6, dtype=torch.long), temperature=1.0, with_entropy=True
    )
    assert entropy is not None
    torch.autograd.backward((logprobs + entropy).sum())
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert torch.isfinite(entropy).all()


def test_bfloat16_logits_are_scored_in_float32() -> None:
    logits = make_logits().bfloat16().requires_grad_()
    targets = torch.zeros(6, dtype=torch.long)
    logprobs, _ = token_scores(logits, targets, temperature=1.0, with_entropy=False)
    expected = reference(logits.detach(), targets, 1.0)[0].float()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.autograd.backward(logprobs.sum())
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
