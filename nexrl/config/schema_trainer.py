"""Settings of what happens to a batch: the trainer, its weights on their way, validation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from nexrl.config.schema_algorithm import AlgorithmConfig
from nexrl.config.schema_rollout import SamplingConfig, SourceConfig
from nexrl.config.section import Section


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-5, ge=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    grad_clip_norm: float = Field(1.0, ge=0)
    """Global gradient-norm bound; 0 is off."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate of linear and cosine, relative to the peak."""


class CheckpointConfig(Section):
    """When the whole state is written."""

    every_steps: int = Field(0, ge=0)
    """Batches between checkpoints; 0 writes one at the end of each stage only."""
    keep_last: int = Field(2, ge=1)
    """Complete checkpoints kept."""


class TrainerConfig(Section):
    """How a batch is trained."""

    type: Literal["built_in", "custom"] = "built_in"
    """The trainer that the algorithm needs, or `custom`."""
    custom_trainer_module_path: str | None = None
    """File or module of the custom trainer; relative to the recipe folder, then to the working
    directory."""
    custom_trainer_class_name: str | None = None
    """Class in that module."""
    arguments: dict[str, Any] = Field({})
    """Settings of the trainer's own, at `self.arguments`."""
    num_steps: int = Field(100, ge=0)
    """Batches to train in this stage; each ends in one published version."""
    num_optimizer_steps: int = Field(1, ge=1)
    """Optimizer steps that a batch is split into, by groups."""
    stop_at_accuracy: float | None = Field(None, ge=0, le=1)
    """End the stage when validation/accuracy reaches this value."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    max_chunk_bytes: int = Field(8_000_000, ge=1024)
    """Largest chunk of rows sent to the train service in one call, in bytes."""
    on_nonfinite_gradient: Literal["skip", "stop"] = "stop"
    """What an optimizer step whose gradient is not finite does to the run; `skip` counts it."""


class WeightConfig(Section):
    """Policy versions on their way from trainer to engines."""

    mode: Literal["sync", "batch-async", "sample-async"] = "sync"
    """When engines change weights; only `sync` exists in this version."""
    staleness_threshold: int = Field(0, ge=0)
    """Versions that a trained token may be older than the version consuming it."""
    verify: Literal["full", "checksum", "off"] = "full"
    """`full`: manifest checksum and canary logprobs; `checksum`: the former only."""
    num_canary_rows: int = Field(4, ge=1)
    """Rows of the last batch whose logprobs are compared between engine and trainer."""
    canary_tolerance: float = Field(0.05, gt=0)
    """Largest mean absolute logprob difference between engine and trainer, in nats, at which a sync
    is believed."""
    max_undecided: int = Field(20, ge=1)
    """Syncs in a row whose canary cannot tell old from new weights before an alarm is raised."""
    publish_deadline_s: float = Field(300.0, gt=0)
    """Seconds for writing a publication."""
    load_deadline_s: float = Field(300.0, gt=0)
    """Seconds for an engine to load it."""
    verify_deadline_s: float = Field(120.0, gt=0)
    """Seconds for checksum and canary."""
    drain_deadline_s: float = Field(600.0, gt=0)
    """Seconds that an activation waits for running rollouts."""
    keep_publications: int = Field(2, ge=1)
    """Published weight folders kept on disk."""


class ValidationSamplingConfig(SamplingConfig):
    """How tokens are drawn in validation: greedy unless a temperature is written."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""


class ValidateConfig(Section):
    """Held-out evaluation on the same workers."""

    enabled: bool = False
    """Whether to validate."""
    sources: tuple[SourceConfig, ...] = ()
    """Held-out data sources."""
    at_start: bool = True
    """Validate before training."""
    at_end: bool = True
    """Validate after the last batch."""
    every_versions: int = Field(0, ge=0)
    """Versions between validations; 0 is never in between."""
    max_items: int | None = Field(None, ge=1)
    """Items used, from the front; null is all."""
    num_rollouts: int = Field(1, ge=1)
    """Rollouts of each item."""
    sampling: ValidationSamplingConfig = ValidationSamplingConfig()
    success_reward: float = 1.0
    """A trajectory counts as accurate when its reward is at least this."""
    success_part: str | None = None
    """Judge accuracy by this named reward part instead of the reward."""
    deadline_s: float = Field(1800.0, gt=0)
    """Seconds for one validation."""
