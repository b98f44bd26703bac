"""Rules of `trainer.algorithm`: parts that cannot be composed, and settings that nothing reads.

Any estimator goes with any loss, correction, aggregation and KL placement; what is refused here
either has no meaning, has no gradient, or lacks an input. `rules.py` calls these; what an expert may
want is at most a warning of `nexrl plan`.
"""

from __future__ import annotations

from collections.abc import Iterator

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.kl import KL_IN_LOSS, KL_IN_REWARD
from nexrl.algorithms.loss_definition import REGULARISERS, LossDefinition, Setting
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.presets import PRESETS
from nexrl.config.rule import (
    Broken,
    family_of,
    is_group_relative,
    is_reference,
    is_rl,
    nearest,
    needs_of_advantage,
)
from nexrl.config.schema import RunConfig
from nexrl.errors import ConfigError

KEY = "trainer.algorithm"
_CLIPS = ("clip_low", "clip_high", "dual_clip")
_TEACHER = ("teacher_logprobs", "teacher_candidate_logprobs")


def policy_losses() -> dict[str, LossDefinition]:
    """Losses of sampled tokens: those with an advantage, and those with a teacher."""
    return {
        name: loss
        for name, loss in LOSSES.items()
        if {"advantage", *_TEACHER} & {*loss.required, *loss.optional}
    }


def names(config: RunConfig) -> Iterator[Broken]:
    """Estimator and loss exist, and the preset's trainer can use the loss."""
    algorithm, family = config.trainer.algorithm, family_of(config)
    loss, key = algorithm.loss.name, f"{KEY}.loss.name"
    if family is None:
        return
    if family != "rl":
        own = PRESETS[algorithm.preset].settings["trainer"]["algorithm"]["loss"]["name"]
        if loss != own:
            yield (
                f"{key} must be {own} for {KEY}: {algorithm.preset}, got {loss}: to train another "
                "loss on such rows, write its own preset",
                key,
            )
        return
    if loss not in policy_losses() and not is_reference(loss):
        reason = f"no policy loss is named {loss!r}{nearest(loss, policy_losses())}"
        if loss in PRESETS and PRESETS[loss].family != "rl":
            reason = f"{loss} is no policy loss; write {KEY}: {loss}"
        elif loss in LOSSES:
            reason = f"{loss} does not learn from rewards"
        yield (
            f"{key}: {reason} (accepted: {', '.join(policy_losses())}, or a function "
            "`path.py:name`)",
            key,
        )
    name, key = algorithm.advantage.name, f"{KEY}.advantage.name"
    if name not in ADVANTAGES and not is_reference(name):
        yield (
            f"{key}: no estimator is named {name!r}{nearest(name, ADVANTAGES)} (accepted: "
            f"{', '.join(ADVANTAGES)}, or a function `path.py:name`)",
            key,
        )


def loss_settings(config: RunConfig) -> Iterator[Broken]:
    """The loss has every setting that is given, and accepts its value."""
    algorithm, loss = config.trainer.algorithm, _policy_loss(config)
    if loss is None:
        return
    given: dict[str, tuple[str, Setting]] = {}
    for name in _CLIPS:
        if (value := getattr(algorithm.loss, name)) is not None:
            given[name] = (f"{KEY}.loss.{name}", value)
    for name, value in algorithm.loss.settings.items():
        key = f"{KEY}.loss.settings.{name}"
        if name in _CLIPS:
            yield f"{key} is written {KEY}.loss.{name}", key
        elif name in REGULARISERS:
            yield f"{key} is written {KEY}.{name.replace('_', '.', 1)}", key
        else:
            given[name] = (key, value)
    own = [name for name in loss.config if name not in REGULARISERS]
    accepted = ", ".join(own) or "none"
    wrong = {name: key for name, (key, _) in given.items() if name not in own}
    for name, key in wrong.items():
        yield (
            f"{key} is no setting of loss {loss.name}{nearest(name, own)} (its settings: "
            f"{accepted}), got {given[name][1]}",
            key,
        )
    if not wrong and given:
        try:
            loss.resolve({name: value for name, (_, value) in given.items()})
        except ConfigError as error:
            yield f"{KEY}.loss: {error}", *(key for key, _ in given.values())


def aggregation(config: RunConfig) -> Iterator[Broken]:
    """A loss that is defined for one denominator keeps it."""
    loss, given = _policy_loss(config), config.trainer.algorithm.loss.aggregation
    if loss is not None and loss.aggregation not in (None, given):
        yield (
            f"{KEY}.loss.aggregation must be {loss.aggregation} for loss {loss.name}, which is "
            f"defined for no other, got {given}",
            f"{KEY}.loss.aggregation",
        )


