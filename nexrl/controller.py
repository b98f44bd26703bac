"""The loop on one page as code: admission, rollouts, batches, training, weights, checkpoints.

    loader -> admit -> run_group -> end_rollout -> take -> train_batch -> sync -> activate
                 ^                                                                  |
                 +------------------------------------------------------------------+

Wires modules that never import each other, owns the order in which they start and stop, and does
no arithmetic. Synchronous training is asynchronous training with zero lookahead: there is one loop.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.activity.metric_sink import TRAIN_AXIS, VALIDATION_AXIS, MetricSink
from nexrl.checkpoint import CHECKPOINT_SCHEMA, CheckpointManifest, CheckpointStore
from nexrl.config.schema import RunConfig
from nexrl.data.data_loader import DataLoader
from nexrl.pool.trajectory_pool import TrajectoryPool
from nexrl.report.dump import DumpRecorder
from nexrl.report.live_view import LiveView
from nexrl.rollout.runner import RolloutRunner
from nexrl.rollout.validator import Validator
from nexrl.services.reward.protocol import RewardService
from nexrl.services.train.protocol import TrainService
from nexrl.trainer.trainer import Trainer
from nexrl.types import Batch, PolicyVersion, TokenRow
from nexrl.weight_sync.controller import WeightSyncController


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The modules of one stage, built and ready."""

    name: str
    """Name in the summary."""
    index: int
    """Position, from 0."""
    config: RunConfig
    """The whole configuration with the stage's overrides applied."""
    loader: DataLoader
    """Draws data items."""
    reward: RewardService | None
    """Judges what the runner and the validator draw; None when there is no reward function."""
    runner: RolloutRunner
    """Turns draws into rollout records."""
    pool: TrajectoryPool
    """Admits groups and hands out batches."""
    trainer: Trainer
    """Turns batches into gradients."""
    validator: Validator | None
    """Evaluates on held-out items; None when validation is off."""
    checkpoints: CheckpointStore
    """Where state is kept."""


