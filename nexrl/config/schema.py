"""RunConfig: every setting there is, typed, bounded and described.

Names carry units; a field's description is the sentence that the configuration reference prints.
Cross-field rules live in `rules.py`; YAML, inheritance and overrides in `loader.py`. The groups of
settings are in `schema_rollout.py`, `schema_trainer.py` and `schema_service.py`; import all from here (`as` says
so to the type checker).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from nexrl.config.schema_algorithm import (
    AdvantageConfig as AdvantageConfig,
)
from nexrl.config.schema_algorithm import (
    AlgorithmConfig as AlgorithmConfig,
)
from nexrl.config.schema_algorithm import (
    CorrectionConfig as CorrectionConfig,
)
from nexrl.config.schema_algorithm import (
    CriticConfig as CriticConfig,
)
from nexrl.config.schema_algorithm import (
    EntropyConfig as EntropyConfig,
)
from nexrl.config.schema_algorithm import (
    KLConfig as KLConfig,
)
from nexrl.config.schema_algorithm import (
    LossConfig as LossConfig,
)
from nexrl.config.schema_algorithm import (
    PreferenceConfig as PreferenceConfig,
)
from nexrl.config.schema_algorithm import (
    ShapingConfig as ShapingConfig,
)
from nexrl.config.schema_algorithm import (
    TeacherConfig as TeacherConfig,
)
from nexrl.config.schema_rollout import (
    DataConfig as DataConfig,
)
from nexrl.config.schema_rollout import (
    DynamicSamplingConfig as DynamicSamplingConfig,
)
from nexrl.config.schema_rollout import (
    FailurePolicyConfig as FailurePolicyConfig,
)
from nexrl.config.schema_rollout import (
    RolloutWorkerConfig as RolloutWorkerConfig,
)
from nexrl.config.schema_rollout import (
    SamplingConfig as SamplingConfig,
)
from nexrl.config.schema_rollout import (
    SourceConfig as SourceConfig,
)
from nexrl.config.schema_rollout import (
    StoreConfig as StoreConfig,
)
from nexrl.config.schema_rollout import (
    TrajectoryPoolConfig as TrajectoryPoolConfig,
)
from nexrl.config.schema_service import (
    InferenceServiceConfig as InferenceServiceConfig,
)
from nexrl.config.schema_service import (
    ServiceConfig as ServiceConfig,
)
from nexrl.config.schema_service import (
    TrainServiceConfig as TrainServiceConfig,
)
from nexrl.config.schema_trainer import (
    CheckpointConfig as CheckpointConfig,
)
from nexrl.config.schema_trainer import (
    OptimizerConfig as OptimizerConfig,
)
from nexrl.config.schema_trainer import (
    TrainerConfig as TrainerConfig,
)
from nexrl.config.schema_trainer import (
    ValidateConfig as ValidateConfig,
)
from nexrl.config.schema_trainer import (
    ValidationSamplingConfig as ValidationSamplingConfig,
)
from nexrl.config.schema_trainer import (
    WeightConfig as WeightConfig,
)
from nexrl.config.section import Section as Section


class LaunchConfig(Section):
    """Where things run."""

    mode: Literal["local"] = Field(
        "local",
        description="`local`: services as supervised child processes on loopback, or in process.",
    )
    run_root: str = Field(
        "runs",
        description="Folder under which run folders are made; relative to the working directory.",
    )
    shutdown_deadline_s: float = Field(
        10.0, gt=0, description="Seconds for services to end before they are killed."
    )


class DumpConfig(Section):
    """A record of every message that crosses a Protocol."""

    kinds: tuple[Literal["inference", "train", "reward", "pool", "weights"], ...] = Field(
        (), description="Which Protocols to record; empty is off."
    )
    every_steps: int = Field(
        1, ge=1, description="Record batches whose number is a multiple of this."
    )


class DebugConfig(Section):
    """For finding faults."""

    dump: DumpConfig = Field(
        DumpConfig(), description="A record of every message that crosses a Protocol."
    )


class ExceptionHandlingConfig(Section):
    """How much failure a run bears."""

    policy: Literal["stop_on_error", "stop_on_critical", "continue"] = Field(
        "stop_on_critical",
        description="stop_on_error: at the first user-code or exhausted infrastructure failure; stop_on_critical: past max_failure_rate; broken invariants always stop.",
    )
    max_failure_rate: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of failed rollouts among the last failure_window that stops a run.",
    )
    failure_window: int = Field(
        64,
        ge=1,
        description="Rollouts over which the failure rate is measured; no verdict before that many have ended.",
    )


class RuntimeMonitorConfig(Section):
    """Health, progress and the terminal."""

    exception_handling: ExceptionHandlingConfig = Field(
        ExceptionHandlingConfig(), description="How much failure a run bears."
    )
    no_progress_s: float = Field(
        900.0,
        gt=0,
        description="Seconds without any finished activity after which the run stops and names who holds it.",
    )
    live: Literal["auto", "rich", "plain", "off"] = Field(
        "auto", description="Terminal view; auto is rich on a terminal and plain lines elsewhere."
    )
    plain_every_s: float = Field(5.0, ge=0, description="Seconds between plain lines.")


class RunConfig(Section):
    """A whole run."""

    project_name: str = Field("nexrl", description="Project, for trackers.")
    experiment_name: str = Field(
        "experiment",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Names the run folder: <run_root>/<experiment_name>/<time>.",
    )
    seed: int = Field(0, ge=0, description="Seed of everything random.")
    deterministic: bool = Field(
        False,
        description="Same bits for the same seed, whatever order requests arrive in; slower (docs/determinism.md).",
    )
    logger: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        ("tensorboard",), description="Trackers beside metrics.jsonl, which is always written."
    )
    resume: str | None = Field(
        None,
        description="Run folder to continue, or `latest` for the newest one of this experiment.",
    )
    data: DataConfig = Field(DataConfig(), description="Where data items come from.")
    rollout_worker: RolloutWorkerConfig = Field(
        RolloutWorkerConfig(), description="How a data item becomes a trajectory."
    )
    trajectory_pool: TrajectoryPoolConfig = Field(
        TrajectoryPoolConfig(), description="Admission, groups, freshness and hand-out."
    )
    trainer: TrainerConfig = Field(TrainerConfig(), description="How a batch is trained.")
    weight: WeightConfig = Field(
        WeightConfig(), description="Policy versions on their way to engines."
    )
    validate_: ValidateConfig = Field(
        ValidateConfig(), alias="validate", description="Held-out evaluation."
    )
    service: ServiceConfig = Field(ServiceConfig(), description="The services a run uses.")
    launch: LaunchConfig = Field(LaunchConfig(), description="Where things run.")
    debug: DebugConfig = Field(DebugConfig(), description="For finding faults.")
    runtime_monitor: RuntimeMonitorConfig = Field(
        RuntimeMonitorConfig(), description="Health, progress and the terminal."
    )
    stages: tuple[dict[str, Any], ...] = Field(
        (),
        description="Named overrides run one after another, each starting from the weights of the last; each needs a `name`.",
    )
