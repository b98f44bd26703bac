"""Rules over all stages of a run: what they must agree on, and settings that none of them reads.

A setting that is written once for all stages may be meant for one of them: it is refused only where
no stage reads it. `loader.py` calls this when every stage has a valid schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from nexrl.algorithms.presets import PRESETS
from nexrl.config.nodes import Origin
from nexrl.config.problems import show
from nexrl.config.rule import ADVANTAGE_SETTINGS, family_of, uses_critic
from nexrl.config.schema import RunConfig

KEY = "trainer.algorithm"
StageFacts = tuple[str, RunConfig, Mapping[str, Origin]]
"""Name of a stage, its configuration, where each of its values came from."""


def stage_problems(stages: Sequence[StageFacts]) -> list[str]:
    """A sentence for every broken rule, with where it was written."""
    return [*mixed_heads(stages), *unread_settings(stages)]


def mixed_heads(stages: Sequence[StageFacts]) -> Iterator[str]:
    """One policy goes through all stages, so it ends in the same head in all of them."""
    scoring = {
        name: PRESETS[config.trainer.algorithm.preset].family == "reward_model"
        for name, config, _ in stages
    }
    if len(set(scoring.values())) > 1:
        first = next(name for name, is_scoring in scoring.items() if is_scoring)
        other = next(name for name, is_scoring in scoring.items() if not is_scoring)
        yield (
            f"stages: {first!r} trains a reward model, which has a value head, and {other!r} a "
            "language model; one policy goes through all stages (accepted: a run for each, the "
            "second with service.train_service.model_path at a publication of the first)"
        )


def unread_settings(stages: Sequence[StageFacts]) -> Iterator[str]:
    """What is written of the algorithm is read by the trainer of some stage."""
    default = RunConfig().model_dump(by_alias=True)
    refused: dict[tuple[str, Origin], str] = {}
    read: set[tuple[str, Origin]] = set()
    for name, config, origins in stages:
        values = config.model_dump(by_alias=True)
        prefix = f"stage {name}: " if len(stages) > 1 else ""
        for key in _written(origins):
            value = _value(values, key)
            if value == _value(default, key):
                continue  # turned off again, as an override can
            reason = _why_unread(config, key)
            if reason:
                text = f"{prefix}{key} is {show(value, key)}, and {reason} ({origins[key]})"
                refused.setdefault((key, origins[key]), text)
            else:
                read.add((key, origins[key]))
    yield from (text for written, text in refused.items() if written not in read)


def _why_unread(config: RunConfig, key: str) -> str:
    """Why the stage's trainer does not read a key of `trainer.algorithm`; empty when it does."""
    family, preset = family_of(config), config.trainer.algorithm.preset
    part = key.removeprefix(f"{KEY}.")
    if family is None or part in ("preset", "loss.name"):
        return ""
    if family == "rl":
        return _why_unread_by_rl(config, *part.split(".")[:2])
    accepted = ["loss.aggregation"]
    if family != "sft":
        accepted = [f"preference.{name}" for name in PREFERENCE_LOSSES[preset].config]
    if part in accepted:
        return ""
    return f"{KEY}: {preset} does not read it (it reads {', '.join(accepted) or 'no settings'})"


def _why_unread_by_rl(config: RunConfig, section: str, setting: str = "") -> str:
    algorithm = config.trainer.algorithm
    estimator = algorithm.advantage.name
    if section == "preference":
        return f"{KEY}: {algorithm.preset} does not read it: only losses on preferences do"
    if estimator not in ADVANTAGES:
        return ""
    if section == "critic" and not uses_critic(config):
        return f"it is used only with {KEY}.advantage gae, not with {estimator}"
    users = ADVANTAGE_SETTINGS.get(setting, ()) if section == "advantage" else ()
    if users and estimator not in users:
        return f"{KEY}.advantage {estimator} does not read it (read by {', '.join(users)})"
    return ""


def _written(origins: Mapping[str, Origin]) -> list[str]:
    """Keys below `trainer.algorithm` that somebody wrote, without sections."""
    keys = [k for k, o in origins.items() if k.startswith(f"{KEY}.") and not o.implied]
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


def _value(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values
