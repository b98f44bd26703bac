"""The trainer that the configuration names."""

from __future__ import annotations

from pathlib import Path

from nexrl.config.schema import TrainerConfig
from nexrl.config.user_code import load_user_class
from nexrl.errors import ConfigError
from nexrl.trainer.grpo import GrpoTrainer
from nexrl.trainer.sft import SftTrainer
from nexrl.trainer.trainer import Trainer, TrainerContext

BUILT_IN: dict[str, type[Trainer]] = {"sft": SftTrainer, "grpo": GrpoTrainer}


def trainer_class(config: TrainerConfig, recipe_dir: Path) -> type[Trainer]:
    """The class that `trainer.type` names, imported from the recipe when it is `custom`.

    Raises ConfigError when a custom class cannot be imported or is no Trainer.
    """
    if config.type != "custom":
        return BUILT_IN[config.type]
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
