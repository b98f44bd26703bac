"""A recipe's own advantage estimator or loss, by path: checked, and as one of the built-in kind.

    path.py:name -> AdvantageDefinition    estimate(inputs, settings) -> Advantages, [T] or [M]
    path.py:name -> OwnLoss                loss(outputs, inputs, settings) -> [n] term or a scalar

Whatever such a function raises, or returns in a wrong shape, is a UserCodeError that names it, with
file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nexrl.algorithms.advantage_definition import (
    AdvantageDefinition,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
)
from nexrl.algorithms.groups import GroupStatistics
from nexrl.algorithms.loss_definition import REGULARISERS, LossDefinition, Setting, Settings
from nexrl.config.user_code import load_user_object
from nexrl.errors import ConfigError, NexRLError, UserCodeError, user_frame

if TYPE_CHECKING:
    from torch import Tensor

ADVANTAGE_KEY = "trainer.algorithm.advantage.name"
LOSS_KEY = "trainer.algorithm.loss.name"
LOSS_OUTPUTS = ("logprobs", "entropy")
"""What the attribute `needs` of a loss may name; a critic's values come as the input `values`."""


def is_path(name: str) -> bool:
    """Whether a configured name is a function's path: `file.py:name` or `package.module:name`."""
    return ":" in name


# --- advantages -----------------------------------------------------------------------------------


def load_own_advantage(reference: str, recipe_dir: Path) -> AdvantageDefinition:
    """The function as an estimator; its attribute `needs` names fields of AdvantageInputs beyond
    rewards, groups and lengths that it cannot do without, for example ("values",). Token rewards
    are part of `rewards` unless it needs them."""
    function = load_user_object(reference, recipe_dir=recipe_dir, key=ADVANTAGE_KEY)
    accepted = tuple(field.name for field in fields(AdvantageInputs))
    needs = _needs(ADVANTAGE_KEY, reference, function, default=(), accepted=accepted)

    def estimate(
        inputs: AdvantageInputs, _: GroupStatistics, settings: AdvantageSettings
    ) -> Advantages:
        found = _called(ADVANTAGE_KEY, reference, function, inputs, settings)
        return _checked_advantages(f"{reference} ({_line_of(function)})", found, inputs)

    return AdvantageDefinition(
        name=reference,
        group_relative=False,
        estimate=estimate,
        needs=needs,
        folds_token_rewards="token_rewards" not in needs,
    )


def _checked_advantages(reference: str, found: Any, inputs: AdvantageInputs) -> Advantages:
    assert inputs.lengths is not None
    num, num_tokens = len(inputs.rewards), int(inputs.lengths.sum())
    if not isinstance(found, Advantages):
        array = np.asarray(found)
        if array.dtype.kind not in "biuf" or array.shape not in ((num,), (num_tokens,)):
            raise UserCodeError(
                f"{ADVANTAGE_KEY}: {reference} must return Advantages, an array [T] = [{num}] (a "
                f"number for each trajectory) or [M] = [{num_tokens}] (for each trained token), got "
                f"{_shape(found)}"
            )
        by_trajectory, numbers = array.shape == (num,), array.astype(np.float64)
        found = Advantages(
            per_trajectory=numbers if by_trajectory else None,
            per_token=None if by_trajectory else numbers,
        )
    advantages: Advantages = found
    shapes = {"per_trajectory": num, "per_token": num_tokens, "returns": num_tokens}
    for name, expected in shapes.items():
        array = getattr(advantages, name)
        if array is None:
            continue
        if np.shape(array) != (expected,):
            raise UserCodeError(
                f"{ADVANTAGE_KEY}: {reference} returned {name} of {_shape(array)}, expected "
                f"[{expected}]"
            )
        if not np.isfinite(array).all():
            raise UserCodeError(
                f"{ADVANTAGE_KEY}: {reference} returned {name} with an entry that is not finite"
            )
    if (advantages.per_trajectory is None) == (advantages.per_token is None):
        raise UserCodeError(
            f"{ADVANTAGE_KEY}: {reference} must give exactly one of per_trajectory and per_token"
        )
    return advantages


# --- losses ---------------------------------------------------------------------------------------


class OwnLoss:
    """A recipe's loss, evaluated on this side of the wire.

    Invariant: a term [n] is treated as a built-in one, multiplied by `correction` and `weight` with
    the KL and entropy terms added; a scalar is minimised as it is.
    """

    def __init__(self, reference: str, recipe_dir: Path, settings: Settings) -> None:
        self.reference = reference
        self._function: Callable[..., Any] = load_user_object(
            reference, recipe_dir=recipe_dir, key=LOSS_KEY
        )
        self.settings: dict[str, Setting] = dict(settings)
        needs = _needs(
            LOSS_KEY, reference, self._function, default=("logprobs",), accepted=LOSS_OUTPUTS
        )
        self.definition = LossDefinition(
            name=reference,
            required=("weight", "advantage"),
            optional=(
                "proximal_logprobs",
                "behavior_logprobs",
                "reference_logprobs",
                "teacher_logprobs",
                "values",
                "correction",
            ),
            config={**REGULARISERS, **self.settings},
            bounded=False,
            term_of=lambda *_: None,
            needs=tuple(dict.fromkeys(("logprobs", *needs))),
        )

    def parts(
        self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor], settings: Settings
    ) -> dict[str, Tensor]:
        """Scalars by name (policy, kl, entropy) whose sum is the objective of an optimizer step."""
        term = _called(LOSS_KEY, self.reference, self._function, outputs, inputs, settings)
        weight = inputs["weight"]
        if not hasattr(term, "requires_grad") or tuple(term.shape) not in ((), tuple(weight.shape)):
            raise UserCodeError(
                f"{LOSS_KEY}: {self.reference} must return a tensor [n] = [{len(weight)}], a term "
                f"for each trained token of the optimizer step, or a scalar tensor, got "
                f"{_shape(term)} ({_line_of(self._function)})"
            )
        if not term.requires_grad:
            raise UserCodeError(
                f"{LOSS_KEY}: what {self.reference} returns depends on none of the outputs "
                f"{list(self.definition.needs)}, so nothing would be trained; was it detached? "
                f"({_line_of(self._function)})"
            )
        if not term.shape:
            return {"policy": term}
        whole = replace(self.definition, term_of=lambda *_: term)
        parts = whole.parts(outputs, inputs, settings)
        return {name: (part * weight).sum() for name, part in parts.items()}


def _called(key: str, reference: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except NexRLError:
        raise
    except Exception as error:
        raise UserCodeError(
            f"{key}: {reference} raised {type(error).__name__}: {error} ({user_frame(error)})"
        ) from error


def _needs(
    key: str, reference: str, function: Any, *, default: tuple[str, ...], accepted: Sequence[str]
) -> tuple[str, ...]:
    """The function's attribute `needs`; ConfigError unless it is a tuple of accepted names."""
    needs = getattr(function, "needs", default)
    if not isinstance(needs, tuple | list):
        raise ConfigError(
            f"{key}: {reference} needs must be a tuple of names, got {needs!r} (accepted: "
            f"{list(accepted)})"
        )
    if unknown := [name for name in needs if name not in accepted]:
        raise ConfigError(f"{key}: {reference} needs {unknown} (accepted: {list(accepted)})")
    return tuple(needs)


def _line_of(function: Any) -> str:
    """`file:line` of a function, or its name where it has no code of its own."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"shape {list(shape)}"
