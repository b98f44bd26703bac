"""Inputs on which a loss is held against its reference: random ones and degenerate ones.

A case has every array that the loss may use, drawn from the seed alone. Trained tokens only, row
by row; float64 numbers that float32 holds exactly, so that both precisions see the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.kl import KL_IN_LOSS
from nexrl.algorithms.loss_definition import LossDefinition, PreparedStep

Array = npt.NDArray[Any]
NUM_CANDIDATES = 3
LENGTHS = (5, 1, 3, 8, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCase:
    """Arguments of one evaluation of a loss."""

    label: str
    """What is special about it."""
    lengths: tuple[int, ...]
    """Trained tokens of each row."""
    outputs: Mapping[str, Array]
    """[n] or [n, K] by output of the model."""
    inputs: Mapping[str, Array]
    """[n] or [n, K] by input of the loss; `row` where the loss is of level row."""
    settings: Mapping[str, Any]
    """Complete settings."""
    configured: Mapping[str, Any] = field(default_factory=dict)
    """The same before `prepare` replaced some."""


def loss_cases(definition: LossDefinition, variants: Sequence[Mapping[str, Any]]) -> list[LossCase]:
    """Every degenerate case under every variant of settings, and several random ones."""
    return [
        prepared(definition, case)
        for number, settings in enumerate([{}, *variants, *_regularisers(definition)])
        for case in _cases(definition, dict(settings), seed=100 * number)
    ]


def prepared(definition: LossDefinition, case: LossCase) -> LossCase:
    """With what `prepare` adds for a step that holds just this case."""
    if definition.prepare is None:
        return case
    step: PreparedStep = definition.prepare(case.outputs, case.inputs, case.settings)
    return replace(
        case,
        inputs={**case.inputs, **{k: np.asarray(v) for k, v in step.inputs.items()}},
        settings={**case.settings, **step.settings},
        configured=case.settings,
    )


def _regularisers(definition: LossDefinition) -> Iterator[dict[str, Any]]:
    if "kl_coefficient" in definition.config:
        for estimator in KL_IN_LOSS:
            yield {"kl_coefficient": 0.3, "kl_estimator": estimator}
    if "entropy_coefficient" in definition.config:
        yield {"entropy_coefficient": 0.05}


def _cases(definition: LossDefinition, settings: dict[str, Any], seed: int) -> Iterator[LossCase]:
    for number in range(2):
        yield random_case(definition, settings, LENGTHS, seed + number, label="random")
    one = random_case(definition, settings, (1,), seed, label="one token")
    yield one
    base = random_case(definition, settings, LENGTHS, seed)
    ones = np.ones(sum(LENGTHS))
    if "advantage" in base.inputs:
        yield _with_inputs(base, "zero advantages", advantage=0.0 * ones)
    if "proximal_logprobs" in base.inputs:
        for sign, label in ((1.0, "all beyond the upper bound"), (-1.0, "all beyond the lower")):
            shifted = base.outputs["logprobs"] - sign * 2.0
            yield _with_inputs(base, label, proximal_logprobs=shifted, advantage=sign * ones)
        yield _with_inputs(base, "on policy", proximal_logprobs=base.outputs["logprobs"])
    if "teacher_candidate_logprobs" in base.inputs:
        yield _without_remainder(base)
    if "correction" in definition.optional:
        kept = np.where(np.arange(len(ones)) % 3 == 0, 0.0, 1.5)
        yield _with_inputs(base, "correction", correction=kept)
        yield _with_inputs(base, "all masked by a correction", correction=0.0 * ones)


def _without_remainder(case: LossCase) -> LossCase:
    """Candidates that leave 1e-9 to all other tokens, below what float32 logprobs can say."""

    def filled(logprobs: Array) -> Array:
        chances = np.exp(logprobs)
        return np.asarray(_short(np.log(chances / chances.sum(-1, keepdims=True) * (1 - 1e-9))))

    key = "candidate_logprobs"
    teacher = {f"teacher_{key}": filled(case.inputs[f"teacher_{key}"])}
    outputs = {**case.outputs, key: filled(case.outputs[key])}
    return replace(case, label="no remainder", outputs=outputs, inputs={**case.inputs, **teacher})


def random_step(definition: LossDefinition, seed: int) -> LossCase:
    """One that `prepare` looks at: settings within their range, rows and correction at random."""
    rng = np.random.default_rng(1000 + seed)
    drawn: dict[str, Any] = {
        "dual_clip": float(rng.uniform(1.01, 1.5)) if seed % 2 else None,
        # Steps that reach their end but for rounding.
        "clip_high_end": 0.5 if seed % 4 == 3 else 2.0,
        "clip_high_step": 0.1 if seed % 4 == 3 else 0.05,
        "fraction": float(rng.uniform(0.0, 1.0)),
        "covariance_low": -0.4,
        "covariance_high": float(rng.uniform(0.0, 1.0)),
    }
    settings = {key: value for key, value in drawn.items() if key in definition.config}
    case = random_case(definition, settings, rng.integers(1, 9, 4).tolist(), seed=2 * seed)
    correction = rng.choice([0.0, 0.4, 1.0, 3.0], sum(case.lengths))
    case = replace(case, inputs={**case.inputs, "correction": correction})
    if "positive_share" in definition.config:
        share = _share_on_the_way(case, float(rng.uniform(0.0, 1.0)))
        settings["positive_share"] = min(max(share, 0.01), 0.99)
    return replace(case, settings={**case.settings, **settings}, configured=settings)


def _share_on_the_way(case: LossCase, place: float) -> float:
    """Just below the share that positive tokens have at a place between 0, the first bounds of bapo,
    and 1, its last ones: a search for it ends there."""
    settings, inputs = case.settings, case.inputs
    first, last = 1.0 + settings["clip_high"], 1.0 + settings["clip_high_end"]
    high = first + min(2.0 * place, 1.0) * (last - first)
    low = 1.0 - settings["clip_low"] + max(2.0 * place - 1.0, 0.0) * 0.3
    ratio = np.exp(case.outputs["logprobs"] - inputs["proximal_logprobs"])
    gain = inputs["advantage"] * inputs["weight"] * inputs["correction"]
    above = (gain.clip(0.0) * np.minimum(ratio, high)).sum()
    capped = np.minimum(ratio, settings["dual_clip"] or np.inf)
    below = ((-gain).clip(0.0) * np.maximum(capped, low)).sum()
    return float(above / max(above + below, 1e-9)) * (1.0 - 1e-9)


def _with_inputs(case: LossCase, label: str, **inputs: Array) -> LossCase:
    return replace(case, label=label, inputs={**case.inputs, **inputs})


def random_case(
    definition: LossDefinition,
    settings: Mapping[str, Any],
    lengths: Sequence[int],
    seed: int,
    *,
    label: str = "random",
) -> LossCase:
    """Rows of the given lengths; a logprob is within about one nat of the others of its token."""
    rng = np.random.default_rng(seed)
    num = sum(lengths)
    complete = definition.resolve(settings)
    logprobs = -rng.gamma(2.0, 0.7, num) - 0.01
    near = {
        key: np.minimum(logprobs + rng.normal(0.0, 0.5, num), -1e-3)
        for key in ("proximal_logprobs", "behavior_logprobs", "reference_logprobs")
    }
    candidates = np.log(rng.dirichlet(np.full(NUM_CANDIDATES + 1, 2.0), num)[:, :-1])
    teacher = np.log(rng.dirichlet(np.full(NUM_CANDIDATES + 1, 2.0), num)[:, :-1])
    values = rng.normal(0.0, 1.0, num)
    row_level = definition.level == "row"
    drawn = rng.normal(0.0, 1.0, len(lengths) if row_level else num)
    pool: dict[str, Array] = {
        **near,
        "weight": rng.uniform(0.05, 0.3, num),
        "advantage": np.repeat(drawn, lengths) if row_level else drawn,
        "returns": values + rng.normal(0.0, 0.8, num),
        "old_values": values + rng.normal(0.0, 0.3, num),
        "teacher_logprobs": np.minimum(logprobs + rng.normal(0.0, 0.5, num), -1e-3),
        "teacher_candidate_logprobs": teacher,
    }
    wanted = [name for name in definition.required if name in pool]
    if complete.get("kl_coefficient"):
        wanted.append("reference_logprobs")
    if "proximal_logprobs" in definition.optional and complete.get("kl_coefficient"):
        wanted.append("proximal_logprobs")
    if seed % 2:
        others = ("behavior_logprobs", "proximal_logprobs")
        wanted += [name for name in others if name in definition.optional]
    inputs = {name: _short(pool[name]) for name in wanted}
    if "candidate_ids" in definition.required:
        inputs["candidate_ids"] = np.tile(np.arange(NUM_CANDIDATES), (num, 1))
    if row_level:
        inputs["row"] = np.repeat(np.arange(len(lengths)), lengths)
    produced = {
        "logprobs": logprobs,
        "entropy": rng.uniform(0.1, 2.0, num),
        "values": values,
        "candidate_logprobs": candidates,
    }
    outputs = {name: _short(produced[name]) for name in definition.outputs(settings)}
    return LossCase(
        label=label, lengths=tuple(lengths), outputs=outputs, inputs=inputs, settings=complete
    )


def _short(array: Array) -> Array:
    """The nearest float32 numbers, as float64."""
    return array.astype(np.float32).astype(np.float64)
