"""Compositions in a trainer's hands: from trajectories to weights, and to metrics.

`trainer.algorithm` as a recipe writes it -> config -> the built-in trainer -> toy train service
    -> its tables after a batch, against `reference_trainer` | `reference_offline`

The service holds float64 tables and is sent float32 columns. Batches are made as one optimizer step
and as two, sent in one chunk and row by row, and given backwards.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from nexrl.config.loader import settings_alone
from nexrl.config.schema_algorithm import AlgorithmConfig
from nexrl.testing.makers import make_batch, make_draw, make_group, make_record, make_tracker
from nexrl.testing.toy_train_service import ToyTrainService
from nexrl.trainer.build import build_trainer
from nexrl.trainer.trainer import TrainerContext
from nexrl.types import Batch, ModelSpec, PolicyVersion, Trajectory
from tests.certify.certificate_table import Errors, worst
from tests.certify.certify_parts import Array
from tests.certify.hand_defaults import (
    ADVANTAGE_DEFAULTS,
    LOSS_DEFAULTS,
    PREFERENCE_DEFAULTS,
    SHAPING_DEFAULTS,
)
from tests.certify.reference_compositions import PARTS, READ, SAMPLED, Composition
from tests.certify.reference_metrics import read_metrics, sampled_metrics
from tests.certify.reference_offline import Read, read
from tests.certify.reference_rules import held_coefficients
from tests.certify.reference_trainer import Trained, train
from tests.certify.trained_batches import (
    LONGEST,
    VERSION,
    VOCAB,
    long_batch,
    read_batch,
    sampled_batch,
)

Settings = Mapping[str, Any]
LR, CRITIC_LR = 1.0, 25.0
"""Large enough that a second optimizer step meets its bounds."""
ROWS = {"kto": "labelled", "process_reward_model": "process", "cross_entropy": "tokens"}
"""Losses that read something else than pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to make the same optimizer steps."""

    max_chunk_bytes: int = 1 << 20
    """Bound of one call to the service; 1 sends every row by itself, where configuration would ask
    for more."""
    backwards: bool = False
    """Whether trajectories come in the opposite order."""


LAYOUTS = (Layout(), Layout(max_chunk_bytes=1), Layout(backwards=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a trainer made of a batch."""

    tables: Mapping[str, Array]
    """By policy, after it."""
    metrics: Mapping[str, float]
    """As logged."""
    coefficient: float
    """Of the entropy bonus of the next batch; 0 where there is none."""
    num_calls: int
    """Calls that carried a gradient of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A composition over one number of optimizer steps."""

    runs: tuple[Run, ...]
    """By layout; backwards is left out where it is another objective."""
    expected: Trained | Read
    """The reference."""
    metrics: Mapping[str, float]
    """The reference's."""
    coefficient: float = 0.0
    """The reference's, of the entropy bonus of the next batch."""

    def errors(self) -> Iterator[tuple[str, float]]:
        """(check, error) of the weights, and of the coefficient that is carried on."""
        first = self.runs[0]
        yield "trainer", abs(first.coefficient - self.coefficient)
        for policy in ("actor", "critic"):
            if policy not in first.tables:
                continue
            moved = self.expected.tables[policy] - self.expected.start[policy]
            scale = max(float(abs(moved).max()), 1e-9)
            apart = first.tables[policy] - self.expected.tables[policy]
            yield "trainer", float(abs(apart).max()) / scale
            for run in self.runs[1:]:
                split = float(abs(run.tables[policy] - first.tables[policy]).max()) / scale
                yield "invariance", split
            for run in self.runs:
                yield "extremes", float((~np.isfinite(run.tables[policy])).sum())


# --- tables ---------------------------------------------------------------------------------------


@cache
def tables() -> Mapping[str, Array]:
    """Policies that the batch meets: apart from each other, and away from uniform."""
    rng = np.random.default_rng(11)
    actor = rng.normal(0.0, 1.0, (VOCAB, VOCAB))
    return {
        "actor": actor,
        "reference": actor + rng.normal(0.0, 0.4, actor.shape),
        "teacher": (actor + rng.normal(0.0, 0.7, actor.shape)).astype(np.float32).astype(float),
        "critic": rng.normal(0.0, 0.5, VOCAB),
    }


async def _service(folder: Path, wants_values: bool) -> ToyTrainService:
    service = ToyTrainService(vocab_size=VOCAB)
    if wants_values:
        await service.create(ModelSpec(head="value"))
    service.tables["teacher"] = tables()["teacher"].copy()
    version = PolicyVersion(policy="teacher", incarnation=0, number=0)
    await service.publish_weights("teacher", version, str(folder))
    (folder / "config.json").write_text("{}")
    return service


# --- runs -----------------------------------------------------------------------------------------


