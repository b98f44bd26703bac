"""What an inference call is asked for: a prompt, and how to draw from it."""

from __future__ import annotations

from dataclasses import dataclass

from nexrl.types.quick import quick
from nexrl.types.versions import IntArray, LogprobKind


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Every field is always sent, so no server default leaks in (FR-085)."""

    max_tokens: int = 256
    """Most tokens to draw for one choice."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """Nucleus mass; 1 is off. Below 1 the logprobs are `truncated` and RL refuses them (FR-083)."""
    top_k: int | None = None
    """Keep the k likeliest tokens; None is off, translated for each back end (FR-086)."""
    stop: tuple[str, ...] = ()
    """Stop strings; their tokens stay in token_ids, the text is cut before them."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop ids beside the model's own end-of-sequence ids; a drawn one stays in token_ids."""
    seed: int | None = None
    """Seed of choice 0; choice i uses `derive_seed(seed, i)` unless `seeds` is given."""
    seeds: tuple[int, ...] = ()
    """One seed for each choice; overrides `seed`. Its length must equal n."""

    @property
    def logprob_kind(self) -> LogprobKind:
        """What a logprob under these parameters is the logarithm of."""
        if self.top_p < 1.0 or self.top_k is not None:
            return "truncated"
        return "tempered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a completion continues: token ids, and the text they came from when it is known."""

    token_ids: IntArray
    """[P] exactly what the engine is fed."""
    text: str = ""
    """For people only."""
