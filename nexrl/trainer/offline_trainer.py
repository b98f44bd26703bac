"""OfflineTrainer: what trainers of pairs, labelled responses and judged steps share.

    offline trajectories -> entries (`offline_rows.py`) -> forward -> loss and gradient here
                                                             -> backward, optim_step

Consumes the rows of the offline workers, calls the train service, returns metrics. A pair couples
two rows that may travel in different calls, so the loss is computed on this side of the wire
(`run_client_steps`): the service only sees gradients of logprobs, or of values for reward models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from nexrl.algorithms.groups import IndexArray
from nexrl.algorithms.metrics import length_metrics
from nexrl.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    PreferenceLoss,
    find_preference_loss,
)
from nexrl.algorithms.preference_metrics import preference_metrics
from nexrl.config.schema import PreferenceConfig
from nexrl.errors import ConfigError
from nexrl.trainer.batched_trainer import BatchedTrainer, Outcome, StepPlan, step_metrics
from nexrl.trainer.offline_rows import OfflineBatch, collect
from nexrl.trainer.trainer import TrainerContext
from nexrl.types import Array, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

Constants = dict[str, Array]
"""[P] inputs of the loss that the step does not move."""


class OfflineTrainer(BatchedTrainer):
    """Base of trainers whose loss is the `PreferenceLoss` that `trainer.algorithm.loss` names.

    Invariant: the objective of an optimizer step is the mean over all its entries, and an entry is
    never split over optimizer steps, so any split of rows into chunks gives the same gradient.
    """

    scores: ClassVar[bool]
    """Whether the losses that it trains compare scores of a value head instead of logprobs."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self.loss = find_preference_loss(self.config.algorithm.loss.name)
        if self.loss.needs_scores != self.scores:
            accepted = [x.name for x in PREFERENCE_LOSSES.values() if x.needs_scores == self.scores]
            raise ConfigError(
                f"trainer.algorithm.loss.name: {type(self).__name__} does not train "
                f"{self.loss.name!r} (accepted: {', '.join(accepted)})"
            )
        self.settings = _settings(self.loss, self.config.algorithm.preference)
        self._output = "values" if self.loss.needs_scores else "logprobs"
        self._live = "scores" if self.loss.needs_scores else "logprobs"

    async def train(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """One batch; metrics are those of `PREFERENCE_METRIC_UNITS`, grad_norm, lr and
        response_length/*, each at the weights that an entry was trained with."""
        batch = self._collect(trajectories)
        constants = await self.prepare(batch)
        objective = partial(self._objective, batch, constants)
        made: list[Outcome] = []
        for plan in self.plan_steps(batch.table, batch.trajectories):
            await self.prepare_step(batch, plan, constants)
            made.append(
                await self.run_client_steps(batch.table, [plan], objective, outputs=(self._output,))
            )
        outcome = Outcome.join(made)
        inputs = {**constants, **self._moved(batch, batch.sums(outcome.columns[self._output]))}
        lengths = np.array([t.num_response_tokens for t in trajectories])
        return {
            **length_metrics(lengths, np.zeros(len(lengths), np.bool_)),
            **step_metrics(outcome),
            **self._loss_metrics(batch, outcome, inputs),
            **self._named(preference_metrics(self.loss, inputs, self.settings)),
        }

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """loss, accuracy, margin and means by side of held-out rows under the present weights."""
        batch = self._collect(trajectories)
        table = batch.table
        plan = StepPlan(rows=np.arange(table.num_rows), positions=np.flatnonzero(table.mask))
        constants = await self.prepare(batch)
        await self.prepare_step(batch, plan, constants)
        found = await self.forward_outputs(self.policy, table, plan.rows, (self._output,))
        inputs = {**constants, **self._moved(batch, batch.sums(found[self._output]))}
        loss = self.loss.loss(inputs, self.settings)
        return {"loss": float(loss.mean()), **preference_metrics(self.loss, inputs, self.settings)}

    async def prepare(self, batch: OfflineBatch) -> Constants:
        """What is known of every entry before the batch's first optimizer step."""
        return dict(batch.facts)

    async def prepare_step(self, batch: OfflineBatch, plan: StepPlan, constants: Constants) -> None:
        """Put what depends on the weights that this optimizer step starts from into `constants`."""

    def _collect(self, trajectories: Sequence[Trajectory]) -> OfflineBatch:
        return collect(self.loss, trajectories, margin=self.settings.get("margin", 0.0))

    def _objective(
        self,
        batch: OfflineBatch,
        constants: Mapping[str, Array],
        plan: StepPlan,
        outputs: Mapping[str, Tensor],
    ) -> Tensor:
        """Mean loss of the step's entries, in float64."""
        import torch

        entries = batch.entries_of(plan.rows)
        sums = batch.sums_of_tensor(outputs[self._output], plan.positions)
        inputs: dict[str, Tensor] = {
            name: torch.from_numpy(values[entries]) for name, values in constants.items()
        }
        moved = self._moved(batch, sums)
        inputs |= {name: values[torch.from_numpy(entries)] for name, values in moved.items()}
        loss: Tensor = self.loss.loss(inputs, self.settings)
        return loss.mean()

    def _moved(self, batch: OfflineBatch, sums: Any) -> dict[str, Any]:
        """[P] inputs that training moves, from the sums [S] of outputs, an array or a tensor."""
        return {side + self._live: sums[segments] for side, segments in batch.sides.items()}

    def _loss_metrics(
        self, batch: OfflineBatch, outcome: Outcome, inputs: Mapping[str, Array]
    ) -> dict[str, float]:
        """The additive terms apart (FR-040): mean over a step's entries, mean over applied steps."""
        parts = self.loss.parts(inputs, self.settings)
        steps: list[IndexArray] = [batch.entries_of(s.plan.rows) for s in outcome.applied]
        names = {"preference": f"loss/{self.loss.name}", "imitation": "loss/imitation"}
        return {
            names[part]: float(np.mean([values[entries].mean() for entries in steps]))
            for part, values in parts.items()
            if steps
        }

    def _named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        prefix = self.loss.name if self.loss.rows == "process" else "preference"
        own = {"z0": "kto/z0"}
        return {own.get(name, f"{prefix}/{name}"): value for name, value in metrics.items()}


def _settings(loss: PreferenceLoss, wanted: PreferenceConfig) -> dict[str, float]:
    """The loss's settings; ConfigError on one that is set and that it does not have."""
    default = PreferenceConfig()
    for name in PreferenceConfig.model_fields:
        value = getattr(wanted, name)
        if name not in loss.config and value != getattr(default, name):
            raise ConfigError(
                f"trainer.algorithm.preference.{name} is {value}, and {loss.name} has no such "
                f"setting (accepted: {', '.join(loss.config) or 'none'})"
            )
    return {name: float(getattr(wanted, name)) for name in loss.config}
