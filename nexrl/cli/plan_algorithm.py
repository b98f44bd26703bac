"""What `nexrl plan` says of the algorithm: its parts as they will run, in labelled lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nexrl.algorithms.aggregation import AGGREGATIONS
from nexrl.algorithms.loss_definition import REGULARISERS
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from nexrl.config.nodes import Origin
from nexrl.config.rule import (
    ADVANTAGE_SETTINGS,
    family_of,
    is_reference,
    is_rl,
    needs_of_advantage,
    uses_critic,
    uses_reward,
)
from nexrl.config.schema import RunConfig

KEY = "trainer.algorithm"


def algorithm_lines(config: RunConfig, origins: Mapping[str, Origin]) -> Iterator[tuple[str, str]]:
    """Label and value of each part of the algorithm."""
    trainer, family = config.trainer, family_of(config)
    if family is None:
        yield (
            "trainer",
            f"{trainer.custom_trainer_class_name} of {trainer.custom_trainer_module_path}",
        )
        return
    yield "algorithm", _preset_words(config, origins)
    if family == "rl":
        if uses_reward(config) or needs_of_advantage(config, "teacher_logprobs"):
            yield "advantage", _advantage_words(config)
        yield "loss", _loss_words(config)
        if beside := "; ".join(_beside(config)):
            yield "beside the loss", beside
    elif family == "sft":
        yield "loss", f"cross_entropy, {_aggregation_words(config)}"
    else:
        loss = PREFERENCE_LOSSES[trainer.algorithm.preset]
        settings = [f"{k} {getattr(trainer.algorithm.preference, k):g}" for k in loss.config]
        unit = {"pair": "pairs", "labelled": "responses", "process": "step ends"}[loss.rows]
        yield "loss", _with(loss.name, settings) + f", mean over the {unit} of an optimizer step"


def _preset_words(config: RunConfig, origins: Mapping[str, Origin]) -> str:
    """The preset's name and the keys that are written over it, those that its trainer reads."""
    read = ("",) if is_rl(config) else ("loss.", "preference.")
    written = [
        key.removeprefix(f"{KEY}.")
        for key, origin in origins.items()
        if not origin.implied
        and key != f"{KEY}.preset"
        and key.startswith(tuple(f"{KEY}.{prefix}" for prefix in read))
    ]
    changed = f", with {', '.join(written)} as written" if written else ""
    return config.trainer.algorithm.preset + changed


def _advantage_words(config: RunConfig) -> str:
    advantage = config.trainer.algorithm.advantage
    settings = [
        f"{name} {_plain(getattr(advantage, name))}"
        for name, users in ADVANTAGE_SETTINGS.items()
        if advantage.name in users and getattr(advantage, name) not in (None, {})
    ]
    return _with(advantage.name, settings)


def _loss_words(config: RunConfig) -> str:
    given = config.trainer.algorithm.loss
    settings = {k: v for k in ("clip_low", "clip_high", "dual_clip") if (v := getattr(given, k))}
    settings |= given.settings
    if given.name in LOSSES:
        settings = {**LOSSES[given.name].config, **settings}
    shown = [
        f"{name} {_plain(value)}"
        for name, value in settings.items()
        if value is not None and name not in REGULARISERS
    ]
    return f"{_with(given.name, shown)}, {_aggregation_words(config)}"


def _aggregation_words(config: RunConfig) -> str:
    aggregation = config.trainer.algorithm.loss.aggregation
    return f"{aggregation}: {AGGREGATIONS[aggregation]}"


def _beside(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    kl, entropy, correction = algorithm.kl, algorithm.entropy, algorithm.correction
    if kl.coefficient:
        yield f"KL {kl.coefficient:g} {kl.estimator} in the {kl.placement}, frozen reference"
    if entropy.target is not None:
        yield f"entropy bonus that holds {entropy.target:g} nats"
    elif entropy.coefficient:
        yield f"entropy bonus {entropy.coefficient:g}"
    if correction.action != "none":
        low, high = (_plain(bound) for bound in (correction.low, correction.high))
        yield f"correction by {correction.level}: {correction.action} outside [{low}, {high}]"
    if is_reference(algorithm.loss.name):
        yield "the trainer evaluates the loss, on what a forward pass returns"
    elif algorithm.loss.name in LOSSES and LOSSES[algorithm.loss.name].prepare is not None:
        yield "a forward pass before each optimizer step"
    if algorithm.recompute_proximal:
        yield "proximal logprobs recomputed"
    if uses_critic(config):
        ahead = algorithm.critic.warmup_batches
        alone = f", alone for {ahead} batches" if ahead else ""
        yield f"critic with lr {algorithm.critic.lr:g}{alone}"
    if algorithm.teacher.path:
        yield f"teacher {algorithm.teacher.path}"
    if algorithm.greedy_baseline:
        yield "a greedy completion of each draw"
    yield from _shaping(config)


def _shaping(config: RunConfig) -> Iterator[str]:
    shaping = config.trainer.algorithm.shaping
    if shaping.overlong_cache is not None and shaping.overlong_penalty:
        yield (
            f"up to {shaping.overlong_penalty:g} off over the last {shaping.overlong_cache} of "
            f"{config.rollout_worker.sampling.max_tokens} tokens"
        )
    if shaping.length_penalty:
        yield f"{shaping.length_penalty:g} off per token"
    if shaping.mask_truncated:
        yield "truncated trajectories left out"


def _with(name: str, settings: list[str]) -> str:
    return f"{name} ({', '.join(settings)})" if settings else name


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, int | float) else str(value)
