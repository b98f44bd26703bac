"""What a call on a policy must be: checked before any arithmetic, in the same way by every back end.

Consumes the arguments of `forward`, `forward_backward` and `backward`; produces the positions and
inputs that the arithmetic needs, or an error that names what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from nexrl.algorithms.loss_definition import LossDefinition, Settings
from nexrl.algorithms.losses import LOSSES, find_loss
from nexrl.errors import ConfigError, InvariantError
from nexrl.services.train.chunk_checks import (
    check_candidates,
    check_chunk,
    check_finite,
    check_gradients,
    check_widths,
    scored_positions,
)
from nexrl.services.train.outputs import OFFERED, Head, differentiable, top_count
from nexrl.types import CANDIDATE_IDS, OUTPUT_MASK, Array, BoolArray, LossSpec, ModelSpec, RowChunk

P = TypeVar("P")


def check_source(spec: ModelSpec) -> None:
    """ConfigError unless the model comes from exactly one place."""
    if bool(spec.path) == bool(spec.copy_of):
        raise ConfigError(
            f"policy {spec.policy!r}: give either path or copy_of, got path={spec.path!r} and "
            f"copy_of={spec.copy_of!r}"
        )


def find_policy(hosted: Mapping[str, P], policy: str) -> P:
    """What is hosted under the name; ConfigError when nothing is, or nothing any more."""
    if policy not in hosted:
        raise ConfigError(f"no policy is named {policy!r} (hosted here: {sorted(hosted)})")
    return hosted[policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCall:
    """A `forward_backward` that was let in."""

    definition: LossDefinition
    """The loss."""
    config: Settings
    """Its settings as given."""
    inputs: Mapping[str, Array]
    """[N, ...] by name, `weight` among them."""
    trained: BoolArray
    """[N] where the weight is not 0 and something predicts the token."""
    outputs: tuple[str, ...]
    """Outputs of the model that the term uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDoor:
    """What one policy accepts. Fakes have the same door, so what they refuse is refused by the
    real service too."""

    policy: str
    """Name, for messages."""
    head: Head
    """What the model ends in."""
    trainable: bool
    """False: forward only."""
    vocab_size: int
    """V"""
    max_positions: int
    """Most tokens that the model is fed at once."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the losses that use nothing but outputs of this policy."""
        own = set(differentiable(self.head))
        return tuple(
            name for name, definition in LOSSES.items() if own.issuperset(definition.needs)
        )

    def require_trainable(self) -> None:
        """ConfigError for a frozen policy."""
        if not self.trainable:
            raise ConfigError(
                f"policy {self.policy!r} was created with trainable=False: it accepts forward only"
            )

    def check_forward(self, chunk: RowChunk, outputs: tuple[str, ...]) -> BoolArray:
        """[N] positions to score."""
        self._check_outputs(outputs, "outputs", with_top=True)
        self._check_chunk(chunk)
        return self._check_scored(chunk, outputs)

    def check_loss(self, chunk: RowChunk, loss: LossSpec, outputs: tuple[str, ...]) -> LossCall:
        """The loss with its inputs, and where it trains."""
        self._check_outputs(outputs, "forward_backward")
        definition = find_loss(loss.name)
        used = definition.outputs(loss.config)
        self._check_outputs(used, f"loss {loss.name!r}")
        # Candidates may be there for the sake of an output that is only reported.
        not_inputs = {OUTPUT_MASK, CANDIDATE_IDS} - {*definition.required, *definition.optional}
        inputs = {k: v for k, v in chunk.inputs.items() if k not in not_inputs}
        definition.check_inputs(inputs, loss.config)
        self._check_chunk(chunk)
        self._check_scored(chunk, outputs)
        check_widths(inputs)
        trained = scored_positions(chunk, inputs["weight"] != 0)
        if "candidate_logprobs" in used:
            check_candidates(chunk, trained, vocab_size=self.vocab_size)
        check_finite(inputs, trained, chunk)
        return LossCall(
            definition=definition,
            config=loss.config,
            inputs=inputs,
            trained=trained,
            outputs=used,
        )

    def check_backward(self, chunk: RowChunk, gradients: Mapping[str, Array]) -> BoolArray:
        """[N] positions at which any gradient is not 0."""
        self._check_outputs(tuple(gradients), "backward")
        self._check_chunk(chunk)
        trained = check_gradients(gradients, chunk)
        if "candidate_logprobs" in gradients:
            check_candidates(chunk, trained, vocab_size=self.vocab_size)
        return trained

    def _check_outputs(self, names: tuple[str, ...], what: str, *, with_top: bool = False) -> None:
        """ConfigError on an output that the policy does not have, or that has no gradient; top-K
        only `with_top`. `what` says who asks for it."""
        plain = differentiable(self.head)
        accepted = OFFERED[self.head] if with_top else plain
        has_top = accepted != plain
        if unknown := sorted(n for n in names if n not in plain and not (has_top and top_count(n))):
            raise ConfigError(
                f"{what}: policy {self.policy!r} has no output {unknown} (accepted with "
                f"head={self.head!r}: {list(accepted)}{' with a number for K' if has_top else ''})"
            )
        for name in names:
            if (top_count(name) or 0) > self.vocab_size:
                raise ConfigError(f"output {name!r}: the vocabulary has only {self.vocab_size} ids")

    def _check_chunk(self, chunk: RowChunk) -> None:
        check_chunk(chunk, vocab_size=self.vocab_size, max_positions=self.max_positions)

    def _check_scored(self, chunk: RowChunk, outputs: tuple[str, ...]) -> BoolArray:
        positions = scored_positions(chunk, chunk.inputs.get(OUTPUT_MASK))
        if "candidate_logprobs" in outputs:
            check_candidates(chunk, positions, vocab_size=self.vocab_size)
        return positions


class PendingGradient:
    """What is known of the gradient that adds up until the next optimizer step.

    Invariant: after a call that should have added to it failed, also by being refused, `take`
    refuses: an `optim_step` that is under way already would otherwise train on the other chunks
    alone.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._broken = ""
        self._is_there = False

    @property
    def exists(self) -> bool:
        """Whether anything was added, or failed to be, since the last optimizer step."""
        return self._is_there or bool(self._broken)

    def added(self) -> None:
        """Part of a chunk was added."""
        self._is_there = True

    @contextmanager
    def whole_or_broken(self) -> Iterator[None]:
        """Around a call that adds to the gradient."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def forget(self) -> None:
        """The gradient was dropped."""
        self._broken, self._is_there = "", False

    def take(self) -> None:
        """An optimizer step uses it up; InvariantError, and nothing is pending any more, when it
        is incomplete."""
        reason = self._broken
        self.forget()
        if reason:
            raise InvariantError(
                f"policy {self._policy!r}: the gradient is incomplete and was dropped, because a "
                f"call that should have added to it failed: {reason}"
            )
