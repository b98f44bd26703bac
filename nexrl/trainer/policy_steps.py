"""The policy's optimizer steps, in the three ways that losses ask for, and what each step did.

named loss        all steps under way at once
loss with prepare forward of the whole step, prepare, then the step; one after another
own loss          forward, autograd here, backward; one after another
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from nexrl.algorithms.loss_definition import LossDefinition, Settings
from nexrl.algorithms.metrics import MetricSums, add_ratio
from nexrl.algorithms.segments import sum_of_products
from nexrl.trainer.batched_trainer import BatchedTrainer, Outcome, StepOutcome, StepPlan
from nexrl.trainer.batching import RowTable
from nexrl.trainer.loss_columns import PolicyLoss, step_arrays
from nexrl.trainer.own_code import OwnLoss
from nexrl.types import CANDIDATE_IDS, Array, LossSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """An optimizer step seen from here: evaluated on numpy, float64, at the weights it used."""

    step: StepOutcome
    """Which one."""
    outputs: Mapping[str, Array]
    """[n, ...] what the model gave."""
    inputs: Mapping[str, Array]
    """[n, ...] what the loss was given, `row` and `trajectory` included."""
    settings: Settings
    """Those of this step."""
    found: Settings
    """Those among them that `prepare` found for this step."""
    parts: Mapping[str, float]
    """policy, kl and entropy apart: weighted sums that add up to the loss (FR-040)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What all three ways are given."""

    definition: LossDefinition
    table: RowTable
    plans: Sequence[StepPlan]
    inputs: Mapping[str, Array]
    settings: Settings
    outputs: tuple[str, ...]
    found: Settings


async def run_policy_steps(
    trainer: BatchedTrainer,
    loss: PolicyLoss,
    table: RowTable,
    plans: Sequence[StepPlan],
    columns: Mapping[str, Array],
    *,
    entropy_coefficient: float,
    with_entropy: bool,
) -> tuple[Outcome, list[StepView]]:
    """Make the planned steps; `columns` are [N, ...], `with_entropy` asks for it in any case.

    Outcome columns always hold `logprobs`.
    """
    settings = loss.settings(entropy_coefficient)
    asked = ("logprobs", *loss.definition.outputs(settings), *(("entropy",) * with_entropy))
    call = _Call(
        definition=loss.definition,
        table=table,
        plans=plans,
        inputs=loss.inputs(columns, settings),
        settings=settings,
        outputs=tuple(dict.fromkeys(asked)),
        found={},
    )
    if loss.own is not None:
        return await _own_steps(trainer, loss.own, call)
    if loss.definition.prepare is not None:
        return await _prepared_steps(trainer, call)
    return await _named_steps(trainer, call)


async def _named_steps(trainer: BatchedTrainer, call: _Call) -> tuple[Outcome, list[StepView]]:
    outcome = await trainer.run_steps(
        call.table,
        call.plans,
        call.inputs,
        LossSpec(name=call.definition.name, config=call.settings),
        outputs=call.outputs,
    )
    return outcome, [_view(step, outcome, call) for step in outcome.steps]


async def _prepared_steps(trainer: BatchedTrainer, call: _Call) -> tuple[Outcome, list[StepView]]:
    """Each step first looks at all of its tokens under the weights that it starts from."""
    prepare = call.definition.prepare
    assert prepare is not None
    outcomes: list[Outcome] = []
    views: list[StepView] = []
    ids = {name: call.inputs[name] for name in (CANDIDATE_IDS,) if name in call.inputs}
    for plan in call.plans:
        found = await trainer.forward_outputs(
            trainer.policy, call.table, plan.rows, call.outputs, ids
        )
        prepared = prepare(
            _at(found, plan), step_arrays(call.table, plan, call.inputs), call.settings
        )
        inputs = dict(call.inputs)
        for name, values in prepared.inputs.items():
            inputs[name] = np.zeros(call.table.num_tokens, np.float32)
            inputs[name][plan.positions] = values
        settings = {**call.settings, **prepared.settings}
        step = replace(
            call, plans=[plan], inputs=inputs, settings=settings, found=prepared.settings
        )
        outcome, seen = await _named_steps(trainer, step)
        outcomes.append(outcome)
        views += seen
    return Outcome.join(outcomes), views


async def _own_steps(
    trainer: BatchedTrainer, own: OwnLoss, call: _Call
) -> tuple[Outcome, list[StepView]]:
    import torch

    parts_of: list[dict[str, float]] = []

    def objective(plan: StepPlan, outputs: Mapping[str, Tensor]) -> Tensor:
        arrays = step_arrays(call.table, plan, call.inputs)
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        parts = own.parts(outputs, inputs, call.settings)
        parts_of.append({name: float(part.detach()) for name, part in parts.items()})
        return torch.stack(list(parts.values())).sum()

    outcome = await trainer.run_client_steps(
        call.table, call.plans, objective, outputs=call.outputs
    )
    views = [
        _view(step, outcome, call, parts)
        for step, parts in zip(outcome.steps, parts_of, strict=True)
    ]
    return outcome, views


def _at(columns: Mapping[str, Array], plan: StepPlan) -> dict[str, Array]:
    """[n, ...] float64 outputs at a step's trained tokens."""
    return {name: column[plan.positions].astype(np.float64) for name, column in columns.items()}


def _view(
    step: StepOutcome, outcome: Outcome, call: _Call, parts: Mapping[str, float] | None = None
) -> StepView:
    outputs = _at(outcome.columns, step.plan)
    inputs = step_arrays(call.table, step.plan, call.inputs)
    if parts is None:
        terms = call.definition.parts(outputs, inputs, call.settings)
        parts = {name: sum_of_products(term, inputs["weight"]) for name, term in terms.items()}
    return StepView(
        step=step,
        outputs=outputs,
        inputs=inputs,
        settings=call.settings,
        found=call.found,
        parts=parts,
    )


def step_view_metrics(
    definition: LossDefinition, views: Sequence[StepView], sums: MetricSums
) -> dict[str, float]:
    """loss/<part> as means over the steps that were applied, the bounds that `prepare` found, and
    ratio/* into `sums`."""
    found: dict[str, list[float]] = {}
    for view in views:
        add_ratio(sums, definition, view.outputs, view.inputs, view.settings)
        if not view.step.result.applied:
            continue
        for name, value in view.parts.items():
            found.setdefault(f"loss/{name}", []).append(value)
        for name, bound in view.found.items():
            if isinstance(bound, float):
                found.setdefault(f"loss/{name}", []).append(bound)
    return {name: float(np.mean(values)) for name, values in found.items()}
