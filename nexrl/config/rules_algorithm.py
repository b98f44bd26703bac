"""Rules of `trainer.algorithm`: parts that cannot be composed, and settings that nothing reads.

Any estimator goes with any loss, correction, aggregation and KL placement; what is refused here
either has no meaning, has no gradient, or lacks an input. `rules.py` calls these; what an expert may
want is at most a caution (`cautions.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.kl import KL_IN_LOSS, KL_IN_REWARD
from nexrl.algorithms.loss_definition import REGULARISERS, LossDefinition, Setting
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.presets import PRESETS
from nexrl.config.rule import (
    family_of,
    is_group_relative,
    is_reference,
    is_rl,
    needs_of_advantage,
)
from nexrl.config.schema import RunConfig
from nexrl.errors import ConfigError, nearest

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


def _policy_loss(config: RunConfig) -> LossDefinition | None:
    """The named loss of the policy; None when rewards do not train, or the loss is the user's."""
    return policy_losses().get(config.trainer.algorithm.loss.name) if is_rl(config) else None


def names(config: RunConfig) -> Iterator[str]:
    """Estimator and loss exist, and the preset's trainer can use the loss."""
    algorithm, family = config.trainer.algorithm, family_of(config)
    loss, key = algorithm.loss.name, f"{KEY}.loss.name"
    if family not in ("rl", None):
        own = PRESETS[algorithm.preset].settings["trainer"]["algorithm"]["loss"]["name"]
        if loss != own:
            yield (
                f"{key} must be {own} for {KEY}: {algorithm.preset}, got {loss}: to train another "
                "loss on such rows, write its own preset"
            )
    if family != "rl":
        return
    own_function = "or a function `path.py:name`"
    if loss not in policy_losses() and not is_reference(loss):
        reason = f"no policy loss is named {loss!r}{nearest(loss, policy_losses())}"
        if loss in PRESETS and PRESETS[loss].family != "rl":
            reason = f"{loss} is no policy loss; write {KEY}: {loss}"
        elif loss in LOSSES:
            reason = f"{loss} does not learn from rewards"
        yield f"{key}: {reason} (accepted: {', '.join(policy_losses())}, {own_function})"
    name = algorithm.advantage.name
    if name not in ADVANTAGES and not is_reference(name):
        yield (
            f"{KEY}.advantage.name: no estimator is named {name!r}{nearest(name, ADVANTAGES)} "
            f"(accepted: {', '.join(ADVANTAGES)}, {own_function})"
        )


def loss_settings(config: RunConfig) -> Iterator[str]:
    """The loss has every setting that is given, and accepts its value."""
    settings, loss = config.trainer.algorithm.loss, _policy_loss(config)
    if loss is None:
        return
    clips = {name: value for name in _CLIPS if (value := getattr(settings, name)) is not None}
    keys = {name: f"{KEY}.loss.{name}" for name in clips}
    given: dict[str, Setting] = {**clips}
    for name, value in settings.settings.items():
        key = f"{KEY}.loss.settings.{name}"
        if name in _CLIPS:
            yield f"{key} is written {KEY}.loss.{name}"
        elif name in REGULARISERS:
            yield f"{key} is written {KEY}.{name.replace('_', '.', 1)}"
        else:
            given[name], keys[name] = value, key
    own = [name for name in loss.config if name not in REGULARISERS]
    wrong = [name for name in given if name not in own]
    for name in wrong:
        yield (
            f"{keys[name]} is no setting of loss {loss.name}{nearest(name, own)} (its settings: "
            f"{', '.join(own) or 'none'}), got {given[name]}"
        )
    if not wrong:
        try:
            loss.resolve(given)
        except ConfigError as error:
            named = [key for name, key in keys.items() if name in str(error)]
            yield f"{', '.join(named or keys.values())}: {error}"


def aggregation(config: RunConfig) -> Iterator[str]:
    """A loss that is defined for one denominator keeps it."""
    loss, given = _policy_loss(config), config.trainer.algorithm.loss.aggregation
    if loss is not None and loss.aggregation not in (None, given):
        yield (
            f"{KEY}.loss.aggregation must be {loss.aggregation} for loss {loss.name}, which is "
            f"defined for no other, got {given}"
        )


def divergences(config: RunConfig) -> Iterator[str]:
    """A KL estimator has a gradient where it is placed; the loss has a place for it."""
    if not is_rl(config):
        return
    algorithm, loss = config.trainer.algorithm, _policy_loss(config)
    kl, key = algorithm.kl, f"{KEY}.kl"
    if kl.coefficient and kl.placement == "loss" and kl.estimator not in KL_IN_LOSS:
        yield (
            f"{key}.estimator must be k2, k3, k1+ or k3+ with {key}.placement loss, got k1: its "
            "gradient is zero in expectation; k1+ has its value and the gradient of k2, or place "
            "it in the reward"
        )
    if kl.coefficient and kl.placement == "reward":
        if kl.estimator not in KL_IN_REWARD:
            yield (
                f"{key}.estimator must be k1, k2 or k3 with {key}.placement reward, got "
                f"{kl.estimator}: a reward has no gradient for `+` to replace"
            )
        if loss is not None and "advantage" not in {*loss.required, *loss.optional}:
            yield (
                f"{key}.placement must be loss with {KEY}.loss {loss.name}, got reward: that loss "
                "has no advantage, so no reward reaches it"
            )
    wanted = algorithm.entropy.coefficient or algorithm.entropy.target
    if wanted and loss is not None and "entropy_coefficient" not in loss.config:
        yield f"{KEY}.entropy has no place in loss {loss.name}"


