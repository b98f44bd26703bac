"""Log-probability and entropy of chosen tokens from logits, in float32, with little memory.

The last step of every forward pass. Only the logits are kept for the backward pass: softmax and
log-softmax over the vocabulary exist for one block of positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Float32 elements of a block; 16 MiB."""


def token_scores(
    logits: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores of one target per position, differentiable with respect to the logits.

    Args:
        logits: [M, V] of any float type.
        targets: [M] token ids.
        temperature: Logits are divided by it first, as when sampling.
        with_entropy: Whether to compute the second result.

    Returns:
        [M] float32 natural log of the target's probability, and [M] float32 entropy in nats of
        the whole distribution (None when not asked for).
    """
    logprobs, entropy = _TokenScores.apply(  # type: ignore[no-untyped-call]
        logits, targets, temperature, with_entropy
    )
    return logprobs, (entropy if with_entropy else None)


class _TokenScores(torch.autograd.Function):
    """With p = softmax(z), z = logits / temperature and H the entropy:
    d logprob_y / d z = onehot(y) - p and d H / d z = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        num = logits.shape[0]
        logprobs = torch.empty(num, dtype=torch.float32, device=logits.device)
        normaliser = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        for block in _blocks(logits):
            z = _scaled(logits[block], temperature)
            normaliser[block] = torch.logsumexp(z, dim=-1)
            logprobs[block] = z.gather(1, targets[block, None])[:, 0] - normaliser[block]
            if with_entropy:
                p = torch.exp(z - normaliser[block, None])
                entropy[block] = torch.special.entr(p).sum(-1)
        ctx.save_for_backward(logits, targets, normaliser, entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits, targets, normaliser, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for block in _blocks(logits):
            p = torch.exp(_scaled(logits[block], ctx.temperature) - normaliser[block, None])
            d_z = p * -grad_logprobs[block, None]
            rows = torch.arange(len(d_z), device=d_z.device)
            d_z[rows, targets[block]] += grad_logprobs[block]
            if ctx.with_entropy:
                # -p (log p + H) written with entr(p) = -p log p, which is 0 at p = 0.
                d_entropy = torch.special.entr(p) - p * entropy[block, None]
                d_z += d_entropy * grad_entropy[block, None]
            grad[block] = d_z / ctx.temperature
        return grad, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    z = logits.float()
    return z if temperature == 1.0 else z / temperature


def _blocks(logits: Tensor) -> Iterator[slice]:
    num, vocab = logits.shape
    size = max(1, BLOCK_ELEMENTS // vocab)
    for start in range(0, num, size):
        yield slice(start, min(start + size, num))