def _overrides(preset: str, written: Settings, num_steps: int) -> list[str]:
    settings: dict[str, Any] = {
        "trainer.algorithm": preset,
        **{f"trainer.algorithm.{key}": value for key, value in written.items()},
        "rollout_worker.sampling.max_tokens": LONGEST,
        "trainer.optimizer.lr": LR,
        "trainer.optimizer.grad_clip_norm": 0,
        "trainer.algorithm.critic.lr": CRITIC_LR,
        "trainer.algorithm.critic.grad_clip_norm": 0,
        "trainer.num_optimizer_steps": num_steps,
    }
    return [f"{key}={'null' if value is None else value}" for key, value in settings.items()]


async def _run(
    preset: str, written: Settings, batch: Sequence[Trajectory], num_steps: int, layout: Layout
) -> Run:
    with TemporaryDirectory() as name:
        folder = Path(name) / "teacher"
        teacher = {"teacher.path": str(folder)} if preset == "distill_top_k" else {}
        overrides = _overrides(preset, {**written, **teacher}, num_steps)
        size = {"max_chunk_bytes": layout.max_chunk_bytes}
        config = settings_alone(overrides).trainer.model_copy(update=size)
        scores = preset in READ and READ[preset].loss.endswith("reward_model")
        service = await _service(folder, wants_values=scores)
        context = TrainerContext(
            train_service=service,
            config=config,
            tracker=make_tracker(),
            max_response_tokens=LONGEST,
        )
        trainer = build_trainer(config, context, Path(name))
        await trainer.setup()
        for policy, table in tables().items():
            if policy in service.tables and policy != "teacher":
                start = tables()["critic"] if scores and policy == "actor" else table
                service.tables[policy] = start.copy()
        given = list(batch)[::-1] if layout.backwards else list(batch)
        report = await trainer.train_batch(_handed_out(given))
        hosted: dict[str, Array] = {
            policy: service.tables[policy].copy()
            for policy in ("actor", "critic")
            if policy in service.tables
        }
        verbs = [verb for verb, policy in service.calls if policy == "actor"]
        num_calls = verbs.count("forward_backward") + verbs.count("backward")
        return Run(
            tables=hosted,
            metrics=report.metrics,
            coefficient=float(trainer.state_dict().get("entropy_coefficient", 0.0)),
            num_calls=num_calls,
        )


def _handed_out(trajectories: Sequence[Trajectory]) -> Batch:
    """As the pool hands them out: one rollout for each trajectory."""
    records = [make_record(make_draw(), i, trajectories=[t]) for i, t in enumerate(trajectories)]
    return make_batch([make_group(records=records)], version=VERSION)


def _runs(
    preset: str, written: Settings, batch: Sequence[Trajectory], num_steps: int
) -> tuple[Run, ...]:
    """By layout. Backwards, two optimizer steps would be other steps, and kto, which compares a
    prompt with the next answer, another loss: that layout is left out."""
    layouts = LAYOUTS if num_steps == 1 and preset != "kto" else LAYOUTS[:-1]
    # A loop of its own: asyncio.run would write out every batch when it sets its signal handler.
    with closing(asyncio.new_event_loop()) as loop:
        return tuple(
            loop.run_until_complete(_run(preset, written, batch, num_steps, layout))
            for layout in layouts
        )


@cache
def comparisons(family: str, name: str) -> tuple[Compared, ...]:
    """A preset, or a part in `dr_grpo`, over one optimizer step and over two."""
    if family == "metric":
        plan = SAMPLED["dr_grpo"]
        return (compare(plan, "dr_grpo", {}, 1, long_batch),)
    if family == "preset" and name in READ:
        return tuple(_compare_offline(name, number) for number in (1, 2))
    if family == "preset":
        plan, preset, written = SAMPLED[name], name, dict[str, Any]()
        found = [compare(plan, preset, written, number) for number in (1, 2)]
        if plan.warm_up:
            alone = {"critic.warmup_batches": 0}
            trained = replace(plan, warm_up=False)
            found += [compare(trained, preset, alone, number) for number in (1, 2)]
        return tuple(found)
    settings, plan = PARTS[family, name]
    return tuple(compare(plan, "dr_grpo", settings, number) for number in (1, 2))


def compare(
    plan: Composition,
    preset: str,
    written: Settings,
    num_steps: int,
    make: Callable[[Array], list[Trajectory]] = sampled_batch,
) -> Compared:
    """A preset with settings written over it, against what it shall compose."""
    batch = make(tables()["actor"])
    expected = train(
        plan,
        batch,
        dict(tables()),
        num_steps=num_steps,
        lr=LR,
        critic_lr=CRITIC_LR,
        policy_waits=plan.warm_up,
    )
    metrics = sampled_metrics(
        plan, expected, batch, version=VERSION, policy_waits=plan.warm_up, lr=LR
    )
    entropies = [metrics["entropy"]] if "entropy" in metrics else []
    return Compared(
        runs=_runs(preset, written, batch, num_steps),
        expected=expected,
        metrics=metrics,
        coefficient=held_coefficients(
            entropies, start=plan.entropy, target=plan.held_at, rate=plan.rate
        )[-1],
    )


