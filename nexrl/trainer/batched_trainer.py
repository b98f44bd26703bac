"""What the built-in trainers share: a batch as pipelined calls to the train service.

A subclass turns trajectories into columns; this sends them as chunks, one optimizer step after
another, every call submitted before the first returns, and judges what came back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nexrl.algorithms.aggregation import token_weights
from nexrl.algorithms.groups import IndexArray
from nexrl.errors import InvariantError
from nexrl.trainer.batching import Chunk, RowTable, make_chunks, split_by_group
from nexrl.trainer.client_loss import differentiate
from nexrl.trainer.trainer import Trainer
from nexrl.types import (
    OUTPUT_MASK,
    Array,
    BackwardOutput,
    FloatArray,
    ForwardOutput,
    LossSpec,
    OptimParams,
    OptimResult,
    Trajectory,
)

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step to come."""

    rows: IndexArray
    """Rows of the table that it trains."""
    positions: IndexArray
    """Positions of its trained tokens in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One optimizer step that was made."""

    plan: StepPlan
    """What it was to do."""
    loss: float
    """Weighted sum as the service differentiated it."""
    lr: float
    """Learning rate used."""
    result: OptimResult
    """What the optimizer did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All optimizer steps of a batch."""

    steps: list[StepOutcome]
    """In order."""
    columns: dict[str, FloatArray]
    """[N, ...] outputs by name at trained tokens of the table, each at the weights it was trained
    with; empty when there was no step."""

    @property
    def applied(self) -> list[StepOutcome]:
        """Steps whose gradient was finite."""
        return [step for step in self.steps if step.result.applied]

    @classmethod
    def join(cls, parts: Sequence[Outcome]) -> Outcome:
        """Outcomes of different optimizer steps over one table, as one."""
        columns: dict[str, FloatArray] = {}
        for part in parts:
            for name, values in part.columns.items():
                for step in part.steps:
                    at = step.plan.positions
                    columns.setdefault(name, np.zeros_like(values))[at] = values[at]
        return cls(steps=[step for part in parts for step in part.steps], columns=columns)


