"""RunConfig: every setting there is, typed, bounded and described.

Names carry units; the docstring below a field is its sentence in the configuration reference, and a
section without one has that of its class. Rules between keys live in `rules.py`; YAML, inheritance
and overrides in `loader.py`. The larger groups of settings are in `schema_*.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from nexrl.config.schema_algorithm import AdvantageConfig, AlgorithmConfig, PreferenceConfig
from nexrl.config.schema_rollout import (
    DataConfig,
    FailurePolicyConfig,
    RolloutWorkerConfig,
    SamplingConfig,
    SourceConfig,
    TrajectoryPoolConfig,
)
from nexrl.config.schema_service import InferenceServiceConfig, ServiceConfig, TrainServiceConfig
from nexrl.config.schema_trainer import TrainerConfig, ValidateConfig, WeightConfig
from nexrl.config.section import Section

__all__ = [
    "AdvantageConfig",
    "AlgorithmConfig",
    "DataConfig",
    "ExceptionHandlingConfig",
    "FailurePolicyConfig",
    "InferenceServiceConfig",
    "PreferenceConfig",
    "RolloutWorkerConfig",
    "RunConfig",
    "RuntimeMonitorConfig",
    "SamplingConfig",
    "Section",
    "SourceConfig",
    "TrainServiceConfig",
    "TrainerConfig",
    "TrajectoryPoolConfig",
    "ValidateConfig",
    "WeightConfig",
]


class LaunchConfig(Section):
    """Where things run."""

    mode: Literal["local"] = "local"
    """`local`: services as supervised child processes on loopback, or in process."""
    run_root: str = "runs"
    """Folder under which run folders are made; relative to the working directory."""
    shutdown_deadline_s: float = Field(10.0, gt=0)
    """Seconds for services to end before they are killed."""


class DumpConfig(Section):
    """A record of every message that crosses a Protocol."""

    kinds: tuple[Literal["inference", "train", "reward", "pool", "weights"], ...] = ()
    """Which Protocols to record; empty is off."""
    every_steps: int = Field(1, ge=1)
    """Record batches whose number is a multiple of this."""


class DebugConfig(Section):
    """For finding faults."""

    dump: DumpConfig = DumpConfig()


class ExceptionHandlingConfig(Section):
    """How much failure a run bears."""

    policy: Literal["stop_on_error", "stop_on_critical", "continue"] = "stop_on_critical"
    """stop_on_error: at the first user-code or exhausted infrastructure failure; stop_on_critical:
    past max_failure_rate; broken invariants always stop."""
    max_failure_rate: float = Field(0.5, gt=0, le=1)
    """Share of failed rollouts among the last failure_window that stops a run."""
    failure_window: int = Field(64, ge=1)
    """Rollouts over which the failure rate is measured; no verdict before that many have ended."""


class RuntimeMonitorConfig(Section):
    """Health, progress and the terminal."""

    exception_handling: ExceptionHandlingConfig = ExceptionHandlingConfig()
    no_progress_s: float = Field(900.0, gt=0)
    """Seconds without any finished activity after which the run stops and names who holds it."""
    live: Literal["auto", "rich", "plain", "off"] = "auto"
    """Terminal view; auto is rich on a terminal and plain lines elsewhere."""
    plain_every_s: float = Field(5.0, ge=0)
    """Seconds between plain lines."""


class RunConfig(Section):
    """A whole run."""

    project_name: str = "nexrl"
    """Project, for trackers."""
    experiment_name: str = Field("experiment", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run folder: <run_root>/<experiment_name>/<time>."""
    seed: int = Field(0, ge=0)
    """Seed of everything random."""
    deterministic: bool = False
    """Same bits for the same seed, whatever order requests arrive in; slower
    (docs/determinism.md)."""
    logger: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Trackers beside metrics.jsonl, which is always written."""
    resume: str | None = None
    """Run folder to continue, or `latest` for the newest one of this experiment."""
    data: DataConfig = DataConfig()
    rollout_worker: RolloutWorkerConfig = RolloutWorkerConfig()
    trajectory_pool: TrajectoryPoolConfig = TrajectoryPoolConfig()
    trainer: TrainerConfig = TrainerConfig()
    weight: WeightConfig = WeightConfig()
    validate_: ValidateConfig = Field(ValidateConfig(), alias="validate")
    service: ServiceConfig = ServiceConfig()
    launch: LaunchConfig = LaunchConfig()
    debug: DebugConfig = DebugConfig()
    runtime_monitor: RuntimeMonitorConfig = RuntimeMonitorConfig()
    stages: tuple[dict[str, Any], ...] = ()
    """Named overrides run one after another, each starting from the weights of the last; each needs
    a `name`."""
