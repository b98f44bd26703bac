"""Rules between keys: combinations that the schema allows and that cannot work.

A rule is a function of the configuration that yields sentences. Each begins with the key that is
wrong, or names it early, so that the line where it is written can be added (`problems.located`); it
says what the keys are and what would be accepted. Facts about the machine (files, ports, endpoints)
are checked by the plan, not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from urllib.parse import urlsplit

from nexrl.algorithms.filters import CONSTANT_REWARD, GROUP_FILTERS
from nexrl.algorithms.presets import PRESETS
from nexrl.config.nodes import Origin
from nexrl.config.problems import located
from nexrl.config.redact import redact_text
from nexrl.config.rule import (
    OFFLINE_WORKERS,
    family_of,
    is_reference,
    is_rl,
    uses_reward,
    worker_of,
)
from nexrl.config.rules_algorithm import ALGORITHM_RULES
from nexrl.config.schema import RunConfig, SourceConfig

_DRAWN_IN_VALIDATION = ("single_turn", "supervised")
"""Built-in workers whose held-out items are answered; others are judged by their own loss."""
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


def rule_problems(config: RunConfig, origins: Mapping[str, Origin]) -> list[str]:
    """A sentence for every broken rule, in the order of the sections, with where it was written."""
    rules = (*RULES, *ALGORITHM_RULES)
    return [located(text, origins) for rule in rules for text in rule(config)]


def source_name(source: SourceConfig) -> str:
    """Name of a data source: written, or the file's stem, or the factory's name."""
    if source.name:
        return source.name
    if source.path:
        return PurePath(source.path).stem
    return (source.factory or "").rpartition(":")[2]


def run_wide(config: RunConfig) -> Iterator[str]:
    """Settings of the run as a whole."""
    if config.resume == "":
        yield "resume must be a run folder, `latest` or null, got ''"


def data_sources(config: RunConfig) -> Iterator[str]:
    """There is something to read, and it is clear what."""
    if not config.data.sources:
        yield (
            "data.sources needs at least one source, for example "
            "`sources: [{path: train.jsonl}]`, got none"
        )
    yield from _sources("data.sources", config.data.sources)
    yield from _sources("validate.sources", config.validate_.sources)


def _sources(key: str, sources: Sequence[SourceConfig]) -> Iterator[str]:
    for index, source in enumerate(sources):
        here = f"{key}.{index}"
        if bool(source.path) == bool(source.factory):
            have = "both" if source.path else "neither"
            yield f"{here} needs exactly one of path and factory, got {have}"
        if source.arguments and not source.factory:
            yield f"{here}.arguments are keywords of a factory, and {here}.factory is not set"
    names = [source_name(source) for source in sources]
    for name in sorted({name for name in names if name and names.count(name) > 1}):
        yield f"{key} has {names.count(name)} sources named {name!r}; give each its own `name`"


def columns(config: RunConfig) -> Iterator[str]:
    """What a row holds twice can be told apart."""
    for one, other in (("prompt", "messages"), ("chosen", "rejected")):
        name = getattr(config.data, f"{one}_key")
        if name == getattr(config.data, f"{other}_key"):
            yield f"data.{one}_key and data.{other}_key must differ, both are {name!r}"


def own_code(config: RunConfig) -> Iterator[str]:
    """A recipe's own functions and classes are named as such."""
    given = {
        "data.filter": config.data.filter,
        "rollout_worker.reward": config.rollout_worker.reward,
        "service.train_service.model_factory": config.service.train_service.model_factory,
    }
    for key, sources in (("data", config.data.sources), ("validate", config.validate_.sources)):
        given |= {f"{key}.sources.{i}.factory": source.factory for i, source in enumerate(sources)}
    for key, text in given.items():
        if text is not None and not is_reference(text):
            yield f"{key} must be `path.py:name` or `package.module:name`, got {text!r}"
    for section in ("rollout_worker", "trainer"):
        settings = getattr(config, section)
        for part in ("module_path", "class_name"):
            name = f"custom_{section}_{part}"
            value = getattr(settings, name)
            if settings.type == "custom" and not value:
                yield f"{section}.type custom needs {section}.{name}, which is not set"
            if settings.type != "custom" and value is not None:
                yield (
                    f"{section}.{name} is used only with {section}.type custom, and "
                    f"{section}.type is {settings.type}"
                )


