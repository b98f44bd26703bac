"""The trainer that the configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nexrl.algorithms.presets import Family, find_preset
from nexrl.config.schema import TrainerConfig
from nexrl.config.user_code import load_user_class
from nexrl.errors import ConfigError
from nexrl.trainer.advantage_columns import AdvantageEstimator
from nexrl.trainer.policy_gradient import PolicyGradientTrainer
from nexrl.trainer.policy_steps import PolicyLoss
from nexrl.trainer.preference import PreferenceTrainer
from nexrl.trainer.reward_model import RewardModelTrainer
from nexrl.trainer.sft import SftTrainer
from nexrl.trainer.trainer import Trainer, TrainerContext

BUILT_IN: Mapping[Family, type[Trainer]] = {
    "rl": PolicyGradientTrainer,
    "sft": SftTrainer,
    "preference": PreferenceTrainer,
    "reward_model": RewardModelTrainer,
}
"""By family of the preset."""


def trainer_class(config: TrainerConfig, recipe_dir: Path) -> type[Trainer]:
    """The class for the family of `trainer.algorithm.preset`, or the recipe's own when
    `trainer.type` is `custom`.

    Raises ConfigError when a custom class cannot be imported or is no Trainer, when a loss or an
    advantage by path cannot be imported, and when the parts of `trainer.algorithm` do not fit.
    """
    if config.type != "custom":
        family = find_preset(config.algorithm.preset).family
        if family == "rl":
            PolicyLoss(config.algorithm, recipe_dir)
            AdvantageEstimator(config.algorithm.advantage, recipe_dir)
        return BUILT_IN[family]
    module, name = config.custom_trainer_module_path, config.custom_trainer_class_name
    assert module and name, "the configuration's rules ask for both"  # noqa: PT018 - one fact
    found = load_user_class(
        module, name, recipe_dir=recipe_dir, key="trainer.custom_trainer_module_path"
    )
    if not issubclass(found, Trainer) or found.train is Trainer.train:
        raise ConfigError(
            f"trainer.custom_trainer_class_name: {name} in {module} must be a subclass of "
            "nexrl.trainer.Trainer that defines train(self, trajectories)"
        )
    return found


def build_trainer(config: TrainerConfig, context: TrainerContext, recipe_dir: Path) -> Trainer:
    """An instance for one stage; ConfigError as in `trainer_class`."""
    return trainer_class(config, recipe_dir)(context)