def divergences(config: RunConfig) -> Iterator[Broken]:
    """A KL estimator has a gradient where it is placed; the loss has a place for it."""
    if not is_rl(config):
        return
    algorithm, loss = config.trainer.algorithm, _policy_loss(config)
    kl, key = algorithm.kl, f"{KEY}.kl.estimator"
    if kl.coefficient and kl.placement == "loss" and kl.estimator not in KL_IN_LOSS:
        yield (
            f"{key} must be k2, k3, k1+ or k3+ with {KEY}.kl.placement loss, got k1: its gradient "
            "is zero in expectation; k1+ has its value and the gradient of k2, or place it in the "
            "reward",
            key,
            f"{KEY}.kl.placement",
        )
    if kl.coefficient and kl.placement == "reward" and kl.estimator not in KL_IN_REWARD:
        yield (
            f"{key} must be k1, k2 or k3 with {KEY}.kl.placement reward, got {kl.estimator}: a "
            "reward has no gradient for `+` to replace",
            key,
            f"{KEY}.kl.placement",
        )
    if kl.coefficient and kl.placement == "reward" and loss is not None and not _is_rewarded(loss):
        yield (
            f"{KEY}.kl.placement must be loss with {KEY}.loss {loss.name}, got reward: that loss has "
            "no advantage, so no reward reaches it",
            f"{KEY}.kl.placement",
        )
    wanted = algorithm.entropy.coefficient or algorithm.entropy.target
    if wanted and loss is not None and "entropy_coefficient" not in loss.config:
        yield f"{KEY}.entropy has no place in loss {loss.name}", f"{KEY}.entropy"


def correction(config: RunConfig) -> Iterator[Broken]:
    """A correction has a ratio, bounds to act on, and a loss that it multiplies."""
    if not is_rl(config):
        return
    algorithm, loss, key = config.trainer.algorithm, _policy_loss(config), f"{KEY}.correction"
    settings = algorithm.correction
    if settings.action == "none":
        if settings.preset != "none":
            yield (
                f"{key}.preset {settings.preset} acts, and {key}.action is none; write "
                "correction: none",
                f"{key}.action",
            )
        for name in ("low", "high"):
            if settings.preset == "none" and getattr(settings, name) is not None:
                yield f"{key}.{name} is used only with {key}.action", f"{key}.{name}"
        return
    chosen = settings.preset if settings.preset != "none" else settings.action
    if not algorithm.recompute_proximal:
        yield (
            f"{KEY}.recompute_proximal must be true for {key} {chosen}, got false: the ratio "
            "between trainer and engine is not known otherwise",
            f"{KEY}.recompute_proximal",
            key,
        )
    if settings.low is None and settings.high is None:
        yield (
            f"{key}.action {settings.action} needs {key}.low or {key}.high, both are null",
            f"{key}.action",
        )
    if settings.high is not None and settings.high <= (settings.low or 0.0):
        yield (
            f"{key}.low must be below {key}.high, got {settings.low} and {settings.high}",
            f"{key}.low",
            f"{key}.high",
        )
    if loss is not None and "correction" not in loss.optional:
        yield f"{key} {chosen}: loss {loss.name} takes no correction", key


def estimator_inputs(config: RunConfig) -> Iterator[Broken]:
    """Whatever the estimator needs is made by somebody, and differs from 0."""
    if not is_rl(config):
        return
    algorithm, worker = config.trainer.algorithm, config.rollout_worker.type
    name, repeats = algorithm.advantage.name, config.data.rollout_repeat_n
    if needs_of_advantage(config, "greedy_rewards") and not algorithm.greedy_baseline:
        yield (
            f"{KEY}.greedy_baseline must be true for {KEY}.advantage {name}, got false: its "
            "baseline is the reward of a greedy completion",
            f"{KEY}.greedy_baseline",
        )
    judged = {"turn_rewards": "a reward", "turn_anchors": "an anchor state"}
    for need, words in judged.items():
        if worker != "custom" and needs_of_advantage(config, need):
            yield (
                f"{KEY}.advantage {name} needs turns with {words}, which rollout_worker.type "
                f"{worker} does not make: use rollout_worker.type custom",
                f"{KEY}.advantage.name",
                KEY,
            )
    if name == "pass_at_k" and algorithm.advantage.pass_k >= repeats:
        yield (
            f"{KEY}.advantage.pass_k must be less than data.rollout_repeat_n = {repeats}, got "
            f"{algorithm.advantage.pass_k}: the advantage is 0 when all are drawn",
            f"{KEY}.advantage.pass_k",
            "data.rollout_repeat_n",
        )
    if is_group_relative(config) and repeats == 1:
        yield (
            f"data.rollout_repeat_n must be at least 2 for {KEY}.advantage {name}, got 1: a group "
            f"of one always has advantage 0",
            "data.rollout_repeat_n",
            f"{KEY}.advantage.name",
        )


