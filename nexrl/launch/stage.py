"""Builds the modules of one stage from its configuration and the run's services.

The only place that knows which class implements which Protocol; the modules themselves are handed
everything through their constructors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.algorithms.filters import GROUP_FILTERS
from nexrl.checkpoint import CheckpointStore
from nexrl.config.loader import StageConfig
from nexrl.config.schema import RolloutWorkerConfig, RunConfig
from nexrl.config.user_code import load_user_object
from nexrl.controller import Stage
from nexrl.data.data_loader import DataLoader, create_validation_draws
from nexrl.pool.trajectory_pool import TrajectoryPool
from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.protocols import Evaluator, GroupFilter, Renderer
from nexrl.report.dump import DumpRecorder, recording
from nexrl.rollout.build import build_worker, to_sampling
from nexrl.rollout.prompts import PromptBuilder
from nexrl.rollout.rollout_worker import WorkerContext
from nexrl.rollout.runner import RolloutRunner
from nexrl.rollout.validator import Validator
from nexrl.services.inference.protocol import InferenceService
from nexrl.services.reward.local import load_reward_service
from nexrl.services.reward.protocol import RewardService
from nexrl.services.train.protocol import TrainService
from nexrl.trainer.build import build_trainer
from nexrl.trainer.trainer import Trainer, TrainerContext
from nexrl.types import DEFAULT_POLICY, EngineInfo, PolicyVersion

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSurroundings:
    """What all stages of a run share."""

    recipe_dir: Path
    """Folder that user paths are relative to."""
    run_id: str
    """Name of the run and its incarnation."""
    train: TrainService
    """Where gradients are computed."""
    inference: InferenceService
    """Where tokens are drawn."""
    engine: EngineInfo
    """What the engine said of itself at the start."""
    renderer: Renderer
    """Text to token ids and back."""
    store: TrajectoryStore | None
    """The durable record."""
    tracker: ActivityTracker
    """Takes activities, counts and warnings."""
    recorder: DumpRecorder | None
    """Records messages; None when debug.dump is off."""
    checkpoints: Path
    """Folder of the run's checkpoints."""

    def recorded(self, service: T, kind: str) -> T:
        """The service, its messages recorded where debug.dump asks for them."""
        return service if self.recorder is None else recording(service, kind, self.recorder)


def build_stage(
    stage: StageConfig, index: int, around: StageSurroundings, version: PolicyVersion
) -> Stage:
    """Every module of the stage, which begins when engines serve `version`; blocking (reads the
    data)."""
    config = stage.config
    settings = config.rollout_worker
    context = WorkerContext(
        inference=around.recorded(around.inference, "inference"),
        renderer=around.renderer,
        reward=_build_reward(settings, around),
        config=settings,
        data=config.data,
        sampling=to_sampling(settings.sampling),
        seed=config.seed,
        engine=f"{around.engine.name} {around.engine.build}",
        capabilities=around.engine.capabilities,
        greedy_baseline=config.trainer.algorithm.greedy_baseline,
    )
    prompts = PromptBuilder(around.renderer, settings, config.data)
    limit = config.data.max_prompt_tokens is not None
    reading: dict[str, Any] = {
        "recipe_dir": around.recipe_dir,
        "prompt_length": (lambda row: len(prompts.of_row(row).token_ids)) if limit else None,
        "needs_prompt": settings.type != "custom",
    }
    trainer = build_trainer(
        config.trainer,
        TrainerContext(
            train_service=around.recorded(around.train, "train"),
            config=config.trainer,
            tracker=around.tracker,
            max_response_tokens=settings.sampling.max_tokens,
            on_policy_only=config.weight.mode == "sync",
            recipe_dir=around.recipe_dir,
        ),
        around.recipe_dir,
    )
    run_id = f"{around.run_id}/{stage.name}"
    return Stage(
        name=stage.name,
        index=index,
        config=config,
        loader=DataLoader.open(config.data, seed=config.seed, **reading),
        reward=context.reward,
        runner=RolloutRunner(
            build_worker(context, around.recipe_dir),
            num_rollouts=config.data.rollout_repeat_n,
            run_id=run_id,
            run_seed=config.seed,
            tracker=around.tracker,
        ),
        pool=_build_pool(config, around, version, needs=trainer.needs),
        trainer=trainer,
        validator=_build_validator(config, around, context, reading, trainer, run_id),
        checkpoints=CheckpointStore(
            around.checkpoints, keep_last=config.trainer.checkpoint.keep_last
        ),
    )


def _build_reward(worker: RolloutWorkerConfig, around: StageSurroundings) -> RewardService | None:
    """One for training and validation: a reward model is loaded once."""
    if worker.reward is None:
        return None
    service = load_reward_service(
        worker.reward,
        recipe_dir=around.recipe_dir,
        arguments=worker.reward_arguments,
        isolation=worker.reward_isolation,
        deadline_s=worker.reward_deadline_s,
        num_workers=worker.num_reward_workers,
    )
    return around.recorded(service, "reward")


def _build_pool(
    config: RunConfig,
    around: StageSurroundings,
    version: PolicyVersion,
    *,
    needs: tuple[str, ...],
) -> TrajectoryPool:
    settings, dynamic = config.trajectory_pool, config.trajectory_pool.dynamic_sampling
    pool = TrajectoryPool(
        policy=DEFAULT_POLICY,
        batch_size=config.data.batch_size,
        rollout_repeat_n=config.data.rollout_repeat_n,
        mode=config.weight.mode,
        staleness_threshold=config.weight.staleness_threshold,
        hand_out=settings.hand_out,
        window=settings.window,
        on_bound=settings.on_bound,
        min_group_size=config.rollout_worker.failure_policy.min_group_size,
        filters=[_group_filter(name, around.recipe_dir) for name in dynamic.filters],
        refill_factor=dynamic.refill_factor,
        on_exhausted=dynamic.on_exhausted,
        needs=needs,
        store=around.store,
        store_on_error=settings.store.on_error,
        tracker=around.tracker,
        first_version=version.number,
        incarnation=version.incarnation,
        take_deadline_s=settings.take_deadline_s,
        allow_mixed_prompts=config.rollout_worker.type != "single_turn",
    )
    return around.recorded(pool, "pool")


def _group_filter(name: str, recipe_dir: Path) -> GroupFilter:
    if name in GROUP_FILTERS:
        return GROUP_FILTERS[name]
    loaded: GroupFilter = load_user_object(
        name, recipe_dir=recipe_dir, key="trajectory_pool.dynamic_sampling.filters"
    )
    return loaded


def _build_validator(
    config: RunConfig,
    around: StageSurroundings,
    training: WorkerContext,
    reading: Mapping[str, Any],
    trainer: Trainer,
    run_id: str,
) -> Validator | None:
    settings = config.validate_
    if not settings.enabled:
        return None
    draws = create_validation_draws(
        settings.sources, data=config.data, max_items=settings.max_items, **reading
    )
    worker = training.config
    if worker.type == "supervised":
        # Training by supervision is still validated by what the model draws.
        worker = worker.model_copy(update={"type": "single_turn"})
    context = replace(
        training,
        config=worker,
        sampling=to_sampling(settings.sampling),
        greedy_baseline=False,
    )
    return Validator(
        build_worker(context, around.recipe_dir),
        draws,
        config=settings,
        run_id=run_id,
        seed=config.seed,
        tracker=around.tracker,
        evaluator=trainer if isinstance(trainer, Evaluator) else None,
    )
