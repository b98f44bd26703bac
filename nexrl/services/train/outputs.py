"""Names of per-token outputs: which ones a policy offers, and what shape each has.

Entry t of every output speaks of token t given the tokens before it, and is 0 for the first token
of a row, and where nothing was asked for.

    logprobs            [N]     natural log of the probability of token t
    entropy             [N]     of the distribution that token t is drawn from, in nats
    candidate_logprobs  [N, K]  logprobs at the K ids that the input `candidate_ids` [N, K] names
    top_ids:K           [N, K]  int32, the K most likely ids, likeliest first
    top_logprobs:K      [N, K]  their logprobs
    values              [N]     of a value head, read from the state before token t

All under the chunk's temperature, except `values`. Top-K has no gradient.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np

from nexrl.errors import ConfigError
from nexrl.types import CANDIDATE_IDS, Array, RowChunk

Head = Literal["lm", "value"]

OFFERED: Mapping[Head, tuple[str, ...]] = {
    "lm": ("logprobs", "entropy", "candidate_logprobs", "top_ids:K", "top_logprobs:K"),
    "value": ("values",),
}
"""By head, what `forward` returns; K stands for a number."""

_TOP = re.compile(r"(top_ids|top_logprobs):([1-9][0-9]*)")


def top_count(name: str) -> int | None:
    """K of `top_ids:K` and `top_logprobs:K`; None for any other name."""
    found = _TOP.fullmatch(name)
    return int(found[2]) if found else None


def differentiable(head: Head) -> tuple[str, ...]:
    """Outputs that losses may use and `backward` takes gradients of."""
    return tuple(name for name in OFFERED[head] if not name.endswith(":K"))


def check_forward_outputs(
    names: Iterable[str], *, policy: str, head: Head, vocab_size: int
) -> None:
    """ConfigError on an output that `forward` of such a policy does not have."""
    plain, unknown = differentiable(head), []
    for name in names:
        num_top = top_count(name)
        if num_top is None or head != "lm":
            unknown += [name] * (name not in plain)
        elif num_top > vocab_size:
            raise ConfigError(f"output {name!r}: the vocabulary has only {vocab_size} ids")
    if unknown:
        raise ConfigError(_refusal("outputs", unknown, OFFERED[head], policy, head))


def check_differentiable(names: Iterable[str], what: str, *, policy: str, head: Head) -> None:
    """ConfigError on an output without a gradient; `what` says who asks for it."""
    accepted = differentiable(head)
    if unknown := [name for name in names if name not in accepted]:
        raise ConfigError(_refusal(what, unknown, accepted, policy, head))


def _refusal(
    what: str, names: list[str], accepted: tuple[str, ...], policy: str, head: Head
) -> str:
    note = " with a number for K" if any(name.endswith(":K") for name in accepted) else ""
    return (
        f"{what}: policy {policy!r} has no output {sorted(names)} (accepted with head={head!r}: "
        f"{list(accepted)}{note})"
    )


def empty_output(name: str, chunk: RowChunk) -> Array:
    """Zeros in the shape and type of an output over the whole chunk."""
    width = top_count(name)
    if name == "candidate_logprobs":
        width = chunk.inputs[CANDIDATE_IDS].shape[1]
    shape = (chunk.num_tokens,) if width is None else (chunk.num_tokens, width)
    return np.zeros(shape, np.int32 if name.startswith("top_ids") else np.float32)
