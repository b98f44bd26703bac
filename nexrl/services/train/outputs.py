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
from collections.abc import Mapping
from typing import Literal

import numpy as np

from nexrl.errors import ConfigError, InvariantError
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


def candidate_ids(chunk: RowChunk) -> Array:
    """[N, K] the input of that name, refused where it is missing or no whole numbers of such a
    shape."""
    ids = chunk.inputs.get(CANDIDATE_IDS)
    if ids is None:
        raise ConfigError(f"the output 'candidate_logprobs' needs the input {CANDIDATE_IDS!r}")
    if ids.ndim != 2 or ids.shape[1] == 0 or ids.dtype.kind not in "iu":
        raise InvariantError(
            f"row chunk: {CANDIDATE_IDS} must be whole numbers of shape [N, K] with K > 0, got "
            f"{ids.dtype} {ids.shape}"
        )
    return ids


def empty_output(name: str, chunk: RowChunk) -> Array:
    """Zeros in the shape and type of an output over the whole chunk."""
    width = candidate_ids(chunk).shape[1] if name == "candidate_logprobs" else top_count(name)
    shape = (chunk.num_tokens,) if width is None else (chunk.num_tokens, width)
    return np.zeros(shape, np.int32 if name.startswith("top_ids") else np.float32)