@dataclass(slots=True, kw_only=True)
class StageResult:
    """What a stage did, for the summary."""

    name: str
    """Name of the stage."""
    steps: int = 0
    """Batches trained, those before a resume included."""
    validations: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each validation, in order."""
    stopped_early: str = ""
    """Why it ended before trainer.num_steps; empty when it did not."""


class Controller:
    """Runs stages one after another on the same services.

    Invariant: every batch handed out ends in exactly one publish; version numbers ascend by one;
    admission for a version opens only after every engine has acknowledged it.
    """

    def __init__(
        self,
        *,
        train: TrainService,
        weight_sync: WeightSyncController,
        tracker: ActivityTracker,
        sink: MetricSink,
        version: PolicyVersion,
        global_step: int = 0,
        view: LiveView | None = None,
        recorder: DumpRecorder | None = None,
        code_version: Mapping[str, Any] | None = None,
        resolved_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._train_service = train
        self._weight_sync = weight_sync
        self._tracker = tracker
        self._sink = sink
        self._version = version
        self._global_step = global_step
        self._view = view
        self._recorder = recorder
        self._code_version = dict(code_version or {})
        self._resolved_config = dict(resolved_config or {})

    @property
    def version(self) -> PolicyVersion:
        """The version that engines serve."""
        return self._version

    async def start(self) -> None:
        """Publish the present weights and make every engine serve them."""
        _collect_rarely()
        with self._tracker.activity("sync", f"start {self._version}"):
            await self._weight_sync.start(self._version)

    async def run_stage(self, stage: Stage, result: StageResult) -> None:
        """Train `trainer.num_steps` batches, or until data or the accuracy goal end the stage.

        Fills `result` as it goes, so that it is right also when an error ends the stage.
        """
        groups: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._tracker.watch(), name="watch")
                admit = asyncio.Event()
                admission = tasks.create_task(
                    self._admit_groups(stage, tasks, groups, admit), name="admission"
                )
                await self._train_batches(stage, result, admit)
                for task in (watch, admission, *groups):
                    task.cancel()
        finally:
            await self._close(stage)

    async def _admit_groups(
        self,
        stage: Stage,
        tasks: asyncio.TaskGroup,
        groups: set[asyncio.Task[None]],
        opened: asyncio.Event,
    ) -> None:
        """Consumes draws; produces running groups; waits for slots; woken by activation.

        Opens only after the validation before training, so that both never share an engine.
        """
        await opened.wait()
        while (draw := stage.loader.next_draw()) is not None:
            await stage.pool.admit(draw)
            run = stage.runner.run_group(draw, stage.pool.end_rollout)
            task = tasks.create_task(run, name=f"group {draw.key}")
            groups.add(task)
            task.add_done_callback(groups.discard)
        stage.pool.close_source()

    async def _train_batches(self, stage: Stage, result: StageResult, admit: asyncio.Event) -> None:
        """Consumes batches; produces versions; waits for the pool; woken by a full batch."""
        config = stage.config
        with self._tracker.activity("setup", f"trainer of {stage.name}"):
            await stage.trainer.setup()
        validate, num_steps = config.validate_, config.trainer.num_steps
        # A resume goes on after the validation and the checkpoint of its last batch.
        validated = result.steps > 0 and _is_due(validate.every_versions, result.steps)
        reached = False
        if validate.at_start and result.steps == 0:
            validated, reached = True, await self._reached(stage, result)
        if not reached:
            admit.set()
        while not reached and result.steps < num_steps:
            with self._tracker.activity("wait", "trainer waits for rollouts"):
                batch = await stage.pool.take(version=self._version.number)
            if batch is None:
                result.stopped_early = "the data source ended"
                break
            await self._train_one(stage, result, batch)
            validated = _is_due(validate.every_versions, result.steps)
            reached = validated and await self._reached(stage, result)
            if not reached and result.steps < num_steps:
                if _is_due(config.trainer.checkpoint.every_steps, result.steps):
                    await self._checkpoint(stage, result, done=False)
                stage.pool.activate(self._version.number)
        if reached and result.steps < num_steps:
            accuracy = result.validations[-1].get("validation/accuracy", 0.0)
            result.stopped_early = (
                f"validation/accuracy {accuracy:.3f} reached trainer.stop_at_accuracy"
            )
        if validate.at_end and not validated:
            await self._reached(stage, result)
        await self._checkpoint(stage, result, done=True)
        await stage.trainer.teardown()

    async def _train_one(self, stage: Stage, result: StageResult, batch: Batch) -> None:
        """One batch from hand-out to verified weights."""
        with self._tracker.activity("train", f"batch {batch.batch_id}"):
            report = await stage.trainer.train_batch(batch)
        following = self._version.next()
        with self._tracker.activity("sync", f"version {following}"):
            sync_metrics = await self._weight_sync.sync(
                following,
                probe_rows=_probe_rows(batch, stage.config.weight.num_canary_rows),
                unchanged=report.unchanged,
            )
        stage.pool.mark_trained(batch)
        stage.loader.mark_consumed(stage.pool.drain_settled())
        self._tracker.batch_trained(batch)
        self._version = following
        self._global_step += 1
        result.steps += 1
        metrics = {
            **stage.pool.metrics(),
            **report.metrics,  # the trainer knows best what it trained
            **sync_metrics,
            **self._tracker.flush(),
        }
        self._log(TRAIN_AXIS, stage, result, metrics)
        if self._recorder is not None:
            self._recorder.begin_step(self._global_step)

    def _log(
        self, axis: str, stage: Stage, result: StageResult, metrics: Mapping[str, float]
    ) -> None:
        self._sink.log(
            axis,
            self._global_step,
            metrics,
            policy=self._version.policy,
            version=str(self._version),
            stage=stage.name,
        )
        if self._view is not None:
            num_steps = stage.config.trainer.num_steps
            self._view.update(result.steps, metrics, stage=stage.name, num_steps=num_steps)

    async def _reached(self, stage: Stage, result: StageResult) -> bool:
        """Validate the served version; True when the stage's accuracy goal is met."""
        if stage.validator is None:
            return False
        with self._tracker.activity("validation", f"version {self._version}"):
            validation = await stage.validator.validate(self._version)
        result.validations.append(dict(validation.metrics))
        self._log(VALIDATION_AXIS, stage, result, validation.metrics)
        goal = stage.config.trainer.stop_at_accuracy
        return goal is not None and validation.metrics.get("validation/accuracy", 0.0) >= goal

    async def _checkpoint(self, stage: Stage, result: StageResult, *, done: bool) -> None:
        manifest = CheckpointManifest(
            schema=CHECKPOINT_SCHEMA,
            stage=stage.name,
            stage_index=stage.index,
            stage_step=result.steps,
            global_step=self._global_step,
            stage_done=done,
            version=str(self._version),
            fingerprint=stage.loader.fingerprint,
            config=self._resolved_config,
            code_version=self._code_version,
        )
        await stage.pool.flush()
        state = {
            "loader": stage.loader.state_dict(),
            "pool": stage.pool.state_dict(),
            "trainer": stage.trainer.state_dict(),
            "validations": result.validations,
            "stopped_early": result.stopped_early,
        }
        with self._tracker.activity("checkpoint", f"step {self._global_step}"):
            await stage.checkpoints.save(
                manifest,
                state,
                self._train_service,
                further_policies=() if done else stage.trainer.further_policies,
            )

    @staticmethod
    async def _close(stage: Stage) -> None:
        """Shutdown order: no new rollouts, then what judges them, the pool with its store, and the
        trainer; each whatever becomes of the others."""
        parts = (stage.runner, stage.validator, stage.reward, stage.pool, stage.trainer)
        async with AsyncExitStack() as stack:
            for part in reversed(parts):
                if part is not None:
                    stack.push_async_callback(part.aclose)


def _is_due(every: int, steps: int) -> bool:
    """Whether what happens every so many batches happens after this many; `every` 0 is never."""
    return every > 0 and steps % every == 0


def _collect_rarely() -> None:
    """Thousands of records a second come and go without a cycle among them, and what start-up made
    stays for ever: with the default thresholds a fifth of the loop's time goes into collections
    that look at all of it and find nothing. A batch of a thousand rollouts is 40,000 objects, so a
    bound well above that is reached by garbage alone."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)


def _probe_rows(batch: Batch, limit: int) -> list[TokenRow]:
    """One trained row from each of the first groups."""
    firsts = (
        next((r for t in group.trajectories for r in t.rows if r.num_tokens > 1), None)
        for group in batch.groups
    )
    return list(itertools.islice((row for row in firsts if row is not None), limit))
