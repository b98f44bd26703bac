"""Builds the rollout worker that the configuration names.

Called by whoever wires a run, once for training and once more for validation with its sampling.
"""

from __future__ import annotations

from pathlib import Path

from nexrl.config.schema import RolloutWorkerConfig, SamplingConfig
from nexrl.config.user_code import load_user_class
from nexrl.errors import ConfigError, NexRLError, UserCodeError, user_frame
from nexrl.rollout.preference_rows import LabelledWorker, PreferenceWorker, ProcessWorker
from nexrl.rollout.rollout_worker import RolloutWorker, WorkerContext
from nexrl.rollout.single_turn import SingleTurnWorker
from nexrl.rollout.supervised import SupervisedWorker
from nexrl.types import Sampling

_BUILTIN: dict[str, type[RolloutWorker]] = {
    "single_turn": SingleTurnWorker,
    "supervised": SupervisedWorker,
    "preference": PreferenceWorker,
    "labelled": LabelledWorker,
    "process": ProcessWorker,
}


def to_sampling(config: SamplingConfig) -> Sampling:
    """Sampling parameters of the configuration; no seed, the runner gives one to each call."""
    return Sampling(**dict(config))


def worker_class(config: RolloutWorkerConfig, recipe_dir: Path) -> type[RolloutWorker]:
    """The class that the configuration names; ConfigError names the key and the file."""
    if config.type != "custom":
        return _BUILTIN[config.type]
    module, name = config.custom_rollout_worker_module_path, config.custom_rollout_worker_class_name
    assert module and name, "the configuration's rules ask for both"  # noqa: PT018 - one fact
    key = "rollout_worker.custom_rollout_worker_module_path"
    found = load_user_class(module, name, recipe_dir=recipe_dir, key=key)
    if not issubclass(found, RolloutWorker) or found.step is RolloutWorker.step:
        raise ConfigError(
            f"rollout_worker.custom_rollout_worker_class_name: {name} in {module} must be a "
            "subclass of nexrl.rollout.RolloutWorker that defines step(self, data_item)"
        )
    return found


def build_worker(context: WorkerContext, recipe_dir: Path) -> RolloutWorker:
    """The worker, constructed as `Worker(context)`; its own errors name file and line."""
    cls = worker_class(context.config, recipe_dir)
    try:
        worker = cls(context)
    except NexRLError:
        raise
    except Exception as error:
        raise UserCodeError(
            f"{cls.__name__}(context) raised {type(error).__name__}: {error} at {user_frame(error)}"
        ) from error
    if getattr(worker, "context", None) is not context:
        raise UserCodeError(
            f"{cls.__name__}.__init__ must call super().__init__(context) with the context it got"
        )
    return worker
