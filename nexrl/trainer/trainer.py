"""Trainer: a batch of trajectories in, metrics out. The second thing that a user may write.

Stands between the pool, which hands out batches, and the weight-sync controller, which publishes
what the train service holds afterwards. A subclass overrides `train`; `train_batch` is what the
controller calls.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nexrl.algorithms.schedule import learning_rate
from nexrl.config.schema import TrainerConfig
from nexrl.errors import InvariantError, NexRLError, UserCodeError, user_frame
from nexrl.protocols import Tracker
from nexrl.services.train.protocol import TrainService
from nexrl.trainer.blocking import BlockingTrainService
from nexrl.types import DEFAULT_POLICY, Batch, ModelSpec, OptimParams, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerContext:
    """What a trainer is given."""

    train_service: TrainService
    """Where gradients are computed."""
    config: TrainerConfig
    """The `trainer` section."""
    tracker: Tracker
    """Takes warnings and counts."""
    policy: str = DEFAULT_POLICY
    """Policy to train."""
    max_response_tokens: int = 0
    """Longest response allowed, in tokens: the denominator of the `constant` aggregation."""
    on_policy_only: bool = True
    """Whether the mode is `sync`: only then may rows without engine logprobs be trained by RL."""
    recipe_dir: Path = field(default_factory=Path.cwd)
    """Folder that paths of the user's own code are relative to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What a batch did."""

    metrics: Mapping[str, float]
    """By name; units in docs/trainer.md."""
    unchanged: bool
    """True when no optimizer step was applied, so the weights are those from before."""
    num_optimizer_steps: int
    """Optimizer steps applied."""


