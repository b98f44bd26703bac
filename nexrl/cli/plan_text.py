"""What a recipe will do, in units and words, before any weight is loaded.

Consumes a loaded configuration and what `plan_probe.py` saw of rows, tokenizer, user code and
machine; pure. Everything that is wrong is a finding, so that one run of `nexrl plan` shows all of
it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nexrl.cli.memory_estimate import MemoryItem, ModelSize, estimate_memory, human_bytes
from nexrl.cli.plan_algorithm import algorithm_lines
from nexrl.config.cautions import stage_cautions
from nexrl.config.loader import LoadedConfig
from nexrl.config.nodes import Origin
from nexrl.config.rule import OFFLINE_WORKERS
from nexrl.config.schema import RunConfig

ROWS_READ = 20
"""Rows of each source that a plan reads."""
_SHOWN_PROMPT = 200
"""Characters of the rendered prompt that a plan shows."""
WIDTH = 100
"""Columns of what a plan prints of a stage."""
_MEMORY_SHARE = 0.9
"""Share of the machine's memory above which a plan warns."""

Severity = Literal["problem", "warning", "ok"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a plan has to say beyond numbers."""

    severity: Severity
    """A problem makes `nexrl plan` fail; a warning does not; ok says what was checked."""
    text: str
    """One sentence with key and value."""


def problem(text: str) -> Finding:
    """What must be mended before a launch."""
    return Finding(severity="problem", text=text)


def warning(text: str) -> Finding:
    """What works and is probably not meant."""
    return Finding(severity="warning", text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSample:
    """What was read of one data source."""

    name: str
    """Name in metrics."""
    num_read: int
    """Rows read and checked."""
    num_left_out: int = 0
    """Those of them that data.filter or data.max_prompt_tokens leaves out."""
    num_items: int | None
    """All its items, before filters; None when they were not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompts:
    """Prompts of the sampled rows, as the model will see them."""

    first_text: str
    """The first one, special tokens included."""
    lengths: Sequence[int]
    """Tokens of each."""
    num_leading_bos: int
    """BOS tokens at the start of the first; more than one is a mistake (FR-014)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What the probe saw for one stage."""

    sources: Sequence[SourceSample]
    """Training data."""
    validation_sources: Sequence[SourceSample]
    """Held-out data."""
    prompts: RenderedPrompts | None
    """None when there is no tokenizer yet, or no prompt to render."""
    longest_row: int | None = None
    """Tokens of the longest row that an offline worker made; None for workers that sample."""
    teacher: ModelSize | None = None
    """Size of the teacher of a distillation; None without one."""
    scorer: str
    """Who gives rewards, in words (FR-163)."""
    findings: Sequence[Finding]
    """Checks of rows, user code and reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage in units."""

    name: str
    """Name of the stage."""
    lines: Sequence[tuple[str, str]]
    """Label and value, in the order in which they are shown."""
    first_prompt: str
    """The first rendered prompt; empty when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole run in units."""

    title: str
    """Project and experiment."""
    stages: Sequence[StagePlan]
    """In order."""
    memory: Sequence[MemoryItem]
    """Empty when the model is not known yet."""
    machine_bytes: int
    """Memory of this machine."""
    findings: Sequence[Finding]
    """Each once; problems first."""

    @property
    def problems(self) -> list[str]:
        """What must be mended before a launch."""
        return [f.text for f in self.findings if f.severity == "problem"]


def build_plan(
    loaded: LoadedConfig,
    inspections: Sequence[Inspection],
    *,
    machine: Sequence[Finding],
    model: ModelSize | None,
    machine_bytes: int,
) -> Plan:
    """The effective plan of every stage, of which each has an inspection, and all findings.

    `model` is None when its folder is not made yet; `machine_bytes` is this machine's memory.
    """
    findings = list(machine)
    stages, memory = [], dict[str, MemoryItem]()
    for stage, seen in zip(loaded.stages, inspections, strict=True):
        cautions = map(warning, stage_cautions(stage))
        stage_findings = [*seen.findings, *cautions, *_lint(stage.config, seen, model)]
        findings += [replace(f, text=stage.prefix + f.text) for f in stage_findings]
        stages.append(
            StagePlan(
                name=stage.name,
                lines=list(_lines(stage.config, seen, stage.provenance)),
                first_prompt=seen.prompts.first_text if seen.prompts else "",
            )
        )
        for item in _memory(stage.config, model, seen):
            if item.what not in memory or memory[item.what].num_bytes < item.num_bytes:
                memory[item.what] = item
    findings += _memory_findings(memory.values(), machine_bytes)
    order = ("problem", "warning", "ok")
    unique = dict.fromkeys(findings)
    return Plan(
        title=f"{loaded.config.project_name} / {loaded.config.experiment_name}",
        stages=stages,
        memory=list(memory.values()),
        machine_bytes=machine_bytes,
        findings=sorted(unique, key=lambda f: order.index(f.severity)),
    )


def _longest_prompt(config: RunConfig, seen: Inspection) -> int | None:
    """The limit if there is one, else the longest sampled prompt."""
    if config.data.max_prompt_tokens is not None:
        return config.data.max_prompt_tokens
    return max(seen.prompts.lengths) if seen.prompts else None


def _num_items(samples: Sequence[SourceSample]) -> int | None:
    counts = [sample.num_items for sample in samples]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _lines(
    config: RunConfig, seen: Inspection, origins: Mapping[str, Origin]
) -> Iterable[tuple[str, str]]:
    data, trainer, worker = config.data, config.trainer, config.rollout_worker
    yield from algorithm_lines(config, origins)
    yield "worker", worker.type
    if worker.type not in OFFLINE_WORKERS or worker.reward:
        yield "scorer", seen.scorer
    yield "data", _sources_words(seen.sources)
    if dropping := _filter_words(config):
        yield "groups dropped", dropping
    yield "items per version", str(data.batch_size)
    yield _rows_per_version(config)
    steps = trainer.num_optimizer_steps
    yield "optimizer steps per version", f"{steps}, each {data.batch_size // steps} items"
    yield "tokens per version", _tokens_words(config, seen)
    yield "versions", _versions_words(config, _num_items(seen.sources))
    if worker.type not in OFFLINE_WORKERS:
        yield "staleness", _staleness_words(config)
    yield "validation", _validation_words(config, seen)


def _sources_words(samples: Sequence[SourceSample]) -> str:
    words = []
    for s in samples:
        left_out = f", {s.num_left_out} of them left out" if s.num_left_out else ""
        items = "?" if s.num_items is None else s.num_items
        words.append(f"{s.name} ({items} items, {s.num_read} read{left_out})")
    return ", ".join(words) or "none could be read"


def _filter_words(config: RunConfig) -> str:
    """`constant_reward; up to 192 more are drawn for a batch, then train_short`."""
    dynamic = config.trajectory_pool.dynamic_sampling
    if not dynamic.filters:
        return ""
    more = int(dynamic.refill_factor * config.data.batch_size)
    drawn = f"up to {more} more are drawn for a batch" if more else "none are drawn in their place"
    return f"{', '.join(dynamic.filters)}; {drawn}, then {dynamic.on_exhausted}"


def _rows_per_version(config: RunConfig) -> tuple[str, str]:
    data, worker = config.data, config.rollout_worker.type
    rollouts = data.batch_size * data.rollout_repeat_n
    if worker not in OFFLINE_WORKERS:
        words = f"{rollouts} = {data.batch_size} items x {data.rollout_repeat_n} rollouts"
        return "trajectories per version", words
    factors = [f"{data.rollout_repeat_n} times"] * (data.rollout_repeat_n > 1)
    factors += ["2 responses"] * (worker == "preference")
    count = _num_rows(config)
    whole = f" = {' x '.join([f'{data.batch_size} items', *factors])}" if factors else ""
    return "rows per version", f"{count}{whole or ', one for each item'}"


def _num_rows(config: RunConfig) -> int:
    """Rows of a version's batch: an item of `preference` has two."""
    responses = 2 if config.rollout_worker.type == "preference" else 1
    return config.data.batch_size * config.data.rollout_repeat_n * responses


def _tokens_words(config: RunConfig, seen: Inspection) -> str:
    prompt, rows = _longest_prompt(config, seen), _num_rows(config)
    drawn = config.rollout_worker.sampling.max_tokens
    if config.rollout_worker.type == "custom":
        return f"as the worker draws; {drawn} at most per completion"
    if config.rollout_worker.type in OFFLINE_WORKERS:
        if seen.longest_row is None:
            return f"{rows} x what a row holds"
        longest = seen.longest_row
        return f"about {rows * longest:,} = {rows} x {longest}, the longest row read"
    if prompt is None:
        return f"{rows} x (prompt + at most {drawn})"
    bound = "data.max_prompt_tokens" if config.data.max_prompt_tokens else "longest sampled prompt"
    return (
        f"at most {rows * (prompt + drawn):,} = {rows} x ({prompt} prompt + {drawn} "
        f"completion); {prompt} is the {bound}"
    )


def _versions_words(config: RunConfig, num_items: int | None) -> str:
    steps, batch = config.trainer.num_steps, config.data.batch_size
    if num_items is None:
        limit = f", or {config.data.epochs} epochs if fewer" if config.data.epochs else ""
        return f"{steps}{limit}"
    if config.data.epochs is not None:
        # The last batch of a stage may be closed short.
        steps = min(steps, -(-num_items * config.data.epochs // batch))
    return f"{steps}, {steps * batch / num_items:.2f} epochs of {num_items} items"


def _staleness_words(config: RunConfig) -> str:
    threshold = config.weight.staleness_threshold
    if threshold == 0:
        return f"0 versions ({config.weight.mode}: strictly on-policy between versions)"
    return f"at most {threshold} versions ({config.weight.mode})"


def _validation_words(config: RunConfig, seen: Inspection) -> str:
    validate = config.validate_
    if not validate.enabled:
        return "none"
    times = ["at start"] * validate.at_start + ["at end"] * validate.at_end
    if validate.every_versions:
        times.insert(len(times) - validate.at_end, f"every {validate.every_versions} versions")
    items = _num_items(seen.validation_sources)
    if validate.max_items is not None:
        items = min(items, validate.max_items) if items is not None else validate.max_items
    shown = "?" if items is None else items
    if config.rollout_worker.type in OFFLINE_WORKERS and config.rollout_worker.type != "supervised":
        return f"{shown} items by their own loss, {', '.join(times)}"
    drawn = validate.sampling
    how = "greedy" if drawn.temperature == 0 else f"temperature {drawn.temperature:g}"
    return f"{shown} items x {validate.num_rollouts}, {how}, {', '.join(times)}"


def _lint(config: RunConfig, seen: Inspection, model: ModelSize | None) -> Iterable[Finding]:
    """What rows, tokenizer and model say against the settings."""
    if seen.prompts and seen.prompts.num_leading_bos > 1:
        yield problem(
            f"the first rendered prompt starts with {seen.prompts.num_leading_bos} BOS tokens; "
            "the chat template writes one and the tokenizer adds another"
        )
    prompt, worker = _longest_prompt(config, seen), config.rollout_worker.type
    positions = model.max_positions if model else 0
    if seen.longest_row and positions and seen.longest_row > positions:
        yield problem(
            f"a row of {seen.longest_row} tokens, prompt and response, is longer than the model's "
            f"{positions} positions; leave such rows out with data.filter"
        )
    limits = [config.service.inference_service.max_context, positions]
    limit = min((value for value in limits if value), default=None)
    drawn = {
        "single_turn": ("rollout_worker.sampling", config.rollout_worker.sampling.max_tokens),
        "supervised": ("validate.sampling", config.validate_.sampling.max_tokens),
    }
    if prompt is None or limit is None or worker not in drawn:
        return
    key, max_tokens = drawn[worker]
    if worker == "supervised" and not config.validate_.enabled:
        return
    if prompt >= limit:
        yield problem(
            f"a prompt of {prompt} tokens leaves no room in a context of {limit}; set "
            "data.max_prompt_tokens to leave such items out"
        )
    elif prompt + max_tokens > limit:
        yield warning(
            f"a prompt of {prompt} tokens and {key}.max_tokens {max_tokens} exceed the context of "
            f"{limit}: such completions are truncated by the context"
        )


def _memory(config: RunConfig, model: ModelSize | None, seen: Inspection) -> list[MemoryItem]:
    if model is None:
        return []
    row_tokens = (_longest_prompt(config, seen) or 0) + config.rollout_worker.sampling.max_tokens
    if config.rollout_worker.type in OFFLINE_WORKERS:
        row_tokens = seen.longest_row or model.max_positions
    return estimate_memory(
        config,
        model,
        row_tokens=row_tokens,
        trained_tokens=_num_rows(config) * row_tokens,
        teacher=seen.teacher,
    )


def _memory_findings(items: Iterable[MemoryItem], machine_bytes: int) -> list[Finding]:
    on_cpu = sum(item.num_bytes for item in items if item.device in ("cpu", "auto"))
    if on_cpu <= _MEMORY_SHARE * machine_bytes:
        return []
    return [
        warning(
            f"the run wants about {human_bytes(on_cpu)} and this machine has "
            f"{human_bytes(machine_bytes)}: lower service.inference_service.max_batch or "
            "max_context, or service.train_service.micro_batch_tokens"
        )
    ]


def _labelled(label: str, value: str) -> list[str]:
    """A label and its value, over as many lines as the width asks for."""
    return textwrap.wrap(
        f"  {label:<28}{value}",
        WIDTH,
        subsequent_indent=" " * 30,
        break_long_words=False,
        break_on_hyphens=False,
    )


def render_plan(plan: Plan) -> str:
    """The plan as plain text."""
    lines = [f"plan of {plan.title}"]
    for stage in plan.stages:
        lines += ["", f"stage {stage.name}"]
        lines += [line for label, value in stage.lines for line in _labelled(label, value)]
        if stage.first_prompt:
            shown = stage.first_prompt[:_SHOWN_PROMPT]
            more = "..." if len(stage.first_prompt) > _SHOWN_PROMPT else ""
            lines.append(f"  {'first prompt':<28}{shown!r}{more}")
    if plan.memory:
        total = sum(item.num_bytes for item in plan.memory)
        machine = human_bytes(plan.machine_bytes)
        lines += [
            "",
            f"memory without activations, about {human_bytes(total)} (this machine: {machine})",
        ]
        lines += [f"  {item.what:<44}{human_bytes(item.num_bytes):>10}" for item in plan.memory]
    if plan.findings:
        lines += ["", "checks"]
        lines += [f"  {f.severity:<9}{f.text}" for f in plan.findings]
    return "\n".join(lines)
