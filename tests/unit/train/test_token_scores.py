"""Log-probabilities and entropy from logits."""

from __future__ import annotations

import pytest
import torch

from nexrl.services.train.backends import token_scores as module
from nexrl.services.train.backends.token_scores import token_scores, top_scores

TARGETS = torch.tensor([0, 1, 2, 3, 4, 0])
CANDIDATES = torch.tensor([[0, 3], [1, 1], [4, 0], [3, 2], [0, 4], [2, 0]])
"""With the target among them or not, and one id twice."""


def make_logits(num: int = 6, vocab: int = 5) -> torch.Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(0)) * 2


def reference(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[M, 4] logprob, entropy, two candidates."""
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    return torch.cat([log_p.gather(1, TARGETS[:, None]), entropy, log_p.gather(1, CANDIDATES)], 1)


def scores(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    found = token_scores(
        logits, TARGETS, temperature=temperature, with_entropy=True, candidates=CANDIDATES
    )
    columns = [found["logprobs"], found["entropy"], *found["candidate_logprobs"].unbind(1)]
    return torch.stack(columns, 1).double()


@pytest.mark.parametrize("columns", [[0], [1], [2, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_scores_and_gradients_equal_log_softmax(temperature: float, columns: list[int]) -> None:
    """Whichever outputs the loss uses; the others have no gradient to give."""
    mix = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double()[:, columns]
    ours, theirs = make_logits().requires_grad_(), make_logits().requires_grad_()
    found, expected = scores(ours, temperature), reference(theirs, temperature)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.autograd.backward((found[:, columns] * mix).sum())
    torch.autograd.backward((expected[:, columns] * mix).sum())
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)


def test_blocks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for elements in (module.BLOCK_ELEMENTS, 5):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)
        logits = make_logits().requires_grad_()
        all_scores = scores(logits, 1.0)
        torch.autograd.backward(all_scores.sum())
        top = top_scores(logits.detach(), 2, temperature=1.0)
        found.append((all_scores.detach(), logits.grad, *top))
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


def test_only_one_block_of_the_vocabulary_is_held_beside_the_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Candidates add [M, K], never [M, K, V]: nothing but the logits is kept at their size."""
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 5)
    kept: list[int] = []
    logits = make_logits().requires_grad_()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        token_scores(logits, TARGETS, temperature=1.0, with_entropy=True, candidates=CANDIDATES)
    assert sorted(kept) == sorted([30, 6, 12, 6, 6])


def test_tokens_that_cannot_occur_leave_everything_finite() -> None:
    logits = make_logits()
    logits[:, 1] = -torch.inf
    logits.requires_grad_()
    found = token_scores(
        logits,
        torch.zeros(6, dtype=torch.long),
        temperature=1.0,
        with_entropy=True,
        candidates=torch.tensor([[0, 4]] * 6),
    )
    torch.autograd.backward(torch.stack([v.sum() for v in found.values()]).sum())
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert torch.isfinite(found["entropy"]).all()


def test_bfloat16_logits_are_scored_in_float32() -> None:
    logits = make_logits().bfloat16().requires_grad_()
    logprobs = token_scores(logits, TARGETS, temperature=1.0)["logprobs"]
    expected = reference(logits.detach(), 1.0)[:, 0].float()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.autograd.backward(logprobs.sum())
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_top_ids_come_likeliest_first_with_their_tempered_logprobs(temperature: float) -> None:
    logits = make_logits()
    ids, logprobs = top_scores(logits, 3, temperature=temperature)
    expected = torch.log_softmax(logits.double() / temperature, -1).sort(-1, descending=True)
    assert torch.equal(ids, expected.indices[:, :3])
    torch.testing.assert_close(logprobs.double(), expected.values[:, :3], atol=1e-5, rtol=1e-5)
