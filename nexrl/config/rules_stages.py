"""Rules over all stages of a run: what they must agree on, and settings that none of them reads.

A setting that is written once for all stages may be meant for one of them: it is refused only where
no stage reads it. `loader.py` calls this with the stages that have a valid schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from nexrl.algorithms.presets import PRESETS
from nexrl.config.fields import find_field
from nexrl.config.nodes import DEFAULT, Origin, dotted, plain_leaves
from nexrl.config.problems import show
from nexrl.config.rule import (
    ADVANTAGE_SETTINGS,
    family_of,
    is_rl,
    uses_advantage,
    uses_critic,
    uses_reward,
)
from nexrl.config.schema import RunConfig

if TYPE_CHECKING:
    from nexrl.config.loader import StageConfig

KEY = "trainer.algorithm"


def mixed_heads(stages: Sequence[StageConfig]) -> Iterator[str]:
    """One policy goes through all stages, so it ends in the same head in all of them."""
    scoring: dict[bool, str] = {}
    for stage in stages:
        family = PRESETS[stage.config.trainer.algorithm.preset].family
        scoring.setdefault(family == "reward_model", stage.name)
    if len(scoring) > 1:
        yield (
            f"stages: {scoring[True]!r} trains a reward model, which has a value head, and "
            f"{scoring[False]!r} a language model; one policy goes through all stages (accepted: a "
            "run for each, the second with service.train_service.model_path at a publication of "
            "the first)"
        )


def unread_settings(stages: Sequence[StageConfig]) -> Iterator[str]:
    """What is written of the algorithm is read by the trainer of some stage."""
    refused: dict[tuple[str, Origin], str] = {}
    read: set[tuple[str, Origin]] = set()
    for stage in stages:
        for path, value in plain_leaves(stage.config.model_dump(by_alias=True)):
            key, field = dotted(path), find_field(path)
            origin = stage.provenance[key]
            if origin.implied or not key.startswith(f"{KEY}."):
                continue
            if field is not None and value == field.default:
                continue  # turned off again, as an override can
            reason = _why_unread(stage.config, key)
            if value and not reason:  # a penalty of 0 says what is so already
                reason = _why_without_effect(stage, key)
            if reason:
                text = f"{stage.prefix}{key} is {show(value, key)}, and {reason} ({origin})"
                refused.setdefault((key, origin), text)
            else:
                read.add((key, origin))
    yield from (text for written, text in refused.items() if written not in read)


_TURNED_ON_BY = {
    "kl.estimator": ("kl.coefficient", "which is 0"),
    "kl.placement": ("kl.coefficient", "which is 0"),
    "entropy.rate": ("entropy.target", "which is null"),
    "shaping.overlong_penalty": ("shaping.overlong_cache", "which is null"),
    **dict.fromkeys(
        ("correction.level", "correction.low", "correction.high"),
        ("correction.action", "which is none"),
    ),
}
"""Settings that do nothing while another one is off."""


def _why_without_effect(stage: StageConfig, key: str) -> str:
    """Why a setting that is read changes nothing; empty when it does, or when what turns it off is
    written too, as an ablation does."""
    switch, off = _TURNED_ON_BY.get(key.removeprefix(f"{KEY}."), ("", ""))
    if not switch or not is_rl(stage.config):
        return ""
    section, name = switch.split(".")
    value = getattr(getattr(stage.config.trainer.algorithm, section), name)
    if value not in (0, None, "none") or stage.provenance[f"{KEY}.{switch}"] != DEFAULT:
        return ""
    return f"it is used only with {KEY}.{switch}, {off}"


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
    penalises = section == "shaping" and setting != "mask_truncated"
    if penalises and not uses_advantage(config):
        return f"{KEY}.loss {algorithm.loss.name} has no advantage, so no reward reaches it"
    if estimator not in ADVANTAGES:
        return ""
    if penalises and not uses_reward(config):
        return f"{KEY}.advantage {estimator} reads no reward with task_coefficient 0"
    if section == "critic" and not uses_critic(config):
        return f"it is used only with {KEY}.advantage gae, not with {estimator}"
    users = ADVANTAGE_SETTINGS.get(setting, ()) if section == "advantage" else ()
    if users and estimator not in users:
        return f"{KEY}.advantage {estimator} does not read it (read by {', '.join(users)})"
    return ""