def _compare_offline(name: str, num_steps: int) -> Compared:
    plan = READ[name]
    batch = read_batch(ROWS.get(plan.loss, "pair"))
    expected = read(plan, batch, dict(tables()), num_steps=num_steps, lr=LR)
    return Compared(
        runs=_runs(name, {}, batch, num_steps),
        expected=expected,
        metrics=read_metrics(plan, expected, lr=LR),
    )


def certify_in_trainer(family: str, name: str) -> dict[str, float]:
    """Worst error of each check over both numbers of optimizer steps."""
    found: dict[str, float] = {}
    for one in comparisons(family, name):
        for check, error in one.errors():
            found[check] = worst([found.get(check, 0.0), error])
    return found


def preset_numbers(name: str) -> float:
    """0 where a preset sets what its composition says, to the last number, else 1."""
    algorithm = settings_alone(_overrides(name, {}, 1)).trainer.algorithm
    if name in READ:
        plan = READ[name]
        literal = {**PREFERENCE_DEFAULTS.get(plan.loss, {}), **plan.settings}
        found = {key: getattr(algorithm.preference, key) for key in literal}
        return float(found != literal or algorithm.loss.name != plan.loss)
    return float(_composed(algorithm) != _literal(SAMPLED[name]))


def _composed(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """What a configuration composes, complete."""
    loss, advantage, correction = algorithm.loss, algorithm.advantage, algorithm.correction
    clips = {key: getattr(loss, key) for key in ("clip_low", "clip_high", "dual_clip")}
    set_clips = {key: value for key, value in clips.items() if value is not None}
    judged = {key: getattr(advantage, key) for key in ADVANTAGE_DEFAULTS if hasattr(advantage, key)}
    bounds = correction.level, correction.action, correction.low, correction.high
    kl = algorithm.kl.coefficient, algorithm.kl.estimator, algorithm.kl.placement
    return {
        "advantage": (advantage.name, judged),
        "loss": (loss.name, {**LOSS_DEFAULTS[loss.name], **set_clips, **loss.settings}),
        "aggregation": loss.aggregation,
        "kl": kl if algorithm.kl.coefficient else None,
        "correction": None if correction.action == "none" else bounds,
        "shaping": algorithm.shaping.model_dump(),
        "entropy": (algorithm.entropy.coefficient, algorithm.entropy.target),
        "critic": (algorithm.critic.clip, algorithm.critic.warmup_batches),
        "top_k": algorithm.teacher.top_k,
    }


def _literal(plan: Composition) -> dict[str, Any]:
    """The same of a composition; without a critic, the critic's settings are the defaults."""
    judged = {**ADVANTAGE_DEFAULTS, **plan.judged}
    del judged["moving_baseline"]  # the trainer's own state
    clip = plan.critic_clip if plan.advantage == "gae" else 0.2
    return {
        "advantage": (plan.advantage, judged),
        "loss": (plan.loss, {**LOSS_DEFAULTS[plan.loss], **plan.settings}),
        "aggregation": plan.aggregation,
        "kl": plan.kl,
        "correction": plan.correction,
        "shaping": {**SHAPING_DEFAULTS, **plan.shaping},
        "entropy": (plan.entropy, plan.held_at),
        "critic": (clip, 50 if plan.warm_up else 0),
        "top_k": plan.top_k,
    }


# --- metrics --------------------------------------------------------------------------------------


def certify_metric(name: str) -> Errors:
    """Worst difference from the reference, and between layouts, over all compositions.

    A metric that is logged and not expected, or the other way round, is infinitely far off.
    """
    by_check = metric_errors()
    return {check: errors[name] for check, errors in by_check.items() if name in errors}


@cache
def metric_errors() -> Mapping[str, Mapping[str, float]]:
    """Check -> metric -> error."""
    names = [*(("preset", n) for n in (*SAMPLED, *READ)), *PARTS, ("metric", "long rows")]
    found: dict[str, dict[str, float]] = {"trainer": {}, "invariance": {}, "extremes": {}}
    for family, name in names:
        for one in comparisons(family, name):
            for check, metric, error in _metrics_apart(one):
                found[check][metric] = worst([found[check].get(metric, 0.0), error])
    return found


def _metrics_apart(one: Compared) -> Iterator[tuple[str, str, float]]:
    first = one.runs[0].metrics
    for metric in set(first) | set(one.metrics):
        if metric not in first or metric not in one.metrics:
            yield "trainer", metric, math.inf
            continue
        yield "trainer", metric, _far(first[metric], one.metrics[metric])
        for run in one.runs[1:]:
            yield "invariance", metric, _far(run.metrics.get(metric, math.nan), first[metric])
        bad = [not math.isfinite(run.metrics.get(metric, math.nan)) for run in one.runs]
        yield "extremes", metric, float(sum(bad))


def _far(found: float, expected: float) -> float:
    """Difference over the size of what is expected, or over 1e-2 where that is smaller."""
    return abs(found - expected) / max(abs(expected), 1e-2)