class Trainer:
    """Base of all trainers.

    Override `train`, as an ordinary function or `async`. An ordinary one runs in a thread of its
    own and reaches the service through `self.blocking`; an async one awaits `self.train_service`.

    Invariant: `train` runs for one batch at a time; `optimizer_step` counts the optimizer steps
    of the stage, skipped ones included, and is all that the learning rate depends on.

    Example:
        class MyTrainer(Trainer):
            needs = ("reward",)

            async def train(self, trajectories):
                chunk = ...
                await self.train_service.forward_backward(self.policy, chunk, LossSpec(name="ppo"))
                result = await self.train_service.optim_step(self.policy, self.next_optim_params())
                return {"grad_norm": result.grad_norm}
    """

    needs: tuple[str, ...] = ()
    """What each trajectory must have before it is ready: reward, greedy_reward, teacher ..."""

    def __init__(self, context: TrainerContext) -> None:
        self.train_service = context.train_service
        self.policy = context.policy
        self.config = context.config
        self.arguments: Mapping[str, Any] = context.config.arguments
        self.tracker = context.tracker
        self.blocking = BlockingTrainService(context.train_service, context.policy)
        self.optimizer_step = 0
        self.version = 0
        self._context = context
        self._restored = False
        self._thread: ThreadPoolExecutor | None = None

    @property
    def further_policies(self) -> tuple[ModelSpec, ...]:
        """Policies beside the trained one that `setup` makes and a checkpoint must hold: a frozen
        reference, a critic with its optimizer."""
        return ()

    async def setup(self) -> None:
        """Called once before the first batch of a stage, after `load_state_dict` on a resume.

        Makes `further_policies`; on a resume the checkpoint's are there already, and must be.
        """
        for spec in self.further_policies:
            if not self._restored:
                await self.train_service.create(spec)
                continue
            try:
                await self.train_service.info(spec.policy)
            except NexRLError as error:
                raise InvariantError(
                    f"resuming needs the {spec.policy} policy of the checkpoint, and the train "
                    f"service has none: {error}"
                ) from error

    async def teardown(self) -> None:
        """Called once when a stage has ended as it should, after its last checkpoint; a later stage
        makes policies of its own."""
        for spec in self.further_policies:
            await self.train_service.drop(spec.policy)

    def train(
        self, trajectories: list[Trajectory]
    ) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Train on one batch and return metrics by name."""
        raise NotImplementedError(f"{type(self).__name__} does not define train(trajectories)")

    async def train_batch(self, batch: Batch) -> TrainReport:
        """Train on one batch; an empty one leaves the weights unchanged.

        Raises UserCodeError with file and line when `train` raises anything of its own.
        """
        self.version = batch.version
        trajectories, metrics, num_steps = batch.trajectories, {}, 0
        if trajectories:
            before = await self.train_service.info(self.policy)
            _refuse_too_long(trajectories, before.max_positions)
            metrics = await self._call_train(trajectories)
            after = await self.train_service.info(self.policy)
            num_steps = after.optimizer_step - before.optimizer_step
        return TrainReport(
            metrics={**metrics, "train/trajectories": float(len(trajectories))},
            unchanged=num_steps == 0,
            num_optimizer_steps=num_steps,
        )

    @property
    def num_scheduled_steps(self) -> int:
        """Optimizer steps of the whole stage: where a falling learning rate ends."""
        return self.config.num_steps * self.config.num_optimizer_steps

    def next_optim_params(self) -> OptimParams:
        """Settings of the next optimizer step, which this counts."""
        settings = self.config.optimizer
        rate = learning_rate(
            self.optimizer_step,
            peak=settings.lr,
            warmup_steps=settings.warmup_steps,
            total_steps=self.num_scheduled_steps,
            schedule=settings.schedule,
            min_ratio=settings.min_lr_ratio,
        )
        self.optimizer_step += 1
        return OptimParams(
            lr=rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            grad_clip_norm=settings.grad_clip_norm,
        )

    def state_dict(self) -> dict[str, Any]:
        """What the train service does not keep itself."""
        return {"optimizer_step": self.optimizer_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.optimizer_step = int(state["optimizer_step"])
        self._restored = True

    async def aclose(self) -> None:
        """End what `train` waits for; idempotent. The train service is not ours to close."""
        self.blocking.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    async def _call_train(self, trajectories: list[Trajectory]) -> dict[str, float]:
        name = type(self).__name__
        try:
            if inspect.iscoroutinefunction(self.train):
                result = await self.train(trajectories)
            else:
                result = await self._train_in_thread(trajectories)
        except NexRLError:
            raise
        except Exception as error:
            raise UserCodeError(
                f"{name}.train raised {type(error).__name__}: {error} ({user_frame(error)})"
            ) from error
        return _checked_metrics(name, result)

    async def _train_in_thread(self, trajectories: list[Trajectory]) -> Any:
        """The thread is our own: a shared pool could be full of rollouts' blocking calls."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self.blocking.open()
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._thread, self.train, trajectories)
        finally:
            self.blocking.close()
        return await result if inspect.isawaitable(result) else result


BaseTrainer = Trainer


def _refuse_too_long(trajectories: Sequence[Trajectory], max_positions: int) -> None:
    """InvariantError that names the item of a row longer than the model takes."""
    for t in trajectories:
        longest = max(row.num_tokens for row in t.rows)
        if longest > max_positions:
            raise InvariantError(
                f"item {t.item_id!r} (trajectory {t.trajectory_id!r}) has a row of {longest} tokens, "
                f"the model takes at most {max_positions}; leave such items out with data.filter"
            )


def _checked_metrics(trainer: str, result: Any) -> dict[str, float]:
    """Metrics as floats; UserCodeError on anything else, InvariantError on a loss not finite."""
    if not isinstance(result, Mapping):
        raise UserCodeError(
            f"{trainer}.train must return a mapping of metric names to numbers, got "
            f"{type(result).__name__}"
        )
    metrics: dict[str, float] = {}
    for name, value in result.items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise UserCodeError(
                f"{trainer}.train returned metric {name!r} = {value!r}, which is not a number"
            ) from error
    broken = {n: v for n, v in metrics.items() if n.startswith("loss/") and not math.isfinite(v)}
    if broken:
        raise InvariantError(f"{trainer}: a loss is not finite: {broken}")
    return metrics
