"""The configured policy loss over a table: its settings and the columns it is sent.

trainer.algorithm -> PolicyLoss -> settings, inputs [N] -> optimizer steps (policy_steps.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nexrl.algorithms.loss_definition import LossDefinition, Setting, Settings
from nexrl.algorithms.losses import find_loss
from nexrl.config.schema_algorithm import AlgorithmConfig
from nexrl.errors import ConfigError, InvariantError
from nexrl.trainer.batched_trainer import StepPlan
from nexrl.trainer.batching import RowTable
from nexrl.trainer.own_code import OwnLoss, is_path
from nexrl.types import Array

_CLIPS = ("clip_low", "clip_high", "dual_clip")


class PolicyLoss:
    """A named loss, or a recipe's own, with the settings that configuration gives it.

    Invariant: a setting that the named loss does not have is refused here, never dropped.
    """

    def __init__(self, algorithm: AlgorithmConfig, recipe_dir: Path) -> None:
        self._algorithm = algorithm
        config = algorithm.loss
        clips = {name: value for name in _CLIPS if (value := getattr(config, name)) is not None}
        self._own_settings: dict[str, Setting] = {**clips, **config.settings}
        self.own: OwnLoss | None = None
        """The recipe's own, evaluated on this side of the wire; None for a named loss."""
        if is_path(config.name):
            self.own = OwnLoss(config.name, recipe_dir, self._own_settings)
        self.definition: LossDefinition = (
            self.own.definition if self.own is not None else find_loss(config.name)
        )
        self._check()

    def _check(self) -> None:
        loss, algorithm = self.definition, self._algorithm
        may_rise = 1.0 if algorithm.entropy.target is not None else 0.0
        self.settings(algorithm.entropy.coefficient or may_rise)
        fixed = loss.aggregation
        if fixed is not None and algorithm.loss.aggregation != fixed:
            raise ConfigError(
                f"trainer.algorithm.loss.aggregation: {loss.name} is defined for {fixed!r} only, "
                f"got {algorithm.loss.aggregation!r}"
            )
        if algorithm.correction.action != "none" and "correction" not in loss.optional:
            raise ConfigError(
                f"trainer.algorithm.correction.action: loss {loss.name!r} takes no correction, got "
                f"{algorithm.correction.action!r} (accepted: none)"
            )

    @property
    def uses_advantage(self) -> bool:
        """Whether rewards reach the loss at all; distillation of candidates does without."""
        return "advantage" in {*self.definition.required, *self.definition.optional}

    def settings(self, entropy_coefficient: float) -> dict[str, Setting]:
        """All settings of the loss; ConfigError on one that it does not have."""
        kl = self._algorithm.kl
        regularisers: dict[str, Setting] = {}
        if kl.coefficient and kl.placement == "loss":
            regularisers |= {"kl_coefficient": kl.coefficient, "kl_estimator": kl.estimator}
        if entropy_coefficient:
            regularisers["entropy_coefficient"] = entropy_coefficient
        return self.definition.resolve({**self._own_settings, **regularisers})

    def inputs(self, columns: Mapping[str, Array], settings: Settings) -> dict[str, Array]:
        """Those of the [N, ...] columns that the loss takes.

        InvariantError when one that it needs is not there.
        """
        loss = self.definition
        taken = {*loss.required, *loss.optional}
        if self.own is None and not settings.get("kl_coefficient"):
            taken.discard("reference_logprobs")
        found = {name: column for name, column in columns.items() if name in taken}
        if missing := sorted({*loss.required} - {*loss.prepares} - {*found}):
            raise InvariantError(
                f"loss {loss.name!r} needs {missing}, which this trainer does not have (it has "
                f"{sorted(columns)})"
            )
        return found


def step_arrays(table: RowTable, plan: StepPlan, columns: Mapping[str, Array]) -> dict[str, Array]:
    """[n, ...] float64 entries at a step's trained tokens, and `row` and `trajectory`: the numbers
    of each token's row and trajectory, counted from 0 within the step."""
    at = plan.positions
    rows = table.owners(at)
    arrays: dict[str, Array] = {
        name: column[at].astype(np.float64 if column.dtype.kind == "f" else np.int64)
        for name, column in columns.items()
    }
    arrays["row"] = _numbered(rows)
    arrays["trajectory"] = _numbered(table.trajectories[rows])
    return arrays


def _numbered(values: Array) -> Array:
    inverse: Array = np.unique(values, return_inverse=True)[1]
    return inverse.astype(np.int64)
