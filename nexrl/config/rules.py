"""Rules between keys: combinations that the schema allows and that cannot work.

Each rule is a function of the configuration that yields sentences; it names the keys, what they
are and what would be accepted. Facts about the machine (files, ports, endpoints) are checked by
the plan, not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from nexrl.algorithms.filters import CONSTANT_REWARD, GROUP_FILTERS
from nexrl.algorithms.presets import PRESETS
from nexrl.config.nodes import Origin
from nexrl.config.problems import origin_of
from nexrl.config.rule import (
    Broken,
    family_of,
    is_reference,
    is_rl,
    not_a_reference,
    uses_reward,
)
from nexrl.config.rules_algorithm import ALGORITHM_RULES
from nexrl.config.rules_services import SERVICE_RULES
from nexrl.config.schema import RunConfig, SourceConfig

OFFLINE_WORKERS = ("supervised", "preference", "labelled", "process")
"""Built-in workers that read their rows: nothing is sampled, and nothing is scored."""
_DRAWN_IN_VALIDATION = ("single_turn", "supervised")
"""Built-in workers whose held-out items are answered; others are judged by their own loss."""


def rule_problems(config: RunConfig, origins: Mapping[str, Origin]) -> list[str]:
    """A sentence for every broken rule, in the order of the sections, with where it was written."""
    found = [
        broken for rule in (*RULES, *ALGORITHM_RULES, *SERVICE_RULES) for broken in rule(config)
    ]
    return [text + _where(keys, origins) for text, *keys in found]


def _where(keys: Sequence[str], origins: Mapping[str, Origin]) -> str:
    """Line of the first key that is written, else of the first that came with something written."""
    known = sorted((key for key in keys if key in origins), key=lambda k: origins[k].implied)
    return origin_of(tuple(known[0].split(".")), origins) if known else ""


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
        if source.factory and not is_reference(source.factory):
            yield not_a_reference(f"{here}.factory", source.factory)
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
    if data.filter is not None and not is_reference(data.filter):
        yield not_a_reference("data.filter", data.filter)


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
    if worker.reward is not None and not is_reference(worker.reward):
        yield not_a_reference("rollout_worker.reward", worker.reward)
    if worker.reward_arguments and worker.reward is None:
        yield (
            "rollout_worker.reward_arguments are keywords of rollout_worker.reward, which is "
            "not set",
            "rollout_worker.reward_arguments",
        )
    if is_rl(config) and uses_reward(config) and _lacks_reward(config):
        yield (
            f"rollout_worker.reward must be set for trainer.algorithm: "
            f"{config.trainer.algorithm.preset} with rollout_worker.type single_turn: "
            "`path.py:name` or `package.module:name` of a reward function",
            "rollout_worker.reward",
            "trainer.algorithm",
        )
    elif validate.enabled and worker.type in _DRAWN_IN_VALIDATION and worker.reward is None:
        yield (
            "validate.enabled needs rollout_worker.reward to judge accuracy: `path.py:name` or "
            "`package.module:name` of a reward function",
            "validate.enabled",
        )


def _lacks_reward(config: RunConfig) -> bool:
    worker = config.rollout_worker
    return worker.type == "single_turn" and worker.reward is None


def rows(config: RunConfig) -> Iterator[Broken]:
    """The worker makes the rows that the trainer trains, from columns that differ."""
    family, data, worker = family_of(config), config.data, config.rollout_worker.type
    if family is not None and worker != "custom":
        preset = PRESETS[config.trainer.algorithm.preset]
        wanted = preset.settings.get("rollout_worker", {}).get("type", "single_turn")
        if worker != wanted:
            reason = (
                "it learns on sampled tokens"
                if family == "rl"
                else f"it needs {preset.needs[0]}, which are not sampled"
            )
            yield (
                f"rollout_worker.type must be {wanted} or custom for trainer.algorithm: "
                f"{preset.name}, got {worker}: {reason}{_trainers_of(worker)}",
                "rollout_worker.type",
                "trainer.algorithm",
            )
    if data.chosen_key == data.rejected_key:
        yield (
            f"data.chosen_key and data.rejected_key must differ, both are {data.chosen_key!r}",
            "data.chosen_key",
            "data.rejected_key",
        )


def _trainers_of(worker: str) -> str:
    """`; its rows are trained by dpo, ipo`, by what presets bring."""
    names = [
        name
        for name, preset in PRESETS.items()
        if preset.settings.get("rollout_worker", {}).get("type") == worker
    ]
    return f"; rows of {worker} are trained by {', '.join(names)}" if names else ""


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
    key, worker = "trajectory_pool.dynamic_sampling", config.rollout_worker
    for index, name in enumerate(dynamic.filters):
        if name not in GROUP_FILTERS and not is_reference(name):
            yield (
                f"{key}.filters.{index} must be {' or '.join(GROUP_FILTERS)}, or a user function "
                f"`path.py:name`, got {name!r}",
                f"{key}.filters.{index}",
            )
    if CONSTANT_REWARD in dynamic.filters and (
        worker.type in OFFLINE_WORKERS or _lacks_reward(config)
    ):
        yield (
            f"{key}.filters: {CONSTANT_REWARD} would drop every group, since rows of "
            f"rollout_worker.type {worker.type} have no reward",
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


def run_wide(config: RunConfig) -> Iterator[Broken]:
    """Settings of the run as a whole."""
    if config.resume == "":
        yield "resume must be a run folder, `latest` or null, got ''", "resume"


RULES = (
    *(run_wide, data_sources, batch_sizes, custom_types, rows, rewards, sampling, prompts),
    *(dynamic_sampling, staleness, optimizer, validation),
)


def _nearest_divisors(number: int, near: int) -> list[int]:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < near][-1:]
    above = [d for d in divisors if d > near][:1]
    return below + above


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(str(n) for n in numbers)