def teacher(config: RunConfig) -> Iterator[Broken]:
    """Distillation has a teacher, and a teacher has somebody to teach."""
    if not is_rl(config):
        return
    algorithm, loss, key = config.trainer.algorithm, _policy_loss(config), f"{KEY}.teacher"
    own = is_reference(algorithm.loss.name) or is_reference(algorithm.advantage.name)
    candidates = loss is not None and "candidate_logprobs" in loss.needs
    wanted = candidates or needs_of_advantage(config, "teacher_logprobs")
    wanted = wanted or (loss is not None and "teacher_logprobs" in loss.required)
    path, top_k = algorithm.teacher.path, algorithm.teacher.top_k
    who = f"{KEY}.loss {algorithm.loss.name}"
    if needs_of_advantage(config, "teacher_logprobs"):
        who = f"{KEY}.advantage {algorithm.advantage.name}"
    if candidates and not (path and top_k):
        yield (
            f"{KEY}.loss {algorithm.loss.name} compares the teacher's most likely tokens: set "
            f"{key}.path and {key}.top_k of at least 1, got {path or 'null'} and {top_k}",
            f"{KEY}.loss.name",
            KEY,
        )
    elif wanted and path is None and config.rollout_worker.type != "custom":
        yield (
            f"{key}.path must be set for {who}: a Hugging Face model folder; only a custom rollout "
            "worker can bring the column teacher_logprobs itself",
            f"{key}.path",
            KEY,
        )
    if top_k and not candidates and not own:
        yield (
            f"{key}.top_k must be 0 for loss {algorithm.loss.name}, got {top_k}: of the teacher it "
            "reads the drawn token only; reverse_kl_top_k, forward_kl_top_k and jsd_top_k compare "
            "the most likely ones",
            f"{key}.top_k",
        )
    if path and not wanted and not own:
        yield (
            f"{key}.path is set and nothing asks for a teacher: neither {KEY}.advantage "
            f"{algorithm.advantage.name} nor {KEY}.loss {algorithm.loss.name} does",
            f"{key}.path",
        )


def shaping(config: RunConfig) -> Iterator[Broken]:
    """The overlong penalty begins somewhere within a response."""
    cache = config.trainer.algorithm.shaping.overlong_cache
    longest = config.rollout_worker.sampling.max_tokens
    if is_rl(config) and cache is not None and cache >= longest:
        yield (
            f"{KEY}.shaping.overlong_cache must be less than rollout_worker.sampling.max_tokens = "
            f"{longest}, got {cache}",
            f"{KEY}.shaping.overlong_cache",
        )


def trust_region(config: RunConfig) -> Iterator[Broken]:
    """The gradient is bounded where tokens come from an older policy."""
    loss, steps = _policy_loss(config), config.trainer.num_optimizer_steps
    threshold = config.weight.staleness_threshold
    if loss is None or loss.bounded or config.trainer.algorithm.trust_region == "none":
        return
    if steps > 1 or threshold > 0:
        reason = (
            f"trainer.num_optimizer_steps is {steps}"
            if steps > 1
            else f"weight.staleness_threshold is {threshold}"
        )
        yield (
            f"{KEY}.loss.name {loss.name} is unbounded and {reason}, so tokens are trained "
            f"off-policy: use ppo, or write {KEY}.trust_region: none to allow it",
            f"{KEY}.loss.name",
        )


ALGORITHM_RULES = (
    *(names, loss_settings, aggregation, divergences, correction),
    *(estimator_inputs, teacher, shaping, trust_region),
)


def _is_rewarded(loss: LossDefinition) -> bool:
    return "advantage" in {*loss.required, *loss.optional}


def _policy_loss(config: RunConfig) -> LossDefinition | None:
    """The named loss of the policy; None when rewards do not train, or the loss is the user's."""
    return policy_losses().get(config.trainer.algorithm.loss.name) if is_rl(config) else None
