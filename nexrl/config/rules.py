"""Rules between keys: combinations that the schema allows and that cannot work.

Each rule is a function of the configuration that yields sentences; it names the keys, what they
are and what would be accepted. Facts about the machine (files, ports, endpoints) are checked by
the plan, not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from urllib.parse import urlsplit

from nexrl.config.nodes import Origin
from nexrl.config.problems import origin_of
from nexrl.config.redact import redact_text
from nexrl.config.schema import RunConfig, SamplingConfig, SourceConfig

Broken = tuple[str, ...]
"""A sentence, and the keys that it speaks of: the first that is written is shown with its line."""
RL_TRAINERS = ("grpo",)
"""Built-in trainers that learn from rewards on sampled tokens."""
GROUP_RELATIVE_ADVANTAGES = ("grpo", "dr_grpo", "rloo")
"""Estimators that compare the rollouts of one item: a group of one has advantage 0."""
UNBOUNDED_LOSSES = ("importance_sampling", "reinforce")
"""Losses whose update is not bounded when the tokens come from an older policy."""
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
CONSTANT_REWARD = "constant_reward"
"""The built-in filter of trajectory_pool.dynamic_sampling."""


def rule_problems(config: RunConfig, origins: Mapping[str, Origin]) -> list[str]:
    """A sentence for every broken rule, in the order of the sections, with where it was written."""
    return [
        text
        + next((origin_of(tuple(key.split(".")), origins) for key in keys if key in origins), "")
        for rule in RULES
        for text, *keys in rule(config)
    ]


def is_rl(config: RunConfig) -> bool:
    """Whether the built-in trainer learns from rewards on sampled tokens."""
    return config.trainer.type in RL_TRAINERS


def source_name(source: SourceConfig) -> str:
    """Name of a data source: written, or the file's stem, or the factory's name."""
    if source.name:
        return source.name
    if source.path:
        return PurePath(source.path).stem
    return (source.factory or "").rpartition(":")[2]


def _sources(key: str, sources: Sequence[SourceConfig]) -> Iterator[Broken]:
    for index, source in enumerate(sources):
        here = f"{key}.{index}"
        if bool(source.path) == bool(source.factory):
            have = "both" if source.path else "neither"
            yield f"{here} needs exactly one of path and factory, got {have}", here
        if source.arguments and not source.factory:
            yield (
                f"{here}.arguments are keywords of a factory, and {here}.factory is not set",
                f"{here}.arguments",
            )
        if source.factory and not _is_reference(source.factory):
            yield _not_a_reference(f"{here}.factory", source.factory)
    names = [source_name(source) for source in sources]
    for name in sorted({name for name in names if name and names.count(name) > 1}):
        yield f"{key} has {names.count(name)} sources named {name!r}; give each its own `name`", key


def data_sources(config: RunConfig) -> Iterator[Broken]:
    """There is something to read, and it is clear what."""
    data = config.data
    if not data.sources:
        yield (
            "data.sources needs at least one source, for example "
            "`sources: [{path: train.jsonl}]`, got none",
            "data.sources",
        )
    yield from _sources("data.sources", data.sources)
    if data.prompt_key == data.messages_key:
        yield (
            f"data.prompt_key and data.messages_key must differ, both are {data.prompt_key!r}",
            "data.prompt_key",
            "data.messages_key",
        )
    if data.filter is not None and not _is_reference(data.filter):
        yield _not_a_reference("data.filter", data.filter)


def batch_sizes(config: RunConfig) -> Iterator[Broken]:
    """The counts of items, rollouts and optimizer steps fit together."""
    data, trainer = config.data, config.trainer
    product = data.batch_size * data.rollout_repeat_n
    given = config.trajectory_pool.batch_size
    if given is not None and given != product:
        yield (
            "trajectory_pool.batch_size must equal data.batch_size x data.rollout_repeat_n = "
            f"{data.batch_size} x {data.rollout_repeat_n} = {product}, got {given}",
            "trajectory_pool.batch_size",
        )
    steps = trainer.num_optimizer_steps
    if data.batch_size % steps:
        near = (data.batch_size // steps * steps, -(-data.batch_size // steps) * steps)
        sizes = _or([size for size in near if size])
        yield (
            f"data.batch_size must be a multiple of trainer.num_optimizer_steps = {steps}, got "
            f"{data.batch_size}; the nearest batch sizes are {sizes}, the nearest numbers of "
            f"optimizer steps {_or(_nearest_divisors(data.batch_size, steps))}",
            "data.batch_size",
            "trainer.num_optimizer_steps",
        )
    kept = config.rollout_worker.failure_policy.min_group_size
    if kept is not None and kept > data.rollout_repeat_n:
        yield (
            "rollout_worker.failure_policy.min_group_size must be at most "
            f"data.rollout_repeat_n = {data.rollout_repeat_n}, got {kept}",
            "rollout_worker.failure_policy.min_group_size",
        )


def custom_types(config: RunConfig) -> Iterator[Broken]:
    """`custom` comes with a module and a class, and they with `custom`."""
    for section in ("rollout_worker", "trainer"):
        settings = getattr(config, section)
        for part in ("module_path", "class_name"):
            name = f"custom_{section}_{part}"
            given = getattr(settings, name)
            if settings.type == "custom" and not given:
                yield (
                    f"{section}.type custom needs {section}.{name}, which is not set",
                    f"{section}.type",
                )
            if settings.type != "custom" and given is not None:
                yield (
                    f"{section}.{name} is used only with {section}.type custom, and "
                    f"{section}.type is {settings.type}",
                    f"{section}.{name}",
                )


def rewards(config: RunConfig) -> Iterator[Broken]:
    """Learning from rewards, and judging accuracy, need something that scores."""
    worker, validate = config.rollout_worker, config.validate_
    if worker.reward is not None and not _is_reference(worker.reward):
        yield _not_a_reference("rollout_worker.reward", worker.reward)
    if worker.reward_arguments and worker.reward is None:
        yield (
            "rollout_worker.reward_arguments are keywords of rollout_worker.reward, which is "
            "not set",
            "rollout_worker.reward_arguments",
        )
    if is_rl(config) and worker.type == "supervised":
        yield (
            f"trainer.type {config.trainer.type} learns from rewards on sampled tokens; "
            "rollout_worker.type supervised has neither: use trainer.type sft, or "
            f"rollout_worker.type single_turn or custom",
            "rollout_worker.type",
        )
    elif is_rl(config) and worker.type == "single_turn" and worker.reward is None:
        yield (
            f"rollout_worker.reward must be set for trainer.type {config.trainer.type} "
            "with rollout_worker.type single_turn: `path.py:name` or `package.module:name` "
            f"of a reward function",
            "rollout_worker.reward",
            "trainer.type",
        )
    elif validate.enabled and worker.type != "custom" and worker.reward is None:
        yield (
            "validate.enabled needs rollout_worker.reward to judge accuracy: `path.py:name` or "
            "`package.module:name` of a reward function",
            "validate.enabled",
        )


def sampling(config: RunConfig) -> Iterator[Broken]:
    """Training rollouts are drawn from the very distribution that is trained (FR-083)."""
    worker = config.rollout_worker
    drawn = worker.sampling
    if not is_rl(config):
        return
    key = "rollout_worker.sampling"
    for name, value, off in (("top_p", drawn.top_p, 1.0), ("top_k", drawn.top_k, None)):
        if value != off:
            accepted = "null" if off is None else "1"
            yield (
                f"{key}.{name} must be {accepted} for RL training, got {value}: the engine's "
                "logprobs would be those of the kept tokens only, the trainer's those of the "
                f"whole vocabulary",
                f"{key}.{name}",
            )
    if drawn.temperature == 0:
        yield (
            f"{key}.temperature must be greater than 0 for RL training, got 0: greedy rollouts "
            f"of one item are all equal",
            f"{key}.temperature",
        )


def prompts(config: RunConfig) -> Iterator[Broken]:
    """Settings of rendering are used."""
    worker = config.rollout_worker
    if worker.system_prompt is not None and not worker.chat_template:
        yield (
            "rollout_worker.system_prompt is put before `prompt` strings only when "
            "rollout_worker.chat_template is true, and it is false",
            "rollout_worker.system_prompt",
        )


def dynamic_sampling(config: RunConfig) -> Iterator[Broken]:
    """Filters exist, and refilling has something to refill."""
    dynamic = config.trajectory_pool.dynamic_sampling
    key = "trajectory_pool.dynamic_sampling"
    for index, name in enumerate(dynamic.filters):
        if name != CONSTANT_REWARD and not _is_reference(name):
            yield (
                f"{key}.filters.{index} must be {CONSTANT_REWARD} or a user function "
                f"`path.py:name`, got {name!r}",
                f"{key}.filters.{index}",
            )
    if CONSTANT_REWARD in dynamic.filters and config.rollout_worker.type == "supervised":
        yield (
            f"{key}.filters: {CONSTANT_REWARD} would drop every group, since rows of "
            f"rollout_worker.type supervised have no reward",
            f"{key}.filters",
        )
    if dynamic.refill_factor and not dynamic.filters:
        yield (
            f"{key}.refill_factor {dynamic.refill_factor} replaces filtered groups, and "
            f"{key}.filters is empty",
            f"{key}.refill_factor",
        )


def staleness(config: RunConfig) -> Iterator[Broken]:
    """How old a trained token may be."""
    weight, pool = config.weight, config.trajectory_pool
    threshold = weight.staleness_threshold
    if weight.mode != "sync":
        yield (
            f"weight.mode must be sync, got {weight.mode}: this version changes weights only "
            "between batches; the asynchronous modes need engines that stamp versions while "
            f"rollouts run",
            "weight.mode",
        )
    elif threshold:
        yield (
            f"weight.staleness_threshold must be 0 with weight.mode sync, got {threshold}",
            "weight.staleness_threshold",
        )
    if pool.hand_out == "windowed" and pool.window > threshold + 1:
        yield (
            f"trajectory_pool.window must be at most weight.staleness_threshold + 1 = "
            f"{threshold + 1}, got {pool.window}",
            "trajectory_pool.window",
        )
    if pool.hand_out == "fifo" and pool.window != 1:
        yield (
            "trajectory_pool.window is used only with trajectory_pool.hand_out windowed, got "
            f"{pool.window} with fifo",
            "trajectory_pool.window",
        )


def advantages(config: RunConfig) -> Iterator[Broken]:
    """The gradient is not zero by construction, and is bounded off-policy."""
    if not is_rl(config):
        return
    algorithm, steps = config.trainer.algorithm, config.trainer.num_optimizer_steps
    if algorithm.advantage in GROUP_RELATIVE_ADVANTAGES and config.data.rollout_repeat_n == 1:
        yield (
            "data.rollout_repeat_n must be at least 2 for trainer.algorithm.advantage "
            f"{algorithm.advantage}, got 1: a group of one always has advantage 0",
            "data.rollout_repeat_n",
            "trainer.algorithm.advantage",
        )
    off_policy = config.weight.staleness_threshold > 0 or steps > 1
    if off_policy and algorithm.loss.name in UNBOUNDED_LOSSES and algorithm.trust_region == "auto":
        reason = (
            f"trainer.num_optimizer_steps is {steps}"
            if steps > 1
            else f"weight.staleness_threshold is {config.weight.staleness_threshold}"
        )
        yield (
            f"trainer.algorithm.loss.name {algorithm.loss.name} is unbounded and {reason}, so "
            "tokens are trained off-policy: use ppo, or write trainer.algorithm.trust_region: "
            f"none to allow it",
            "trainer.algorithm.loss.name",
        )


def optimizer(config: RunConfig) -> Iterator[Broken]:
    """Numbers that the schema cannot bound."""
    for index, beta in enumerate(config.trainer.optimizer.betas):
        if not 0 <= beta < 1:
            key = f"trainer.optimizer.betas.{index}"
            yield f"{key} must be at least 0 and less than 1, got {beta}", key


def validation(config: RunConfig) -> Iterator[Broken]:
    """Validation has data, happens at some time, and serves what depends on it."""
    validate = config.validate_
    yield from _sources("validate.sources", validate.sources)
    if validate.enabled and not validate.sources:
        yield "validate.enabled needs validate.sources, which is empty", "validate.enabled"
    if validate.enabled and not (validate.at_start or validate.at_end or validate.every_versions):
        yield (
            "validate.enabled is true, but validation never happens: set validate.at_start, "
            "validate.at_end or validate.every_versions",
            "validate.enabled",
        )
    if validate.success_part == "":
        yield "validate.success_part must be a name or null, got ''", "validate.success_part"
    if config.trainer.stop_at_accuracy is not None and not (
        validate.enabled and validate.every_versions
    ):
        yield (
            "trainer.stop_at_accuracy needs validation during training: set validate.enabled: "
            "true and validate.every_versions",
            "trainer.stop_at_accuracy",
        )
    if config.trainer.num_steps == 0 and not validate.enabled:
        yield (
            "trainer.num_steps is 0 and validate.enabled is false: there is nothing to do",
            "trainer.num_steps",
        )


def lengths(config: RunConfig) -> Iterator[Broken]:
    """A prompt and its completion fit into the context."""
    context = config.service.inference_service.max_context
    if context is None:
        return
    longest = config.data.max_prompt_tokens
    drawn: list[tuple[str, SamplingConfig]] = [
        ("rollout_worker.sampling", config.rollout_worker.sampling)
    ]
    if config.validate_.enabled:
        drawn.append(("validate.sampling", config.validate_.sampling))
    for key, parameters in drawn:
        if parameters.max_tokens >= context:
            yield (
                f"{key}.max_tokens must be less than service.inference_service.max_context = "
                f"{context}, got {parameters.max_tokens}",
                f"{key}.max_tokens",
            )
    if longest is not None and longest >= context:
        yield (
            "data.max_prompt_tokens must be less than service.inference_service.max_context = "
            f"{context}, got {longest}",
            "data.max_prompt_tokens",
        )


def run_wide(config: RunConfig) -> Iterator[Broken]:
    """Settings of the run as a whole."""
    if config.resume == "":
        yield "resume must be a run folder, `latest` or null, got ''", "resume"


def inference(config: RunConfig) -> Iterator[Broken]:
    """An engine is either ours to start or already somewhere."""
    key = "service.inference_service"
    settings = config.service.inference_service
    if settings.engine == "openai" and not settings.url:
        yield (
            f"{key}.engine openai needs {key}.url, for example http://127.0.0.1:8000/v1",
            f"{key}.engine",
        )
    if settings.engine == "openai" and settings.placement == "in_process":
        yield (
            f"{key}.placement in_process is only for engine builtin; an openai engine runs "
            f"elsewhere",
            f"{key}.placement",
        )
    elif settings.url and settings.placement == "in_process":
        yield _both_placed(key)
    yield from _address(key, settings.url, settings.api_key)
    yield from _device(key, settings.device)


def training(config: RunConfig) -> Iterator[Broken]:
    """The model comes from exactly one place."""
    key = "service.train_service"
    settings = config.service.train_service
    if settings.model_path and settings.model_factory:
        yield (
            f"{key}.model_path and {key}.model_factory exclude each other, got both",
            f"{key}.model_factory",
        )
    if not (settings.model_path or settings.model_factory or settings.url):
        yield (
            f"{key} needs a model: model_path (a Hugging Face model folder), model_factory "
            f"(`path.py:name`), or the url of a running train server; got none",
            key,
        )
    if settings.model_factory and not _is_reference(settings.model_factory):
        yield _not_a_reference(f"{key}.model_factory", settings.model_factory)
    if settings.url and settings.placement == "in_process":
        yield _both_placed(key)
    yield from _address(key, settings.url, settings.api_key)
    yield from _device(key, settings.device)


def determinism(config: RunConfig) -> Iterator[Broken]:
    """Same bits whatever the order of requests: only our own engine promises it."""
    if not config.deterministic:
        return
    engine = config.service.inference_service.engine
    if engine != "builtin":
        yield (
            f"deterministic: true needs service.inference_service.engine builtin, got {engine}: "
            f"other engines promise only the distribution",
            "deterministic",
        )
    if config.weight.mode != "sync":
        yield (
            f"deterministic: true needs weight.mode sync, got {config.weight.mode}",
            "deterministic",
        )


RULES = (
    *(run_wide, data_sources, batch_sizes, custom_types, rewards, sampling, prompts),
    *(dynamic_sampling, staleness, advantages, optimizer, validation, lengths),
    *(inference, training, determinism),
)


def _is_reference(text: str) -> bool:
    module, colon, name = text.rpartition(":")
    return bool(colon and module.strip() and name.isidentifier())


def _not_a_reference(key: str, text: str) -> Broken:
    return f"{key} must be `path.py:name` or `package.module:name`, got {text!r}", key


def _nearest_divisors(number: int, near: int) -> list[int]:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < near][-1:]
    above = [d for d in divisors if d > near][:1]
    return below + above


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(str(n) for n in numbers)


def _both_placed(key: str) -> Broken:
    return (
        f"{key}.url says that the service already runs, {key}.placement in_process that it is "
        f"started here; leave one out",
        f"{key}.placement",
    )


def _address(key: str, url: str | None, api_key: str | None) -> Iterator[Broken]:
    if url is not None and not _is_http(url):
        yield (
            f"{key}.url must be an http:// or https:// address, got {redact_text(url)!r}",
            f"{key}.url",
        )
    if api_key and not url:
        yield f"{key}.api_key is sent to {key}.url, which is not set", f"{key}.api_key"


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def _device(key: str, device: str) -> Iterator[Broken]:
    if not _DEVICE.fullmatch(device):
        yield (
            f"{key}.device must be auto, cpu, mps, cuda or cuda:N, got {device!r}",
            f"{key}.device",
        )