def correction(config: RunConfig) -> Iterator[str]:
    """A correction has a ratio, bounds to act on, and a loss that it multiplies."""
    if not is_rl(config):
        return
    algorithm, loss, key = config.trainer.algorithm, _policy_loss(config), f"{KEY}.correction"
    settings = algorithm.correction
    if settings.action == "none":
        if settings.preset != "none":
            yield (
                f"{key}.preset {settings.preset} acts, and {key}.action is none; write "
                "correction: none"
            )
        return
    chosen = settings.preset if settings.preset != "none" else settings.action
    if not algorithm.recompute_proximal:
        yield (
            f"{KEY}.recompute_proximal must be true for {key} {chosen}, got false: the ratio "
            "between trainer and engine is not known otherwise"
        )
    if settings.low is None and settings.high is None:
        yield f"{key}.action {settings.action} needs {key}.low or {key}.high, both are null"
    if settings.high is not None and settings.high <= (settings.low or 0.0):
        yield f"{key}.low must be below {key}.high, got {settings.low} and {settings.high}"
    if loss is not None and "correction" not in loss.optional:
        yield f"{key} {chosen}: loss {loss.name} takes no correction"


def estimator_inputs(config: RunConfig) -> Iterator[str]:
    """Whatever the estimator needs is made by somebody, and differs from 0."""
    if not is_rl(config):
        return
    algorithm, worker = config.trainer.algorithm, config.rollout_worker.type
    name, repeats = algorithm.advantage.name, config.data.rollout_repeat_n
    if needs_of_advantage(config, "greedy_rewards") and not algorithm.greedy_baseline:
        yield (
            f"{KEY}.greedy_baseline must be true for {KEY}.advantage {name}, got false: its "
            "baseline is the reward of a greedy completion"
        )
    for need, words in (("turn_rewards", "a reward"), ("turn_anchors", "an anchor state")):
        if worker != "custom" and needs_of_advantage(config, need):
            yield (
                f"{KEY}.advantage {name} needs turns with {words}, which rollout_worker.type "
                f"{worker} does not make: use rollout_worker.type custom"
            )
    if name == "pass_at_k" and algorithm.advantage.pass_k >= repeats:
        yield (
            f"{KEY}.advantage.pass_k must be less than data.rollout_repeat_n = {repeats}, got "
            f"{algorithm.advantage.pass_k}: the advantage is 0 when all are drawn"
        )
    if is_group_relative(config) and repeats == 1:
        yield (
            f"data.rollout_repeat_n must be at least 2 for {KEY}.advantage {name}, got 1: a group "
            "of one always has advantage 0"
        )


def teacher(config: RunConfig) -> Iterator[str]:
    """Distillation has a teacher, and a teacher has somebody to teach."""
    if not is_rl(config):
        return
    algorithm, loss, key = config.trainer.algorithm, _policy_loss(config), f"{KEY}.teacher"
    path, top_k = algorithm.teacher.path, algorithm.teacher.top_k
    of_loss, of_advantage = algorithm.loss.name, algorithm.advantage.name
    own = loss is None or of_advantage not in ADVANTAGES
    candidates = loss is not None and "candidate_logprobs" in loss.needs
    by_advantage = needs_of_advantage(config, "teacher_logprobs")
    by_loss = loss is not None and "teacher_logprobs" in loss.required
    if candidates and not (path and top_k):
        yield (
            f"{KEY}.loss {of_loss} compares the teacher's most likely tokens: set {key}.path and "
            f"{key}.top_k of at least 1, got {path or 'null'} and {top_k}"
        )
    elif (by_advantage or by_loss) and path is None and config.rollout_worker.type != "custom":
        who = f"advantage {of_advantage}" if by_advantage else f"loss {of_loss}"
        yield (
            f"{key}.path must be set for {KEY}.{who}: a Hugging Face model folder; only a custom "
            "rollout worker can bring the column teacher_logprobs itself"
        )
    if top_k and not candidates and not own:
        yield (
            f"{key}.top_k must be 0 for loss {of_loss}, got {top_k}: of the teacher it reads the "
            "drawn token only; reverse_kl_top_k, forward_kl_top_k and jsd_top_k compare the most "
            "likely ones"
        )
    if path and not (candidates or by_advantage or by_loss or own):
        yield (
            f"{key}.path is set and nothing asks for a teacher: neither {KEY}.advantage "
            f"{of_advantage} nor {KEY}.loss {of_loss} does"
        )


def shaping(config: RunConfig) -> Iterator[str]:
    """The overlong penalty begins somewhere within a response."""
    cache = config.trainer.algorithm.shaping.overlong_cache
    longest = config.rollout_worker.sampling.max_tokens
    if is_rl(config) and cache is not None and cache >= longest:
        yield (
            f"{KEY}.shaping.overlong_cache must be less than rollout_worker.sampling.max_tokens = "
            f"{longest}, got {cache}"
        )


def trust_region(config: RunConfig) -> Iterator[str]:
    """The gradient is bounded where tokens come from an older policy."""
    loss = _policy_loss(config)
    if loss is None or loss.bounded or config.trainer.algorithm.trust_region == "none":
        return
    steps, threshold = config.trainer.num_optimizer_steps, config.weight.staleness_threshold
    reason = f"weight.staleness_threshold is {threshold}" if threshold else ""
    reason = f"trainer.num_optimizer_steps is {steps}" if steps > 1 else reason
    if reason:
        yield (
            f"{KEY}.loss.name {loss.name} is unbounded and {reason}, so tokens are trained "
            f"off-policy: use ppo, or write {KEY}.trust_region: none to allow it"
        )


ALGORITHM_RULES = (
    *(names, loss_settings, aggregation, divergences, correction),
    *(estimator_inputs, teacher, shaping, trust_region),
)
