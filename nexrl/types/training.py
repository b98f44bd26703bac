"""Messages between a trainer and a train service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from nexrl.errors import InvariantError
from nexrl.types.versions import DEFAULT_POLICY, Array, FloatArray, IntArray

OUTPUT_MASK = "output_mask"
"""Optional input of a `RowChunk`: outputs are wanted where it is nonzero and are 0 elsewhere, so
that a service need not score prompts. Without it every token but a row's first is scored."""

CANDIDATE_IDS = "candidate_ids"
"""Input [N, K] of the output `candidate_logprobs`: K token ids at each position that is scored; K
is one number for the whole chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChunk:
    """Token rows on their way to a train service: ragged, concatenated, no padding.

    Positions of row i are [offsets[i], offsets[i+1]). Per-token entry t speaks of token t given
    the tokens before it; entry 0 of each row is never trained nor scored.
    """

    lengths: IntArray
    """[R] tokens per row."""
    token_ids: IntArray
    """[N] with N = sum(lengths)."""
    inputs: Mapping[str, Array] = field(default_factory=dict)
    """Per-token loss inputs [N, ...]: weight, advantage, behavior_logprobs, ..."""
    temperature: float = 1.0
    """Logits are divided by it before the log-softmax, so that logprobs match the draw."""

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        for name, array in (("token_ids", self.token_ids), *self.inputs.items()):
            if len(array) != total:
                raise InvariantError(
                    f"row chunk: {name} has {len(array)} entries, lengths sum to {total}"
                )

    @property
    def offsets(self) -> IntArray:
        """[R + 1] start of each row and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def num_rows(self) -> int:
        """R"""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """N"""
        return len(self.token_ids)

    @classmethod
    def from_rows(
        cls,
        token_ids: Sequence[IntArray],
        inputs: Mapping[str, Sequence[Array]] | None = None,
        temperature: float = 1.0,
    ) -> RowChunk:
        """Concatenate rows; each input has one array per row, of that row's length."""
        lengths = np.fromiter((len(t) for t in token_ids), np.int32, len(token_ids))
        empty = np.zeros(0, np.float32)
        return cls(
            lengths=lengths,
            token_ids=(
                np.concatenate(token_ids).astype(np.int32, copy=False)
                if token_ids
                else np.zeros(0, np.int32)
            ),
            inputs={
                name: np.concatenate(arrays) if len(arrays) else empty
                for name, arrays in (inputs or {}).items()
            },
            temperature=temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model that a train service shall host under a policy name."""

    policy: str = DEFAULT_POLICY
    """Name it is addressed by."""
    path: str = ""
    """Hugging Face model folder; empty when `copy_of` is given."""
    copy_of: str = ""
    """Policy whose present weights are copied, for a frozen reference."""
    trainable: bool = True
    """False keeps no gradients and no optimizer state."""
    head: Literal["lm", "value"] = "lm"
    """`value`: a scalar per position in place of the output head, for a critic or a reward model;
    a folder without one starts it at 0. Its only output is `values`."""
    seed: int = 0
    """Seed of anything random in the model (dropout, new heads)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """A named loss and its settings; a plain sum over tokens of term x weight."""

    name: str
    """Name in `nexrl.algorithms.losses`."""
    config: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)
    """Settings by name, for example clip_low and clip_high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Named per-token outputs of a forward pass."""

    lengths: IntArray
    """[R] as sent."""
    outputs: Mapping[str, FloatArray]
    """[N, ...] by name (logprobs, entropy ...); entry 0 of each row is 0. `top_ids:K` is int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOutput:
    """What a backward pass reports; the gradients stay with the service."""

    loss: float
    """Sum over tokens of term x weight; 0 for `backward` from given gradients."""
    outputs: Mapping[str, FloatArray]
    """[N, ...] per-token outputs that were asked for, at the weights used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimParams:
    """AdamW settings of one optimizer step; the trainer owns the schedule."""

    lr: float
    """Learning rate of this step."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled, on matrices only."""
    grad_clip_norm: float = 0.0
    """Global norm bound; 0 is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimResult:
    """What an optimizer step did."""

    grad_norm: float
    """Global norm before clipping."""
    applied: bool
    """False when the gradient was not finite and the step was skipped."""
    optimizer_step: int
    """Optimizer steps applied so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInfo:
    """What a train service says of one policy."""

    policy: str
    """Name."""
    num_parameters: int
    """Trainable parameters."""
    vocab_size: int
    """V"""
    max_positions: int
    """Most tokens that the model is fed at once; a row may have one more, its last."""
    dtype: str
    """Compute dtype."""
    optimizer_step: int
    """Optimizer steps applied so far."""
    device: str = "cpu"
    """Where it runs."""
    losses: tuple[str, ...] = ()
    """Named losses on offer."""
    outputs: tuple[str, ...] = ()
    """Named outputs of forward."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Cumulative seconds inside forward, backward, optimizer, for time shares."""
