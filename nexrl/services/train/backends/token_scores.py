"""Log-probabilities and entropy from logits, in float32, with little memory.

The last step of every forward pass of a language model. Only the logits are kept for the backward
pass: softmax and log-softmax over the vocabulary exist for one block of positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Float32 elements of a block; 16 MiB."""


def token_scores(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    with_entropy: bool = False,
    candidates: Tensor | None = None,
) -> dict[str, Tensor]:
    """Scores of one target per position, differentiable with respect to the logits.

    Args:
        logits: [M, V] of any float type.
        targets: [M] token ids.
        temperature: Logits are divided by it first, as when sampling.
        with_entropy: Whether to compute `entropy`.
        candidates: [M, K] token ids; when given, `candidate_logprobs` is computed.

    Returns:
        `logprobs` [M], natural log of the target's probability; `entropy` [M] in nats of the whole
        distribution; `candidate_logprobs` [M, K]. All float32.
    """
    empty = targets.new_empty((len(targets), 0))
    logprobs, entropy, candidate_logprobs = _TokenScores.apply(  # type: ignore[no-untyped-call]
        logits, targets, temperature, with_entropy, empty if candidates is None else candidates
    )
    scores = {"logprobs": logprobs}
    if with_entropy:
        scores["entropy"] = entropy
    if candidates is not None:
        scores["candidate_logprobs"] = candidate_logprobs
    return scores


def top_scores(logits: Tensor, num_top: int, *, temperature: float) -> tuple[Tensor, Tensor]:
    """([M, num_top] ids, [M, num_top] float32 logprobs) of the likeliest tokens, likeliest first.

    `logits` are [M, V]; without gradient.
    """
    shape = (logits.shape[0], num_top)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(shape, dtype=torch.float32, device=logits.device)
    for block in _blocks(logits):
        z = _scaled(logits[block], temperature)
        values, ids[block] = torch.topk(z, num_top, dim=-1)
        logprobs[block] = values - torch.logsumexp(z, dim=-1, keepdim=True)
    return ids, logprobs


class _TokenScores(torch.autograd.Function):
    """With p = softmax(z), z = logits / temperature and H the entropy:
    d logprob_y / d z = onehot(y) - p and d H / d z = -p (log p + H). The gradients of K candidates
    share one p, so they cost K additions each and no [M, K, V]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        candidates: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num = logits.shape[0]
        logprobs = torch.empty(num, dtype=torch.float32, device=logits.device)
        normaliser = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        candidate_logprobs = logprobs.new_empty(candidates.shape)
        for block in _blocks(logits):
            z = _scaled(logits[block], temperature)
            normaliser[block] = torch.logsumexp(z, dim=-1)
            logprobs[block] = z.gather(1, targets[block, None])[:, 0] - normaliser[block]
            candidate_logprobs[block] = z.gather(1, candidates[block]) - normaliser[block, None]
            if with_entropy:
                p = torch.exp(z - normaliser[block, None])
                entropy[block] = torch.special.entr(p).sum(-1)
        ctx.save_for_backward(logits, targets, candidates, normaliser, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # an output that is only reported costs nothing
        return logprobs, entropy, candidate_logprobs

    @staticmethod
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_candidates: Tensor | None,
    ) -> tuple[Tensor, None, None, None, None]:
        logits, targets, candidates, normaliser, entropy = ctx.saved_tensors
        chosen, grads = [], []  # [M, C] ids, and the gradients of their logprobs
        if grad_logprobs is not None:
            chosen.append(targets[:, None])
            grads.append(grad_logprobs[:, None])
        if grad_candidates is not None:
            chosen.append(candidates)
            grads.append(grad_candidates)
        ids = torch.cat([candidates[:, :0], *chosen], dim=1)
        grad_ids = torch.cat([normaliser.new_empty((len(ids), 0)), *grads], dim=1)
        total = grad_ids.sum(1)
        grad = torch.empty_like(logits)
        for block in _blocks(logits):
            p = torch.exp(_scaled(logits[block], ctx.temperature) - normaliser[block, None])
            d_z = p * -total[block, None]
            rows = torch.arange(len(d_z), device=d_z.device)[:, None].expand_as(ids[block])
            # Adds up ids that occur twice, in a fixed order on every device.
            d_z.index_put_((rows, ids[block]), grad_ids[block], accumulate=True)
            if grad_entropy is not None:
                # -p (log p + H) written with entr(p) = -p log p, which is 0 at p = 0.
                d_entropy = torch.special.entr(p) - p * entropy[block, None]
                d_z += d_entropy * grad_entropy[block, None]
            grad[block] = d_z / ctx.temperature
        return grad, None, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    z = logits.float()
    return z if temperature == 1.0 else z / temperature


def _blocks(logits: Tensor) -> Iterator[slice]:
    num, vocab = logits.shape
    size = max(1, BLOCK_ELEMENTS // vocab)
    for start in range(0, num, size):
        yield slice(start, min(start + size, num))
