"""Settings that work and are probably not meant: what `nexrl plan` and `nexrl launch` warn of.

Judged by the configuration alone, in no time; what needs rows, a tokenizer or the machine is the
plan's. A combination that cannot work is refused instead (`rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.filters import CONSTANT_REWARD
from nexrl.config.loader import LoadedConfig, StageConfig
from nexrl.config.problems import located
from nexrl.config.redact import redact_text
from nexrl.config.rule import (
    OFFLINE_WORKERS,
    is_group_relative,
    is_rl,
    needs_of_advantage,
    uses_advantage,
    uses_critic,
)
from nexrl.config.schema import RunConfig

KEY = "trainer.algorithm"


def run_cautions(loaded: LoadedConfig) -> list[str]:
    """A sentence for each setting of a run that is probably not meant, with where it was written;
    without secrets, so it can be printed and logged."""
    found = (stage.prefix + text for stage in loaded.stages for text in stage_cautions(stage))
    return [redact_text(text, secrets=loaded.secrets) for text in dict.fromkeys(found)]


def stage_cautions(stage: StageConfig) -> list[str]:
    """The same of one stage, without its name."""
    found = (*_unread_advantage(stage), *_of_algorithm(stage.config), *_of_batches(stage.config))
    return [located(text, stage.provenance) for text in found]


def _unread_advantage(stage: StageConfig) -> Iterator[str]:
    """An estimator is written for a loss that compares with a teacher alone."""
    algorithm, key = stage.config.trainer.algorithm, f"{KEY}.advantage.name"
    if not is_rl(stage.config) or uses_advantage(stage.config) or stage.provenance[key].implied:
        return
    yield (
        f"{key} is {algorithm.advantage.name}, and {KEY}.loss {algorithm.loss.name} has no "
        "advantage: rewards train nothing. To learn from a teacher and from rewards, use advantage "
        "distill with task_coefficient"
    )


def _of_algorithm(config: RunConfig) -> Iterator[str]:
    if not is_rl(config):
        return
    algorithm = config.trainer.algorithm
    name, filters = algorithm.advantage.name, config.trajectory_pool.dynamic_sampling.filters
    if name == "dr_grpo" and algorithm.loss.aggregation == "sequence_mean_token_mean":
        yield (
            f"{KEY}.advantage dr_grpo is meant for loss.aggregation constant, got "
            f"{algorithm.loss.aggregation}: it brings the length bias back"
        )
    clip_low = algorithm.loss.clip_low or 0.0
    if clip_low > 1:
        yield (
            f"{KEY}.loss.clip_low {clip_low:g} never clips: the lower bound {1 - clip_low:g} is "
            "below every ratio"
        )
    if config.rollout_worker.failure_policy.min_group_size == 1 and is_group_relative(config):
        yield (
            "rollout_worker.failure_policy.min_group_size is 1: a group that shrinks to one "
            "member has advantage 0"
        )
    read = name not in ADVANTAGES or needs_of_advantage(config, "greedy_rewards")
    if algorithm.greedy_baseline and not read:
        yield (
            f"{KEY}.greedy_baseline draws and scores a greedy completion of each draw, which "
            f"{KEY}.advantage {name} does not read"
        )
    alpha, longest = algorithm.advantage.length_adaptive, config.rollout_worker.sampling.max_tokens
    if name == "gae" and alpha is not None and alpha * longest <= 2:
        yield (
            f"{KEY}.advantage.length_adaptive {alpha:g} makes lambda at most "
            f"{max(0.0, 1 - 1 / (alpha * longest)):g} for the {longest} tokens of "
            "rollout_worker.sampling.max_tokens, so advantages hardly see the reward: it is meant "
            "for long answers"
        )
    if CONSTANT_REWARD in filters and name in ADVANTAGES and not is_group_relative(config):
        yield (
            f"trajectory_pool.dynamic_sampling.filters: {CONSTANT_REWARD} drops groups of equal "
            f"rewards, which {KEY}.advantage {name} learns from all the same"
        )


def _of_batches(config: RunConfig) -> Iterator[str]:
    trainer, worker, repeats = config.trainer, config.rollout_worker, config.data.rollout_repeat_n
    if worker.type in OFFLINE_WORKERS and repeats > 1:
        yield (
            f"data.rollout_repeat_n is {repeats}, and {worker.type} rows of one item are all "
            "equal: each is trained that many times"
        )
    validated = worker.type == "supervised" and config.validate_.enabled
    if worker.type in OFFLINE_WORKERS and worker.reward and not validated:
        yield (
            f"rollout_worker.reward is {worker.reward}, and rows of rollout_worker.type "
            f"{worker.type} are not scored"
        )
    if trainer.type == "custom" and worker.sampling.top_p < 1:
        yield (
            "rollout_worker.sampling.top_p is below 1: logprobs are those of the kept tokens only"
        )
    ahead = trainer.algorithm.critic.warmup_batches
    if is_rl(config) and uses_critic(config) and ahead >= trainer.num_steps > 0:
        yield (
            f"{KEY}.critic.warmup_batches is {ahead}, and trainer.num_steps {trainer.num_steps}: the "
            "critic is trained alone to the end, and the policy never changes"
        )
    steps = trainer.num_steps * trainer.num_optimizer_steps
    if trainer.optimizer.warmup_steps > steps > 0:
        yield (
            f"trainer.optimizer.warmup_steps {trainer.optimizer.warmup_steps} is longer than the "
            f"stage's {steps} optimizer steps"
        )
