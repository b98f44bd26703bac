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
from nexrl.errors import InvariantError, UserCodeError
from nexrl.trainer.batching import Chunk, RowTable, make_chunks, split_by_group
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
    with; 0 where there was no step."""

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
        chunks = self._chunks(table, rows, {OUTPUT_MASK: table.mask, **(inputs or {})})
        answers = await in_flight(
            [self.train_service.forward(policy, chunk.rows, outputs=outputs) for chunk in chunks]
        )
        return _columns(table, outputs, list(zip(chunks, answers, strict=True)))

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
        chunks_of = [self._chunks(table, plan.rows, inputs) for plan in plans]
        params = [next_params() for _ in plans]
        calls: list[Coroutine[Any, Any, Any]] = []
        for chunks, settings in zip(chunks_of, params, strict=True):
            calls += [
                self.train_service.forward_backward(policy, c.rows, loss, outputs=outputs)
                for c in chunks
            ]
            calls.append(self.train_service.optim_step(policy, settings))
        answers = iter(await in_flight(calls))
        steps: list[StepOutcome] = []
        trained: list[tuple[Chunk, BackwardOutput]] = []
        for plan, chunks, settings in zip(plans, chunks_of, params, strict=True):
            found = [(chunk, next(answers)) for chunk in chunks]
            loss_sum = sum(answer.loss for _, answer in found)
            result = next(answers)
            steps.append(StepOutcome(plan=plan, loss=loss_sum, lr=settings.lr, result=result))
            trained += found
        self._refuse_nonfinite(policy, steps)
        return Outcome(steps=steps, columns=_columns(table, outputs, trained))

    async def run_client_steps(
        self,
        table: RowTable,
        plans: Sequence[StepPlan],
        objective: Callable[[StepPlan, Mapping[str, Tensor]], Tensor],
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> Outcome:
        """Optimizer steps of a loss that is computed here, at the cost of a second forward pass.

        `objective` gets the step's plan and the outputs [n, ...] at `plan.positions`, in float64
        with gradients, and returns a scalar. Only gradients of outputs are sent, so it works on
        every train service, and may couple rows of different calls (pairs, batch statistics). Each
        step waits for its own forward pass, so steps are not pipelined.
        """
        outcome = Outcome.join(
            [await self._client_step(table, plan, objective, outputs) for plan in plans]
        )
        self._refuse_nonfinite(self.policy, outcome.steps)
        return outcome

    async def _client_step(
        self,
        table: RowTable,
        plan: StepPlan,
        objective: Callable[[StepPlan, Mapping[str, Tensor]], Tensor],
        outputs: tuple[str, ...],
    ) -> Outcome:
        """A gradient that is not finite is not sent, and the step not made."""
        columns = await self.forward_outputs(self.policy, table, plan.rows, outputs)
        at, gradients = plan.positions, {name: np.zeros_like(c) for name, c in columns.items()}
        loss, found = differentiate(
            partial(objective, plan), {name: values[at] for name, values in columns.items()}
        )
        for name, values in found.items():
            gradients[name][at] = values
        params = self.next_optim_params()
        if all(np.isfinite(gradient).all() for gradient in gradients.values()):
            calls: list[Coroutine[Any, Any, Any]] = [
                self.train_service.backward(
                    self.policy, replace(chunk.rows, inputs={}), chunk.rows.inputs
                )
                for chunk in self._chunks(table, plan.rows, gradients)  # they fill a chunk too
            ]
            calls.append(self.train_service.optim_step(self.policy, params))
            result: OptimResult = (await in_flight(calls))[-1]
        else:
            taken = (await self.train_service.info(self.policy)).optimizer_step
            result = OptimResult(grad_norm=math.nan, applied=False, optimizer_step=taken)
        step = StepOutcome(plan=plan, loss=loss, lr=params.lr, result=result)
        return Outcome(steps=[step], columns=columns)

    def _chunks(
        self, table: RowTable, rows: IndexArray, inputs: Mapping[str, Array]
    ) -> list[Chunk]:
        return make_chunks(table, rows, inputs, max_chunk_bytes=self.config.max_chunk_bytes)

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


def _columns(
    table: RowTable,
    names: Sequence[str],
    answers: Sequence[tuple[Chunk, ForwardOutput | BackwardOutput]],
) -> dict[str, FloatArray]:
    """[N, ...] outputs by name at the tokens of the chunks that were answered, 0 elsewhere."""
    columns: dict[str, FloatArray] = {}
    for name in names:
        like = answers[0][1].outputs[name] if answers else np.zeros(0, np.float32)
        columns[name] = np.zeros((table.num_tokens, *like.shape[1:]), like.dtype)
        for chunk, answer in answers:
            columns[name][chunk.positions] = answer.outputs[name]
    return columns


def differentiate(
    objective: Callable[[Mapping[str, Tensor]], Tensor], outputs: Mapping[str, FloatArray]
) -> tuple[float, dict[str, FloatArray]]:
    """The value of a scalar function of outputs [n, ...], and its gradient by each of them: taken
    in float64, returned as float32.

    An output that the objective does not use has gradient 0. Raises UserCodeError when the result
    is no scalar.
    """
    import torch

    tensors = {
        name: torch.tensor(np.asarray(values, np.float64), requires_grad=True)
        for name, values in outputs.items()
    }
    with torch.enable_grad():
        value = objective(tensors)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise UserCodeError(f"a client-side loss must return a scalar tensor, got {found}")
    if value.requires_grad:
        value.sum().backward()  # type: ignore[no-untyped-call]
    gradients: dict[str, FloatArray] = {
        name: np.zeros(tensor.shape, np.float32)
        if tensor.grad is None
        else tensor.grad.numpy().astype(np.float32)
        for name, tensor in tensors.items()
    }
    return float(value.detach().sum()), gradients


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
