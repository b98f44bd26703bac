"""The critic of `gae`: a value head beside the policy, with an optimizer of its own.

values before the batch -> gae -> returns -> `value` loss on the rows and steps of the policy
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nexrl.algorithms.losses import find_loss
from nexrl.algorithms.metrics import MetricSums, add_values
from nexrl.config.schema_algorithm import CriticConfig
from nexrl.config.schema_trainer import OptimizerConfig
from nexrl.errors import InvariantError
from nexrl.trainer.batched_trainer import BatchedTrainer, StepPlan, step_metrics
from nexrl.trainer.batching import RowTable, at_positions
from nexrl.types import Array, LossSpec, ModelSpec, OptimParams

CRITIC = "critic"


class Critic:
    """What of the critic is not on the train service: its settings and how many batches it saw.

    Invariant: `num_batches` counts the batches that trained it, so a resume that restores it goes
    on with the same warm-up.
    """

    def __init__(self, config: CriticConfig, optimizer: OptimizerConfig, *, policy: str) -> None:
        self._warmup_batches = config.warmup_batches
        self._loss = LossSpec(name="value", config={"clip": config.clip})
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
        return self.num_batches < self._warmup_batches

    async def train(
        self,
        trainer: BatchedTrainer,
        table: RowTable,
        plans: Sequence[StepPlan],
        columns: Mapping[str, Array],
    ) -> dict[str, float]:
        """The planned steps with the clipped value loss on [N] `columns`; values/* of the batch."""
        if "returns" not in columns:
            raise InvariantError(
                "trainer.algorithm.advantage.name: an estimator that needs `values` must also give "
                "`returns`, which the critic learns"
            )
        inputs = {
            "weight": columns["weight"],
            "returns": columns["returns"],
            "old_values": columns["values"],
        }
        outcome = await trainer.run_steps(
            table,
            plans,
            inputs,
            self._loss,
            outputs=("values",),
            policy=CRITIC,
            next_params=lambda: self._params,
        )
        self.num_batches += 1
        sums, definition = MetricSums(), find_loss(self._loss.name)
        for plan in plans:
            values = at_positions(plan.positions, outcome.columns)
            given = at_positions(plan.positions, inputs)
            add_values(sums, definition, values, given, self._loss.config)
        names = {"loss/total": "values/loss", "grad_norm": "values/grad_norm"}
        means = {names[n]: value for n, value in step_metrics(outcome).items() if n in names}
        return {**sums.result(), **means}