class BatchedTrainer(Trainer):
    """Base of trainers that send one named loss over all rows of a batch.

    Invariant: the weights of one optimizer step's trained tokens are fixed before its first chunk
    is sent, so how rows are split into chunks never changes the gradient.
    """

    def plan_steps(self, table: RowTable, trajectories: Sequence[Trajectory]) -> list[StepPlan]:
        """Optimizer steps by rollout groups; a step without a trained token is left out."""
        parts = split_by_group(trajectories, self.config.num_optimizer_steps)
        part_of = np.full(len(trajectories), -1)
        for number, part in enumerate(parts):
            part_of[part] = number
        row_parts = part_of[table.trajectories]
        token_parts = np.where(table.mask, table.spread(row_parts), -1)
        plans = (
            StepPlan(
                rows=np.flatnonzero(row_parts == number),
                positions=np.flatnonzero(token_parts == number),
            )
            for number in range(len(parts))
        )
        return [plan for plan in plans if len(plan.positions)]

    def weight_column(self, table: RowTable, plans: Sequence[StepPlan]) -> FloatArray:
        """[N] loss weight: 1 / denominator of the token's optimizer step, 0 where not trained."""
        per_row = np.zeros(table.num_rows)
        for plan in plans:
            per_row[plan.rows] = token_weights(
                table.num_trained[plan.rows],
                table.trajectories[plan.rows],
                self.config.algorithm.loss.aggregation,
                max_response_tokens=self._context.max_response_tokens,
            )
        return (table.spread(per_row) * table.mask).astype(np.float32)

    async def forward_outputs(
        self,
        policy: str,
        table: RowTable,
        rows: IndexArray,
        outputs: tuple[str, ...],
        inputs: Mapping[str, Array] | None = None,
    ) -> dict[str, FloatArray]:
        """[N, ...] outputs by name at trained tokens of the given rows under the present weights,
        0 elsewhere, in the type that the service gives them; `inputs` are further [N, ...] columns
        that an output needs."""
        chunks = make_chunks(
            table,
            rows,
            {OUTPUT_MASK: table.mask, **(inputs or {})},
            max_chunk_bytes=self.config.max_chunk_bytes,
        )
        answers: list[ForwardOutput] = await in_flight(
            [self.train_service.forward(policy, chunk.rows, outputs=outputs) for chunk in chunks]
        )
        columns: dict[str, FloatArray] = {}
        for name in outputs:
            found = [answer.outputs[name] for answer in answers]
            shape = found[0].shape[1:] if found else ()
            dtype = found[0].dtype if found else np.float32
            columns[name] = np.zeros((table.num_tokens, *shape), dtype)
            for chunk, values in zip(chunks, found, strict=True):
                columns[name][chunk.positions] = values
        return columns

    async def forward_column(self, policy: str, table: RowTable, rows: IndexArray) -> FloatArray:
        """[N] logprobs of trained tokens of the given rows under the present weights, 0 elsewhere."""
        return (await self.forward_outputs(policy, table, rows, ("logprobs",)))["logprobs"]

    async def run_steps(
        self,
        table: RowTable,
        plans: Sequence[StepPlan],
        inputs: Mapping[str, Array],
        loss: LossSpec,
        *,
        outputs: tuple[str, ...] = ("logprobs",),
        policy: str | None = None,
        next_params: Callable[[], OptimParams] | None = None,
    ) -> Outcome:
        """Every chunk's forward_backward and every optim_step, in order and all under way at once.

        `policy` and `next_params` are those of another policy than the trained one. Raises
        InvariantError when a gradient is not finite, unless configured to skip the step.
        """
        policy, next_params = policy or self.policy, next_params or self.next_optim_params
        inputs = {**inputs, OUTPUT_MASK: table.mask}
        chunks_of = [
            make_chunks(table, plan.rows, inputs, max_chunk_bytes=self.config.max_chunk_bytes)
            for plan in plans
        ]
        params = [next_params() for _ in plans]
        calls: list[Coroutine[Any, Any, Any]] = []
        for chunks, settings in zip(chunks_of, params, strict=True):
            calls += [
                self.train_service.forward_backward(policy, c.rows, loss, outputs=outputs)
                for c in chunks
            ]
            calls.append(self.train_service.optim_step(policy, settings))
        answers = iter(await in_flight(calls))
        columns: dict[str, FloatArray] = {}
        steps = [
            StepOutcome(
                plan=plan,
                loss=sum(
                    _collect(chunk, next(answers), outputs, columns, table.num_tokens)
                    for chunk in chunks
                ),
                lr=settings.lr,
                result=next(answers),
            )
            for plan, chunks, settings in zip(plans, chunks_of, params, strict=True)
        ]
        self._refuse_nonfinite(policy, steps)
        return Outcome(steps=steps, columns=columns)

    async def run_client_steps(
        self,
        table: RowTable,
        plans: Sequence[StepPlan],
        objective: Callable[[StepPlan, Mapping[str, Tensor]], Tensor],
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> Outcome:
        """Optimizer steps of a loss that is computed here (`client_loss.py`).

        `objective` gets the step's plan and the outputs [n, ...] at `plan.positions`, in float64
        with gradients, and returns a scalar; only its gradients are sent. Each step waits for its
        own forward pass, so steps are not pipelined.
        """
        columns: dict[str, FloatArray] = {}
        steps: list[StepOutcome] = []
        for plan in plans:
            found = await self.forward_outputs(self.policy, table, plan.rows, outputs)
            at = plan.positions
            loss, gradients = differentiate(
                partial(objective, plan), {name: values[at] for name, values in found.items()}
            )
            spread = {name: np.zeros_like(values) for name, values in found.items()}
            for name, values in found.items():
                spread[name][at] = gradients[name]
                columns.setdefault(name, np.zeros_like(values))[at] = values[at]
            settings = self.next_optim_params()
            result = await self._step_from(table, plan, spread, settings)
            steps.append(StepOutcome(plan=plan, loss=loss, lr=settings.lr, result=result))
        self._refuse_nonfinite(self.policy, steps)
        return Outcome(steps=steps, columns=columns)

    async def _step_from(
        self,
        table: RowTable,
        plan: StepPlan,
        gradients: Mapping[str, FloatArray],
        settings: OptimParams,
    ) -> OptimResult:
        """One optimizer step from gradients [N, ...] of outputs; none when one is not finite."""
        if not all(np.isfinite(gradient).all() for gradient in gradients.values()):
            taken = (await self.train_service.info(self.policy)).optimizer_step
            return OptimResult(grad_norm=math.nan, applied=False, optimizer_step=taken)
        chunks = make_chunks(  # gradients count among what fills a chunk
            table, plan.rows, gradients, max_chunk_bytes=self.config.max_chunk_bytes
        )
        calls: list[Coroutine[Any, Any, Any]] = [
            self.train_service.backward(
                self.policy, replace(chunk.rows, inputs={}), chunk.rows.inputs
            )
            for chunk in chunks
        ]
        calls.append(self.train_service.optim_step(self.policy, settings))
        result: OptimResult = (await in_flight(calls))[-1]
        return result

    def _refuse_nonfinite(self, policy: str, steps: Sequence[StepOutcome]) -> None:
        for number, step in enumerate(steps):
            if step.result.applied:
                continue
            self.tracker.count("optimizer/skipped_total")
            if self.config.on_nonfinite_gradient == "stop":
                raise InvariantError(
                    f"{type(self).__name__}: the gradient of policy {policy!r} in optimizer step "
                    f"{number + 1} of {len(steps)} in batch version {self.version} is not finite (grad_norm "
                    f"{step.result.grad_norm}, loss {step.loss}); the step was not applied. "
                    "trainer.on_nonfinite_gradient: skip would leave such steps out"
                )


def _collect(
    chunk: Chunk,
    answer: BackwardOutput,
    outputs: tuple[str, ...],
    columns: dict[str, FloatArray],
    num_tokens: int,
) -> float:
    """Put a chunk's outputs into the table's [N, ...] columns; returns its loss."""
    for name in outputs:
        values = answer.outputs[name]
        if name not in columns:
            columns[name] = np.zeros((num_tokens, *values.shape[1:]), np.float32)
        columns[name][chunk.positions] = values
    return answer.loss


def step_metrics(outcome: Outcome) -> dict[str, float]:
    """loss/total, grad_norm, lr and the count of skipped steps."""
    if not outcome.steps:
        return {}
    applied = outcome.applied
    metrics = {
        "lr": outcome.steps[-1].lr,
        "optimizer/skipped": float(len(outcome.steps) - len(applied)),
        "train/tokens": float(sum(len(step.plan.positions) for step in outcome.steps)),
    }
    if applied:
        metrics["loss/total"] = float(np.mean([step.loss for step in applied]))
        metrics["grad_norm"] = float(np.mean([step.result.grad_norm for step in applied]))
    return metrics


async def in_flight(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Start all calls in order, then return their results in that order.

    The next call starts before the last returns, so the wire and the trainer's own work hide behind
    the service's compute; calls on one policy take effect in the order they were started.
    The first failure is raised as it is; the other calls are cancelled and have ended by then.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
