"""What the built-in trainers share: a batch as pipelined calls to the train service.

A subclass turns trajectories into columns; this sends them as chunks, one optimizer step after
another, every call submitted before the first returns, and judges what came back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from nexrl.algorithms.advantages import IndexArray
from nexrl.algorithms.aggregation import token_weights
from nexrl.errors import InvariantError
from nexrl.trainer.batching import Chunk, RowTable, make_chunks, split_by_group
from nexrl.trainer.trainer import Trainer
from nexrl.types import (
    OUTPUT_MASK,
    Array,
    BackwardOutput,
    FloatArray,
    ForwardOutput,
    LossSpec,
    OptimResult,
    Trajectory,
)

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
    """[N] outputs by name at trained tokens of the table, each at the weights it was trained with."""

    @property
    def applied(self) -> list[StepOutcome]:
        """Steps whose gradient was finite."""
        return [step for step in self.steps if step.result.applied]


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

    async def forward_column(self, policy: str, table: RowTable, rows: IndexArray) -> FloatArray:
        """[N] logprobs of trained tokens of the given rows under the present weights, 0 elsewhere."""
        chunks = make_chunks(
            table,
            rows,
            {OUTPUT_MASK: table.mask},
            max_chunk_bytes=self.config.max_chunk_bytes,
        )
        outputs: list[ForwardOutput] = await in_flight(
            [self.train_service.forward(policy, chunk.rows) for chunk in chunks]
        )
        column = np.zeros(table.num_tokens, np.float32)
        for chunk, output in zip(chunks, outputs, strict=True):
            column[chunk.positions] = output.outputs["logprobs"]
        return column

    async def run_steps(
        self,
        table: RowTable,
        plans: Sequence[StepPlan],
        inputs: Mapping[str, Array],
        loss: LossSpec,
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> Outcome:
        """Every chunk's forward_backward and every optim_step, in order and all under way at once.

        Raises InvariantError when a gradient is not finite, unless configured to skip the step.
        """
        inputs = {**inputs, OUTPUT_MASK: table.mask}
        chunks_of = [
            make_chunks(table, plan.rows, inputs, max_chunk_bytes=self.config.max_chunk_bytes)
            for plan in plans
        ]
        params = [self.next_optim_params() for _ in plans]
        calls: list[Coroutine[Any, Any, Any]] = []
        for chunks, settings in zip(chunks_of, params, strict=True):
            calls += [
                self.train_service.forward_backward(self.policy, c.rows, loss, outputs=outputs)
                for c in chunks
            ]
            calls.append(self.train_service.optim_step(self.policy, settings))
        answers = iter(await in_flight(calls))
        columns = {name: np.zeros(table.num_tokens, np.float32) for name in outputs}
        steps = [
            StepOutcome(
                plan=plan,
                loss=sum(_collect(chunk, next(answers), columns) for chunk in chunks),
                lr=settings.lr,
                result=next(answers),
            )
            for plan, chunks, settings in zip(plans, chunks_of, params, strict=True)
        ]
        self._refuse_nonfinite(steps)
        return Outcome(steps=steps, columns=columns)

    def _refuse_nonfinite(self, steps: Sequence[StepOutcome]) -> None:
        for number, step in enumerate(steps):
            if step.result.applied:
                continue
            self.tracker.count("optimizer/skipped_total")
            if self.config.on_nonfinite_gradient == "stop":
                raise InvariantError(
                    f"{type(self).__name__}: the gradient of optimizer step {number + 1} of "
                    f"{len(steps)} in batch version {self.version} is not finite (grad_norm "
                    f"{step.result.grad_norm}, loss {step.loss}); the step was not applied. "
                    "trainer.on_nonfinite_gradient: skip would leave such steps out"
                )


def _collect(chunk: Chunk, output: BackwardOutput, columns: Mapping[str, FloatArray]) -> float:
    """Put a chunk's outputs into the table's columns; returns its loss."""
    for name, column in columns.items():
        column[chunk.positions] = output.outputs[name]
    return output.loss


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
