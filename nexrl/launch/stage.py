"""Builds the modules of one stage from its configuration and the run's services.

The only place that knows which class implements which Protocol; the modules themselves are handed
everything through their constructors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.algorithms.filters import GROUP_FILTERS
from nexrl.checkpoint import CheckpointStore
from nexrl.config.loader import StageConfig
from nexrl.config.schema import RunConfig
from nexrl.config.user_code import load_user_object
from nexrl.controller import Stage
from nexrl.data.data_loader import DataLoader, create_validation_draws
from nexrl.pool.trajectory_pool import TrajectoryPool
from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.protocols import Evaluator, GroupFilter, Renderer
from nexrl.report.dump import DumpRecorder, recording
from nexrl.rollout.build import build_worker, to_sampling
from nexrl.rollout.prompts import PromptBuilder
from nexrl.rollout.rollout_worker import RolloutWorker, WorkerContext
from nexrl.rollout.runner import RolloutRunner
from nexrl.rollout.validator import Validator
from nexrl.services.inference.protocol import InferenceService
from nexrl.services.reward.local import load_reward_service
from nexrl.services.reward.protocol import RewardService
from nexrl.services.train.protocol import TrainService
from nexrl.trainer.build import build_trainer
from nexrl.trainer.trainer import TrainerContext
from nexrl.types import DEFAULT_POLICY, EngineInfo, PolicyVersion, Sampling

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
    version: PolicyVersion
    """What engines serve when the stage begins."""

    def recorded(self, service: T, kind: str) -> T:
        """The service, its messages recorded where debug.dump asks for them."""
        return service if self.recorder is None else recording(service, kind, self.recorder)


def build_stage(stage: StageConfig, index: int, around: StageSurroundings) -> Stage:
    """Every module of the stage; blocking (reads the data)."""
    config = stage.config
    prompts = PromptBuilder(around.renderer, config.rollout_worker, config.data)
    worker = _build_worker(
        config,
        around,
        to_sampling(config.rollout_worker.sampling),
        greedy_baseline=config.trainer.algorithm.greedy_baseline,
    )
    limit = config.data.max_prompt_tokens is not None
    reading: dict[str, Any] = {
        "recipe_dir": around.recipe_dir,
        "prompt_length": (lambda row: len(prompts.of_row(row).token_ids)) if limit else None,
        "needs_prompt": config.rollout_worker.type != "custom",
    }
    trainer = build_trainer(
        config.trainer,
        TrainerContext(
            train_service=around.recorded(around.train, "train"),
            config=config.trainer,
            tracker=around.tracker,
            policy=DEFAULT_POLICY,
            max_response_tokens=config.rollout_worker.sampling.max_tokens,
            on_policy_only=config.weight.mode == "sync",
            recipe_dir=around.recipe_dir,
        ),
        around.recipe_dir,
    )
    return Stage(
        name=stage.name,
        index=index,
        config=config,
        loader=DataLoader.open(config.data, seed=config.seed, **reading),
        runner=_build_runner(config, worker, around, stage.name),
        pool=_build_pool(config, around, needs=trainer.needs),
        trainer=trainer,
        validator=_build_validator(
            config,
            around,
            stage.name,
            reading,
            evaluator=trainer if isinstance(trainer, Evaluator) else None,
        ),
        checkpoints=CheckpointStore(
            around.checkpoints, keep_last=config.trainer.checkpoint.keep_last
        ),
    )


def _build_worker(
    config: RunConfig,
    around: StageSurroundings,
    sampling: Sampling,
    *,
    greedy_baseline: bool = False,
) -> RolloutWorker:
    context = WorkerContext(
        inference=around.recorded(around.inference, "inference"),
        renderer=around.renderer,
        reward=_build_reward(config, around),
        config=config.rollout_worker,
        data=config.data,
        sampling=sampling,
        policy=DEFAULT_POLICY,
        seed=config.seed,
        engine=f"{around.engine.name} {around.engine.build}",
        capabilities=around.engine.capabilities,
        greedy_baseline=greedy_baseline,
    )
    return build_worker(config.rollout_worker, context, around.recipe_dir)


def _build_reward(config: RunConfig, around: StageSurroundings) -> RewardService | None:
    worker = config.rollout_worker
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


def _build_runner(
    config: RunConfig, worker: RolloutWorker, around: StageSurroundings, stage: str
) -> RolloutRunner:
    settings = config.rollout_worker
    return RolloutRunner(
        worker,
        num_rollouts=config.data.rollout_repeat_n,
        deadline_s=settings.deadline_s,
        failure_policy=settings.failure_policy,
        max_concurrent=settings.max_concurrent,
        on_deadline=settings.on_deadline,
        run_id=f"{around.run_id}/{stage}",
        run_seed=config.seed,
        tracker=around.tracker,
    )


def _build_pool(
    config: RunConfig, around: StageSurroundings, *, needs: tuple[str, ...]
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
        first_version=around.version.number,
        incarnation=around.version.incarnation,
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
    stage: str,
    reading: Mapping[str, Any],
    *,
    evaluator: Evaluator | None,
) -> Validator | None:
    settings = config.validate_
    if not settings.enabled:
        return None
    draws = create_validation_draws(
        settings.sources, data=config.data, max_items=settings.max_items, **reading
    )
    # Training by supervision is still validated by what the model draws.
    worker = config.rollout_worker
    if worker.type == "supervised":
        worker = worker.model_copy(update={"type": "single_turn"})
        config = config.model_copy(update={"rollout_worker": worker})
    return Validator(
        _build_worker(config, around, to_sampling(settings.sampling)),
        draws,
        config=settings,
        run_id=f"{around.run_id}/{stage}",
        seed=config.seed,
        policy=DEFAULT_POLICY,
        tracker=around.tracker,
        evaluator=evaluator,
    )
