"""Facts of a configuration that rules, cautions and the plan judge by."""

from __future__ import annotations

from collections.abc import Mapping

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.presets import PRESETS, Family, Preset
from nexrl.config.schema import RunConfig

OFFLINE_WORKERS = ("supervised", "preference", "labelled", "process")
"""Built-in workers that read their rows: nothing is sampled, and nothing is scored."""
ADVANTAGE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "std": ("grpo", "gigpo", "distill"),
    "gamma": ("gae", "reinforce_pp", "step_returns", "gigpo"),
    "gae_lambda": ("gae",),
    "critic_lambda": ("gae",),
    "length_adaptive": ("gae",),
    "whiten": ("gae", "reinforce_pp", "reinforce_pp_baseline", "gdpo"),
    "pass_k": ("pass_at_k",),
    "success_reward": ("pass_at_k",),
    "part_weights": ("gdpo",),
    "baseline": ("reinforce",),
    "step_weight": ("gigpo",),
    "distill_coefficient": ("distill",),
    "task_coefficient": ("distill",),
}
"""Settings of `trainer.algorithm.advantage`, each with the estimators that read it."""


def is_reference(text: str) -> bool:
    """Whether a text is written like a user's function, `path.py:name`."""
    module, colon, name = text.rpartition(":")
    return bool(colon and module.strip() and name.isidentifier())


def family_of(config: RunConfig) -> Family | None:
    """Which built-in trainer runs; None for a custom one."""
    if config.trainer.type == "custom":
        return None
    return PRESETS[config.trainer.algorithm.preset].family


def is_rl(config: RunConfig) -> bool:
    """Whether the built-in trainer learns on sampled tokens."""
    return family_of(config) == "rl"


def worker_of(preset: Preset) -> str:
    """The built-in rollout worker that makes a preset's rows."""
    worker: str = preset.settings.get("rollout_worker", {}).get("type", "single_turn")
    return worker


def uses_advantage(config: RunConfig) -> bool:
    """Whether the loss has an advantage; one that compares with a teacher has none."""
    loss = LOSSES.get(config.trainer.algorithm.loss.name)
    return loss is None or "advantage" in (*loss.required, *loss.optional)


def uses_reward(config: RunConfig) -> bool:
    """Whether rewards reach the gradient: a teacher alone needs none."""
    algorithm = config.trainer.algorithm
    if not uses_advantage(config):
        return False
    return algorithm.advantage.name != "distill" or algorithm.advantage.task_coefficient > 0


def is_group_relative(config: RunConfig) -> bool:
    """Whether the rollouts of an item are compared: a group of one has advantage 0."""
    definition = ADVANTAGES.get(config.trainer.algorithm.advantage.name)
    return definition is not None and definition.group_relative and uses_reward(config)


def uses_critic(config: RunConfig) -> bool:
    """Whether the estimator wants values."""
    return needs_of_advantage(config, "values")


def needs_of_advantage(config: RunConfig, *inputs: str) -> bool:
    """Whether the named estimator needs any of these inputs; a user's own is not known."""
    definition = ADVANTAGES.get(config.trainer.algorithm.advantage.name)
    return definition is not None and any(name in definition.needs for name in inputs)