def batch_sizes(config: RunConfig) -> Iterator[str]:
    """The counts of items, rollouts and optimizer steps fit together."""
    batch, repeats = config.data.batch_size, config.data.rollout_repeat_n
    given = config.trajectory_pool.batch_size
    if given is not None and given != batch * repeats:
        yield (
            "trajectory_pool.batch_size must equal data.batch_size x data.rollout_repeat_n = "
            f"{batch} x {repeats} = {batch * repeats}, got {given}"
        )
    steps = config.trainer.num_optimizer_steps
    if batch % steps:
        sizes = _or(batch // steps * steps, -(-batch // steps) * steps)
        divisors = [d for d in range(1, batch + 1) if batch % d == 0]
        below, above = [d for d in divisors if d < steps], [d for d in divisors if d > steps]
        yield (
            f"data.batch_size must be a multiple of trainer.num_optimizer_steps = {steps}, got "
            f"{batch}; the nearest batch sizes are {sizes}, the nearest numbers of optimizer "
            f"steps {_or(*below[-1:], *above[:1])}"
        )
    kept = config.rollout_worker.failure_policy.min_group_size
    if kept is not None and kept > repeats:
        yield (
            "rollout_worker.failure_policy.min_group_size must be at most "
            f"data.rollout_repeat_n = {repeats}, got {kept}"
        )


def _or(*numbers: int) -> str:
    return " or ".join(str(n) for n in numbers if n)


def rows(config: RunConfig) -> Iterator[str]:
    """The worker makes the rows that the trainer trains."""
    family, worker = family_of(config), config.rollout_worker.type
    if family is None or worker == "custom":
        return
    preset = PRESETS[config.trainer.algorithm.preset]
    if worker != worker_of(preset):
        reason = "it learns on sampled tokens"
        if family != "rl":
            reason = f"it needs {preset.needs[0]}, which are not sampled"
        if worker in OFFLINE_WORKERS:
            trained_by = [name for name, other in PRESETS.items() if worker_of(other) == worker]
            reason += f"; rows of {worker} are trained by {', '.join(trained_by)}"
        yield (
            f"rollout_worker.type must be {worker_of(preset)} or custom for trainer.algorithm: "
            f"{preset.name}, got {worker}: {reason}"
        )


def rewards(config: RunConfig) -> Iterator[str]:
    """Learning from rewards, and judging accuracy, need something that scores."""
    worker, validate = config.rollout_worker, config.validate_
    if worker.reward_arguments and worker.reward is None:
        yield (
            "rollout_worker.reward_arguments are keywords of rollout_worker.reward, which is "
            "not set"
        )
    if is_rl(config) and uses_reward(config) and _lacks_reward(config):
        yield (
            "rollout_worker.reward must be set for trainer.algorithm: "
            f"{config.trainer.algorithm.preset} with rollout_worker.type single_turn: "
            "`path.py:name` or `package.module:name` of a reward function"
        )
    elif validate.enabled and worker.type in _DRAWN_IN_VALIDATION and worker.reward is None:
        yield (
            "validate.enabled needs rollout_worker.reward to judge accuracy: `path.py:name` or "
            "`package.module:name` of a reward function"
        )


def _lacks_reward(config: RunConfig) -> bool:
    worker = config.rollout_worker
    return worker.type == "single_turn" and worker.reward is None


def sampling(config: RunConfig) -> Iterator[str]:
    """Training rollouts are drawn from the very distribution that is trained (FR-083)."""
    if not is_rl(config):
        return
    key, drawn = "rollout_worker.sampling", config.rollout_worker.sampling
    for name, value, off in (("top_p", drawn.top_p, 1.0), ("top_k", drawn.top_k, None)):
        if value != off:
            accepted = "null" if off is None else "1"
            yield (
                f"{key}.{name} must be {accepted} for RL training, got {value}: the engine's "
                "logprobs would be those of the kept tokens only, the trainer's those of the "
                "whole vocabulary"
            )
    if drawn.temperature == 0:
        yield (
            f"{key}.temperature must be greater than 0 for RL training, got 0: greedy rollouts "
            "of one item are all equal"
        )


def prompts(config: RunConfig) -> Iterator[str]:
    """Settings of rendering are used."""
    if config.rollout_worker.system_prompt is not None and not config.rollout_worker.chat_template:
        yield (
            "rollout_worker.system_prompt is put before `prompt` strings only when "
            "rollout_worker.chat_template is true, and it is false"
        )


def dynamic_sampling(config: RunConfig) -> Iterator[str]:
    """Filters exist, and refilling has something to refill."""
    dynamic = config.trajectory_pool.dynamic_sampling
    key, worker = "trajectory_pool.dynamic_sampling", config.rollout_worker.type
    for index, name in enumerate(dynamic.filters):
        if name not in GROUP_FILTERS and not is_reference(name):
            yield (
                f"{key}.filters.{index} must be {' or '.join(GROUP_FILTERS)}, or a user function "
                f"`path.py:name`, got {name!r}"
            )
    unscored = worker in OFFLINE_WORKERS or _lacks_reward(config)
    if CONSTANT_REWARD in dynamic.filters and unscored:
        yield (
            f"{key}.filters: {CONSTANT_REWARD} would drop every group, since rows of "
            f"rollout_worker.type {worker} have no reward"
        )
    if dynamic.refill_factor and not dynamic.filters:
        yield (
            f"{key}.refill_factor {dynamic.refill_factor} replaces filtered groups, and "
            f"{key}.filters is empty"
        )


def staleness(config: RunConfig) -> Iterator[str]:
    """How old a trained token may be."""
    weight, pool = config.weight, config.trajectory_pool
    threshold = weight.staleness_threshold
    if weight.mode != "sync":
        yield (
            f"weight.mode must be sync, got {weight.mode}: this version changes weights only "
            "between batches; the asynchronous modes need engines that stamp versions while "
            "rollouts run"
        )
    elif threshold:
        yield f"weight.staleness_threshold must be 0 with weight.mode sync, got {threshold}"
    if pool.hand_out == "windowed" and pool.window > threshold + 1:
        yield (
            "trajectory_pool.window must be at most weight.staleness_threshold + 1 = "
            f"{threshold + 1}, got {pool.window}"
        )
    if pool.hand_out == "fifo" and pool.window != 1:
        yield (
            "trajectory_pool.window is used only with trajectory_pool.hand_out windowed, got "
            f"{pool.window} with fifo"
        )


def optimizer(config: RunConfig) -> Iterator[str]:
    """Numbers that the schema cannot bound."""
    for index, beta in enumerate(config.trainer.optimizer.betas):
        if not 0 <= beta < 1:
            yield f"trainer.optimizer.betas.{index} must be at least 0 and less than 1, got {beta}"


def validation(config: RunConfig) -> Iterator[str]:
    """Validation has data, happens at some time, and serves what depends on it."""
    validate, trainer = config.validate_, config.trainer
    if validate.enabled and not validate.sources:
        yield "validate.enabled needs validate.sources, which is empty"
    if validate.enabled and not (validate.at_start or validate.at_end or validate.every_versions):
        yield (
            "validate.enabled is true, but validation never happens: set validate.at_start, "
            "validate.at_end or validate.every_versions"
        )
    if validate.success_part == "":
        yield "validate.success_part must be a name or null, got ''"
    during = validate.enabled and validate.every_versions
    if trainer.stop_at_accuracy is not None and not during:
        yield (
            "trainer.stop_at_accuracy needs validation during training: set validate.enabled: "
            "true and validate.every_versions"
        )
    if trainer.num_steps == 0 and not validate.enabled:
        yield "trainer.num_steps is 0 and validate.enabled is false: there is nothing to do"


def lengths(config: RunConfig) -> Iterator[str]:
    """A prompt and its completion fit into the context."""
    context = config.service.inference_service.max_context
    if context is None:
        return
    given = {
        "rollout_worker.sampling.max_tokens": config.rollout_worker.sampling.max_tokens,
        "data.max_prompt_tokens": config.data.max_prompt_tokens or 0,
    }
    if config.validate_.enabled:
        given["validate.sampling.max_tokens"] = config.validate_.sampling.max_tokens
    for key, longest in given.items():
        if longest >= context:
            yield (
                f"{key} must be less than service.inference_service.max_context = {context}, got "
                f"{longest}"
            )


def training(config: RunConfig) -> Iterator[str]:
    """The model comes from exactly one place."""
    key, settings = "service.train_service", config.service.train_service
    if settings.model_path and settings.model_factory:
        yield f"{key}.model_path and {key}.model_factory exclude each other, got both"
    if not (settings.model_path or settings.model_factory or settings.url):
        yield (
            f"{key} needs a model: model_path (a Hugging Face model folder), model_factory "
            "(`path.py:name`), or the url of a running train server; got none"
        )


def addresses(config: RunConfig) -> Iterator[str]:
    """A service is here or at an address, and on a device that has a name."""
    for name in ("inference_service", "train_service"):
        key, settings = f"service.{name}", getattr(config.service, name)
        if settings.url and settings.placement == "in_process":
            yield (
                f"{key}.url says that the service already runs, {key}.placement in_process that it "
                "is started here; leave one out"
            )
        if settings.url is not None and not _is_http(settings.url):
            shown = redact_text(settings.url)
            yield f"{key}.url must be an http:// or https:// address, got {shown!r}"
        if settings.api_key and not settings.url:
            yield f"{key}.api_key is sent to {key}.url, which is not set"
        if not _DEVICE.fullmatch(settings.device):
            yield f"{key}.device must be auto, cpu, mps, cuda or cuda:N, got {settings.device!r}"


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def determinism(config: RunConfig) -> Iterator[str]:
    """Same bits whatever the order of requests need one order of versions."""
    if config.deterministic and config.weight.mode != "sync":
        yield f"deterministic: true needs weight.mode sync, got {config.weight.mode}"


RULES = (
    *(run_wide, data_sources, columns, own_code, batch_sizes, rows, rewards, sampling, prompts),
    *(dynamic_sampling, staleness, optimizer, validation),
    *(lengths, training, addresses, determinism),
)
