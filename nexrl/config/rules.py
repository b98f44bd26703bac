"""Rules between keys: combinations that the schema allows and that cannot work.

Each rule is a function of the configuration that yields sentences; it names the keys, what they
are and what would be accepted. Facts about the machine (files, ports, endpoints) are checked by
the plan, not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from nexrl.config.nodes import Origin
from nexrl.config.rules_service import SERVICE_RULES
from nexrl.config.schema import RunConfig, SamplingConfig, SourceConfig
from nexrl.config.values import Values

GROUP_RELATIVE_ADVANTAGES = ("grpo", "dr_grpo", "rloo")
"""Estimators that compare the rollouts of one item: a group of one has advantage 0."""
UNBOUNDED_LOSSES = ("importance_sampling", "reinforce")
"""Losses whose update is not bounded when the tokens come from an older policy."""
CONSTANT_REWARD = "constant_reward"
"""The built-in filter of trajectory_pool.dynamic_sampling."""


def rule_problems(config: RunConfig, origins: Mapping[str, Origin]) -> list[str]:
    """A sentence for every broken rule, in the order of the sections."""
    values = Values(config, origins)
    return [text for rule in (*RULES, *SERVICE_RULES) for text in rule(values)]


def source_name(source: SourceConfig) -> str:
    """Name of a data source: written, or the file's stem, or the factory's name."""
    if source.name:
        return source.name
    if source.path:
        return PurePath(source.path).stem
    return (source.factory or "").rpartition(":")[2]


def _sources(values: Values, key: str, sources: Sequence[SourceConfig]) -> Iterator[str]:
    for index, source in enumerate(sources):
        here = f"{key}.{index}"
        if bool(source.path) == bool(source.factory):
            have = "both" if source.path else "neither"
            yield f"{here} needs exactly one of path and factory, got {have}{values.at(here)}"
        if source.arguments and not source.factory:
            yield (
                f"{here}.arguments are keywords of a factory, and {here}.factory is not set"
                f"{values.at(f'{here}.arguments')}"
            )
        if source.factory and not _is_reference(source.factory):
            yield _not_a_reference(values, f"{here}.factory", source.factory)
    names = [source_name(source) for source in sources]
    for name in sorted({name for name in names if name and names.count(name) > 1}):
        yield f"{key} has {names.count(name)} sources named {name!r}; give each its own `name`{values.at(key)}"


def data_sources(values: Values) -> Iterator[str]:
    """There is something to read, and it is clear what."""
    data = values.config.data
    if not data.sources:
        yield (
            "data.sources needs at least one source, for example "
            f"`sources: [{{path: train.jsonl}}]`, got none{values.at('data.sources')}"
        )
    yield from _sources(values, "data.sources", data.sources)
    if data.prompt_key == data.messages_key:
        yield (
            f"data.prompt_key and data.messages_key must differ, both are {data.prompt_key!r}"
            f"{values.at('data.prompt_key', 'data.messages_key')}"
        )
    if data.filter is not None and not _is_reference(data.filter):
        yield _not_a_reference(values, "data.filter", data.filter)


def batch_sizes(values: Values) -> Iterator[str]:
    """The counts of items, rollouts and optimizer steps fit together."""
    data, trainer = values.config.data, values.config.trainer
    product = data.batch_size * data.rollout_repeat_n
    given = values.config.trajectory_pool.batch_size
    if given is not None and given != product:
        yield (
            "trajectory_pool.batch_size must equal data.batch_size x data.rollout_repeat_n = "
            f"{data.batch_size} x {data.rollout_repeat_n} = {product}, got {given}"
            f"{values.at('trajectory_pool.batch_size')}"
        )
    steps = trainer.num_optimizer_steps
    if data.batch_size % steps:
        sizes = _or(
            [
                m
                for m in (data.batch_size // steps * steps, -(-data.batch_size // steps) * steps)
                if m
            ]
        )
        yield (
            f"data.batch_size must be a multiple of trainer.num_optimizer_steps = {steps}, got "
            f"{data.batch_size}; the nearest batch sizes are {sizes}, the nearest numbers of "
            f"optimizer steps {_or(_nearest_divisors(data.batch_size, steps))}"
            f"{values.at('data.batch_size', 'trainer.num_optimizer_steps')}"
        )
    kept = values.config.rollout_worker.failure_policy.min_group_size
    if kept is not None and kept > data.rollout_repeat_n:
        yield (
            "rollout_worker.failure_policy.min_group_size must be at most "
            f"data.rollout_repeat_n = {data.rollout_repeat_n}, got {kept}"
            f"{values.at('rollout_worker.failure_policy.min_group_size')}"
        )


def custom_types(values: Values) -> Iterator[str]:
    """`custom` comes with a module and a class, and they with `custom`."""
    for section, what in (("rollout_worker", "rollout_worker"), ("trainer", "trainer")):
        settings = getattr(values.config, section)
        for part in ("module_path", "class_name"):
            name = f"custom_{what}_{part}"
            given = getattr(settings, name)
            if settings.type == "custom" and not given:
                yield (
                    f"{section}.type custom needs {section}.{name}, which is not set"
                    f"{values.at(f'{section}.type')}"
                )
            if settings.type != "custom" and given is not None:
                yield (
                    f"{section}.{name} is used only with {section}.type custom, and "
                    f"{section}.type is {settings.type}{values.at(f'{section}.{name}')}"
                )


def rewards(values: Values) -> Iterator[str]:
    """Learning from rewards, and judging accuracy, need something that scores."""
    worker, validate = values.config.rollout_worker, values.config.validate_
    if worker.reward is not None and not _is_reference(worker.reward):
        yield _not_a_reference(values, "rollout_worker.reward", worker.reward)
    if worker.reward_arguments and worker.reward is None:
        yield (
            "rollout_worker.reward_arguments are keywords of rollout_worker.reward, which is "
            f"not set{values.at('rollout_worker.reward_arguments')}"
        )
    if values.is_rl and worker.type == "supervised":
        yield (
            f"trainer.type {values.config.trainer.type} learns from rewards on sampled tokens; "
            "rollout_worker.type supervised has neither: use trainer.type sft, or "
            f"rollout_worker.type single_turn or custom{values.at('rollout_worker.type')}"
        )
    elif values.is_rl and worker.type == "single_turn" and worker.reward is None:
        yield (
            f"rollout_worker.reward must be set for trainer.type {values.config.trainer.type} "
            "with rollout_worker.type single_turn: `path.py:name` or `package.module:name` "
            f"of a reward function{values.at('rollout_worker.reward', 'trainer.type')}"
        )
    elif validate.enabled and worker.type != "custom" and worker.reward is None:
        yield (
            "validate.enabled needs rollout_worker.reward to judge accuracy: `path.py:name` or "
            f"`package.module:name` of a reward function{values.at('validate.enabled')}"
        )


def sampling(values: Values) -> Iterator[str]:
    """Training rollouts are drawn from the very distribution that is trained (FR-083)."""
    worker = values.config.rollout_worker
    drawn = worker.sampling
    if not values.is_rl:
        return
    key = "rollout_worker.sampling"
    for name, value, off in (("top_p", drawn.top_p, 1.0), ("top_k", drawn.top_k, None)):
        if value != off:
            accepted = "null" if off is None else "1"
            yield (
                f"{key}.{name} must be {accepted} for RL training, got {value}: the engine's "
                "logprobs would be those of the kept tokens only, the trainer's those of the "
                f"whole vocabulary{values.at(f'{key}.{name}')}"
            )
    if drawn.temperature == 0:
        yield (
            f"{key}.temperature must be greater than 0 for RL training, got 0: greedy rollouts "
            f"of one item are all equal{values.at(f'{key}.temperature')}"
        )


def prompts(values: Values) -> Iterator[str]:
    """Settings of rendering are used."""
    worker = values.config.rollout_worker
    if worker.system_prompt is not None and not worker.chat_template:
        yield (
            "rollout_worker.system_prompt is put before `prompt` strings only when "
            "rollout_worker.chat_template is true, and it is false"
            f"{values.at('rollout_worker.system_prompt')}"
        )


def dynamic_sampling(values: Values) -> Iterator[str]:
    """Filters exist, and refilling has something to refill."""
    dynamic = values.config.trajectory_pool.dynamic_sampling
    key = "trajectory_pool.dynamic_sampling"
    for index, name in enumerate(dynamic.filters):
        if name != CONSTANT_REWARD and not _is_reference(name):
            yield (
                f"{key}.filters.{index} must be {CONSTANT_REWARD} or a user function "
                f"`path.py:name`, got {name!r}{values.at(f'{key}.filters.{index}')}"
            )
    if CONSTANT_REWARD in dynamic.filters and values.config.rollout_worker.type == "supervised":
        yield (
            f"{key}.filters: {CONSTANT_REWARD} would drop every group, since rows of "
            f"rollout_worker.type supervised have no reward{values.at(f'{key}.filters')}"
        )
    if dynamic.refill_factor and not dynamic.filters:
        yield (
            f"{key}.refill_factor {dynamic.refill_factor} replaces filtered groups, and "
            f"{key}.filters is empty{values.at(f'{key}.refill_factor')}"
        )


def staleness(values: Values) -> Iterator[str]:
    """How old a trained token may be."""
    weight, pool = values.config.weight, values.config.trajectory_pool
    threshold = weight.staleness_threshold
    if weight.mode != "sync":
        yield (
            f"weight.mode must be sync, got {weight.mode}: this version changes weights only "
            "between batches; the asynchronous modes need engines that stamp versions while "
            f"rollouts run{values.at('weight.mode')}"
        )
    elif threshold:
        yield (
            "weight.staleness_threshold must be 0 with weight.mode sync, got "
            f"{threshold}{values.at('weight.staleness_threshold')}"
        )
    if pool.hand_out == "windowed" and pool.window > threshold + 1:
        yield (
            f"trajectory_pool.window must be at most weight.staleness_threshold + 1 = "
            f"{threshold + 1}, got {pool.window}{values.at('trajectory_pool.window')}"
        )
    if pool.hand_out == "fifo" and pool.window != 1:
        yield (
            "trajectory_pool.window is used only with trajectory_pool.hand_out windowed, got "
            f"{pool.window} with fifo{values.at('trajectory_pool.window')}"
        )


def advantages(values: Values) -> Iterator[str]:
    """The gradient is not zero by construction, and is bounded off-policy."""
    if not values.is_rl:
        return
    config = values.config
    algorithm, steps = config.trainer.algorithm, config.trainer.num_optimizer_steps
    if algorithm.advantage in GROUP_RELATIVE_ADVANTAGES and config.data.rollout_repeat_n == 1:
        yield (
            "data.rollout_repeat_n must be at least 2 for trainer.algorithm.advantage "
            f"{algorithm.advantage}, got 1: a group of one always has advantage 0"
            f"{values.at('data.rollout_repeat_n', 'trainer.algorithm.advantage')}"
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
            f"none to allow it{values.at('trainer.algorithm.loss.name')}"
        )


def optimizer(values: Values) -> Iterator[str]:
    """Numbers that the schema cannot bound."""
    for index, beta in enumerate(values.config.trainer.optimizer.betas):
        if not 0 <= beta < 1:
            key = f"trainer.optimizer.betas.{index}"
            yield f"{key} must be at least 0 and less than 1, got {beta}{values.at(key)}"


def validation(values: Values) -> Iterator[str]:
    """Validation has data, happens at some time, and serves what depends on it."""
    config, validate = values.config, values.config.validate_
    yield from _sources(values, "validate.sources", validate.sources)
    if validate.enabled and not validate.sources:
        yield f"validate.enabled needs validate.sources, which is empty{values.at('validate.enabled')}"
    if validate.enabled and not (validate.at_start or validate.at_end or validate.every_versions):
        yield (
            "validate.enabled is true, but validation never happens: set validate.at_start, "
            f"validate.at_end or validate.every_versions{values.at('validate.enabled')}"
        )
    if validate.success_part == "":
        yield f"validate.success_part must be a name or null, got ''{values.at('validate.success_part')}"
    if config.trainer.stop_at_accuracy is not None and not (
        validate.enabled and validate.every_versions
    ):
        yield (
            "trainer.stop_at_accuracy needs validation during training: set validate.enabled: "
            f"true and validate.every_versions{values.at('trainer.stop_at_accuracy')}"
        )
    if config.trainer.num_steps == 0 and not validate.enabled:
        yield (
            "trainer.num_steps is 0 and validate.enabled is false: there is nothing to do"
            f"{values.at('trainer.num_steps')}"
        )


def lengths(values: Values) -> Iterator[str]:
    """A prompt and its completion fit into the context."""
    context = values.config.service.inference_service.max_context
    if context is None:
        return
    longest = values.config.data.max_prompt_tokens
    drawn: list[tuple[str, SamplingConfig]] = [
        ("rollout_worker.sampling", values.config.rollout_worker.sampling)
    ]
    if values.config.validate_.enabled:
        drawn.append(("validate.sampling", values.config.validate_.sampling))
    for key, parameters in drawn:
        if parameters.max_tokens >= context:
            yield (
                f"{key}.max_tokens must be less than service.inference_service.max_context = "
                f"{context}, got {parameters.max_tokens}{values.at(f'{key}.max_tokens')}"
            )
    if longest is not None and longest >= context:
        yield (
            "data.max_prompt_tokens must be less than service.inference_service.max_context = "
            f"{context}, got {longest}{values.at('data.max_prompt_tokens')}"
        )


def run_wide(values: Values) -> Iterator[str]:
    """Settings of the run as a whole."""
    if values.config.resume == "":
        yield f"resume must be a run folder, `latest` or null, got ''{values.at('resume')}"


RULES = (
    run_wide,
    data_sources,
    batch_sizes,
    custom_types,
    rewards,
    sampling,
    prompts,
    dynamic_sampling,
    staleness,
    advantages,
    optimizer,
    validation,
    lengths,
)


def _is_reference(text: str) -> bool:
    module, colon, name = text.rpartition(":")
    return bool(colon and module.strip() and name.isidentifier())


def _not_a_reference(values: Values, key: str, text: str) -> str:
    return f"{key} must be `path.py:name` or `package.module:name`, got {text!r}{values.at(key)}"


def _nearest_divisors(number: int, near: int) -> list[int]:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < near][-1:]
    above = [d for d in divisors if d > near][:1]
    return below + above


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(str(n) for n in numbers)
