"""The configured policy loss, and the policy's optimizer steps with what each of them did.

Metrics are evaluated here on numpy in float64, with the functions that the service differentiates,
so that what is reported is what was used (FR-098), for any split into chunks.

    trainer.algorithm -> PolicyLoss -> settings, inputs [N] -> PolicySteps -> weights, metrics

named loss        all steps under way at once
loss with prepare forward of the whole step, prepare, then the step; one after another
own loss          forward, autograd here, backward; one after another
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nexrl.algorithms.loss_definition import LossDefinition, Setting, Settings
from nexrl.algorithms.losses import find_loss
from nexrl.algorithms.metrics import MetricSums, add_ratio, add_reference_kl
from nexrl.algorithms.segments import sum_of_products
from nexrl.config.schema_algorithm import AlgorithmConfig, EntropyConfig
from nexrl.errors import ConfigError, InvariantError
from nexrl.trainer.batched_trainer import (
    BatchedTrainer,
    Outcome,
    StepOutcome,
    StepPlan,
    step_metrics,
)
from nexrl.trainer.batching import RowTable, at_positions
from nexrl.trainer.own_code import OwnLoss, is_path
from nexrl.types import CANDIDATE_IDS, Array, LossSpec

if TYPE_CHECKING:
    from torch import Tensor

MAX_COEFFICIENT = 0.1
"""Bound of the adaptive entropy coefficient: a bonus ten times as large as any in use outweighs
rewards."""
_CLIPS = ("clip_low", "clip_high", "dual_clip")


class PolicyLoss:
    """A named loss, or a recipe's own, with the settings that configuration gives it.

    Invariant: a setting that the named loss does not have is refused here, never dropped: also for
    a custom trainer, of which `config/rules_algorithm.py` does not know what it trains.
    """

    def __init__(self, algorithm: AlgorithmConfig, recipe_dir: Path) -> None:
        self.kl = algorithm.kl
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
        self._check(algorithm)

    def _check(self, algorithm: AlgorithmConfig) -> None:
        loss, aggregation = self.definition, algorithm.loss.aggregation
        may_rise = 1.0 if algorithm.entropy.target is not None else 0.0
        self.settings(algorithm.entropy.coefficient or may_rise)
        if loss.aggregation not in (None, aggregation):
            raise ConfigError(
                f"trainer.algorithm.loss.aggregation: {loss.name} is defined for "
                f"{loss.aggregation!r} only, got {aggregation!r}"
            )
        action = algorithm.correction.action
        if action != "none" and "correction" not in loss.optional:
            raise ConfigError(
                f"trainer.algorithm.correction.action: loss {loss.name!r} takes no correction, got "
                f"{action!r} (accepted: none)"
            )

    @property
    def uses_advantage(self) -> bool:
        """Whether rewards reach the loss at all; distillation of candidates does without."""
        return "advantage" in {*self.definition.required, *self.definition.optional}

    def settings(self, entropy_coefficient: float) -> dict[str, Setting]:
        """All settings of the loss; ConfigError on one that it does not have."""
        kl = self.kl
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


class EntropyBonus:
    """Coefficient of the entropy term as it moves: fixed, or driven to hold a target entropy.

    Invariant: without a target it is the one configured; with one it stays within
    [0, max(MAX_COEFFICIENT, the one configured)] and moves by `rate` after each batch, up when the
    batch's entropy is below the target and down when it is above (adaptive entropy
    control, Skywork-OR1 2025).
    """

    def __init__(self, config: EntropyConfig) -> None:
        self._config = config
        self._bound = max(MAX_COEFFICIENT, config.coefficient)
        self.coefficient = config.coefficient

    @property
    def adaptive(self) -> bool:
        """Whether it moves."""
        return self._config.target is not None

    def update(self, entropy: float) -> None:
        """Move the coefficient after a batch whose trained tokens had this mean entropy, in nats;
        one that is not a number, of a batch whose steps were skipped, says nothing."""
        target, rate = self._config.target, self._config.rate
        if target is None or entropy == target or math.isnan(entropy):
            return
        moved = self.coefficient + (rate if entropy < target else -rate)
        self.coefficient = min(max(moved, 0.0), self._bound)


class PolicySteps:
    """The policy's steps on one batch.

    Invariant: what is reported of a step holds at the weights that it started from.
    """

    def __init__(
        self,
        trainer: BatchedTrainer,
        loss: PolicyLoss,
        entropy: EntropyBonus,
        table: RowTable,
        columns: Mapping[str, Array],
        sums: MetricSums,
    ) -> None:
        """`columns` are [N, ...]; what is a mean over tokens goes into `sums`."""
        self._trainer = trainer
        self._loss = loss
        self._definition = loss.definition
        self._table = table
        self._columns = columns
        self._sums = sums
        self._settings: Settings = loss.settings(entropy.coefficient)
        self._inputs = loss.inputs(columns, self._settings)
        asked = ("logprobs", *loss.definition.outputs(self._settings))
        if entropy.adaptive:  # it is looked at also while its coefficient is 0
            asked = (*asked, "entropy")
        self._outputs = tuple(dict.fromkeys(asked))
        self._losses: defaultdict[str, list[float]] = defaultdict(list)

    async def run(self, plans: Sequence[StepPlan]) -> Outcome:
        """Make the planned steps; columns always hold `logprobs`."""
        if self._loss.own is not None:
            return await self._own(self._loss.own, plans)
        if self._definition.prepare is None:
            return await self._named(plans, self._inputs, self._settings)
        return Outcome.join([await self._prepared(plan) for plan in plans])

    def metrics(self, outcome: Outcome) -> dict[str, float]:
        """Those of the steps, and loss/<part>: policy, kl and entropy apart, weighted sums that add
        up to the loss (FR-040), and the bounds that `prepare` found, as means over the steps that
        were applied. kl/<estimator> and entropy over all trained tokens go into the sums.

        In the loss, KL is that of the weights trained; in the reward, that of the policy before
        the batch: what was used, each time.
        """
        kl, columns, trained = self._loss.kl, self._columns, self._table.mask
        if "reference_logprobs" in columns:
            in_reward = kl.placement == "reward"
            present = columns["proximal_logprobs"] if in_reward else outcome.columns["logprobs"]
            add_reference_kl(
                self._sums,
                present[trained].astype(np.float64),
                columns["reference_logprobs"][trained].astype(np.float64),
                kl.estimator,
            )
        if "entropy" in outcome.columns:
            self._sums.add_mean("entropy", outcome.columns["entropy"][trained])
        means = {f"loss/{name}": float(np.mean(found)) for name, found in self._losses.items()}
        return {**step_metrics(outcome), **means}

    async def _named(
        self, plans: Sequence[StepPlan], inputs: Mapping[str, Array], settings: Settings
    ) -> Outcome:
        loss = LossSpec(name=self._definition.name, config=settings)
        outcome = await self._trainer.run_steps(
            self._table, plans, inputs, loss, outputs=self._outputs
        )
        for step in outcome.steps:
            outputs, given = self._look(step, outcome, inputs, settings)
            if step.result.applied:
                for name, term in self._definition.parts(outputs, given, settings).items():
                    self._losses[name].append(sum_of_products(term, given["weight"]))
        return outcome

    def _look(
        self, step: StepOutcome, outcome: Outcome, inputs: Mapping[str, Array], settings: Settings
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """[n, ...] outputs and inputs at a step's trained tokens; counts their ratio/*."""
        at = step.plan.positions
        outputs, given = at_positions(at, outcome.columns), self._table.entries(at, inputs)
        add_ratio(self._sums, self._definition, outputs, given, settings)
        return outputs, given

    async def _prepared(self, plan: StepPlan) -> Outcome:
        """A step that first looks at all of its tokens under the weights that it starts from."""
        prepare, table, inputs = self._definition.prepare, self._table, dict(self._inputs)
        assert prepare is not None
        ids = {name: inputs[name] for name in (CANDIDATE_IDS,) if name in inputs}
        before = await self._trainer.forward_outputs(
            self._trainer.policy, table, plan.rows, self._outputs, ids
        )
        outputs = at_positions(plan.positions, before)
        prepared = prepare(outputs, table.entries(plan.positions, inputs), self._settings)
        for name, values in prepared.inputs.items():
            inputs[name] = np.zeros(table.num_tokens, np.float32)
            inputs[name][plan.positions] = values
        outcome = await self._named([plan], inputs, {**self._settings, **prepared.settings})
        for name, bound in prepared.settings.items():
            if isinstance(bound, float) and outcome.applied:
                self._losses[name].append(bound)
        return outcome

    async def _own(self, own: OwnLoss, plans: Sequence[StepPlan]) -> Outcome:
        import torch

        parts_of: list[dict[str, float]] = []

        def objective(plan: StepPlan, outputs: Mapping[str, Tensor]) -> Tensor:
            given = self._table.entries(plan.positions, self._inputs)
            inputs = {name: torch.from_numpy(array) for name, array in given.items()}
            parts = own.parts(outputs, inputs, self._settings)
            parts_of.append({name: float(part.detach()) for name, part in parts.items()})
            return torch.stack(list(parts.values())).sum()

        outcome = await self._trainer.run_client_steps(
            self._table, plans, objective, outputs=self._outputs
        )
        for step, parts in zip(outcome.steps, parts_of, strict=True):
            self._look(step, outcome, self._inputs, self._settings)
            if step.result.applied:
                for name, part in parts.items():
                    self._losses[name].append(part)
        return outcome
