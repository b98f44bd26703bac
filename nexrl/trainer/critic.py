"""The critic of `gae`: a value head beside the policy, with an optimizer of its own.

values before the batch -> gae -> returns -> `value` loss on the rows and steps of the policy
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nexrl.algorithms.losses import find_loss
from nexrl.algorithms.metrics import MetricSums, add_values
from nexrl.config.schema_algorithm import CriticConfig
from nexrl.config.schema_trainer import OptimizerConfig
from nexrl.trainer.batched_trainer import Outcome
from nexrl.trainer.batching import RowTable
from nexrl.trainer.loss_columns import step_arrays
from nexrl.types import Array, LossSpec, ModelSpec, OptimParams

CRITIC = "critic"


class Critic:
    """What of the critic is not on the train service: its settings and how many batches it saw.

    Invariant: `num_batches` counts the batches that trained it, so a resume goes on with the same
    warm-up.
    """

    def __init__(self, config: CriticConfig, optimizer: OptimizerConfig, *, policy: str) -> None:
        self._config = config
        self.spec = ModelSpec(policy=CRITIC, copy_of=policy, head="value")
        """A value head, 0 at first, on a copy of the policy as the stage begins."""
        self._params = OptimParams(
            lr=config.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
        )
        self.num_batches = 0

    @property
    def warming_up(self) -> bool:
        """Whether the present batch trains the critic alone."""
        return self.num_batches < self._config.warmup_batches

    @property
    def loss(self) -> LossSpec:
        """The clipped value loss."""
        return LossSpec(name="value", config={"clip": self._config.clip})

    def next_params(self) -> OptimParams:
        """Settings of each of its optimizer steps."""
        return self._params

    def state_dict(self) -> dict[str, Any]:
        """What the train service does not keep."""
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.num_batches = int(state["num_batches"])


def value_metrics(
    table: RowTable, outcome: Outcome, inputs: Mapping[str, Array], loss: LossSpec
) -> dict[str, float]:
    """values/* of one batch: `inputs` are the [N] columns that the loss was given."""
    sums = MetricSums()
    for step in outcome.steps:
        add_values(
            sums,
            find_loss(loss.name),
            {"values": outcome.columns["values"][step.plan.positions].astype(np.float64)},
            step_arrays(table, step.plan, inputs),
            loss.config,
        )
    metrics = sums.result()
    if applied := outcome.applied:
        metrics["values/loss"] = float(np.mean([step.loss for step in applied]))
        metrics["values/grad_norm"] = float(np.mean([step.result.grad_norm for step in applied]))
    return metrics
