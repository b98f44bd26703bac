"""Checks of the losses that a train service runs, each against its reference.

LossDefinition -> cases -> {check: worst error}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nexrl.algorithms.loss_definition import LossDefinition
from tests.certify.certificate_table import Errors, worst
from tests.certify.loss_cases import (
    Array,
    LossCase,
    loss_cases,
    prepared,
    random_case,
    random_step,
)
from tests.certify.loss_variants import VARIANTS
from tests.certify.reference_losses import GradedLoss, graded, prepared_reference

STEP = 1e-6
GAP = 80.0
NUM_STEPS = 40
"""Further steps that `prepare` looks at: most of them end a search somewhere in between."""
SMOOTH = ("random", "one token", "correction")
"""Cases that are not made to lie on a kink."""

Graded = tuple[float, dict[str, Array]]


def certify_loss(definition: LossDefinition) -> Errors:
    """Worst error of each check; the name must have a reference."""
    cases = loss_cases(definition, VARIANTS.get(definition.name, ()))
    found = [_against_reference(definition, case, torch.float64) for case in cases]
    if definition.prepare is not None:
        steps = [*cases, *(random_step(definition, seed) for seed in range(NUM_STEPS))]
        found += [_preparation(definition, case) for case in steps]
    return {
        "float64": worst(found),
        "float32": worst(_against_reference(definition, case, torch.float32) for case in cases),
        "differences": worst(
            _finite_differences(definition, case) for case in cases[::2] if case.label in SMOOTH
        ),
        "invariance": worst(_order_and_split(definition, case) for case in cases),
        "extremes": float(sum(_not_finite(definition, case) for case in _extremes(definition))),
    }


# --- the implementation on one case ---------------------------------------------------------------


def numpy_loss(definition: LossDefinition, case: LossCase) -> float:
    """Sum of term x weight on numpy, float64."""
    term = definition.term(case.outputs, case.inputs, case.settings)
    return float((term * case.inputs["weight"]).sum())


def torch_loss(definition: LossDefinition, case: LossCase, dtype: torch.dtype) -> Graded:
    """The same on torch, with the gradient by output; 0 where an output is not used."""
    outputs = {k: torch.tensor(v, dtype=dtype).requires_grad_() for k, v in case.outputs.items()}
    inputs = {
        k: torch.tensor(v, dtype=dtype if v.dtype.kind == "f" else None)
        for k, v in case.inputs.items()
    }
    total = (definition.term(outputs, inputs, case.settings) * inputs["weight"]).sum()
    if total.requires_grad:
        total.backward()
    gradients = {
        k: (torch.zeros_like(v) if v.grad is None else v.grad).double().numpy()
        for k, v in outputs.items()
    }
    return float(total.detach()), gradients


def reference_of(definition: LossDefinition, case: LossCase) -> GradedLoss:
    """The reference on the same numbers."""
    return graded(definition.name, case.outputs, case.inputs, case.settings)


# --- checks ---------------------------------------------------------------------------------------


def _against_reference(definition: LossDefinition, case: LossCase, dtype: torch.dtype) -> float:
    expected = reference_of(definition, case)
    loss, gradients = torch_loss(definition, case, dtype)
    losses = [loss, numpy_loss(definition, case)] if dtype == torch.float64 else [loss]
    errors = [abs(found - expected.loss) / max(expected.scale, 1e-9) for found in losses]
    return worst([*errors, *gradient_errors(gradients, expected.gradients)])


def _preparation(definition: LossDefinition, case: LossCase) -> float:
    """Difference of what `prepare` finds for the case, from the settings as configured."""
    assert definition.prepare is not None
    inputs = {k: v for k, v in case.inputs.items() if k not in definition.prepares}
    settings = {**case.settings, **case.configured}
    expected = prepared_reference(definition.name, case.outputs, inputs, settings)
    step = definition.prepare(case.outputs, inputs, settings)
    found = {**step.settings, **step.inputs}
    errors = [
        float(abs(np.asarray(found[key], np.float64) - np.asarray(value, np.float64)).max())
        for key, value in expected.items()
    ]
    return worst(errors)


def gradient_errors(found: Mapping[str, Array], expected: Mapping[str, Array]) -> list[float]:
    largest = max([1e-9, *(float(abs(array).max(initial=0.0)) for array in expected.values())])
    return [float(abs(found[k] - expected[k]).max(initial=0.0)) / largest for k in expected]


def _finite_differences(definition: LossDefinition, case: LossCase) -> float:
    """Central differences of the reference with its stop-gradients held, and of the loss itself
    where it has none.
    """
    expected = reference_of(definition, case)
    objectives: list[Callable[[Mapping[str, Array]], float]] = [
        lambda outputs: (
            graded(definition.name, outputs, case.inputs, case.settings, frozen=case.outputs).loss
        )
    ]
    if not _has_stop_gradients(definition, case):
        objectives.append(lambda o: numpy_loss(definition, replace(case, outputs=o)))
    errors = []
    for objective in objectives:
        slopes = {key: _slopes(objective, case.outputs, key) for key in case.outputs}
        errors += gradient_errors(slopes, expected.gradients)
    return worst(errors)


def _has_stop_gradients(definition: LossDefinition, case: LossCase) -> bool:
    """Whether numbers inside stop-gradients, moved alone, change the loss or straighten a value."""
    if str(case.settings.get("kl_estimator", "")).endswith("+"):
        return True
    moved = {
        key: array + 0.05 * np.cos(np.arange(array.size)).reshape(array.shape)
        for key, array in case.outputs.items()
    }
    still = reference_of(definition, case).loss
    held = graded(definition.name, case.outputs, case.inputs, case.settings, frozen=moved).loss
    return abs(held - still) > 1e-12


def _slopes(
    objective: Callable[[Mapping[str, Array]], float], outputs: Mapping[str, Array], key: str
) -> Array:
    slopes = np.zeros(outputs[key].shape)
    for place in np.ndindex(*slopes.shape):
        ends = []
        for sign in (1.0, -1.0):
            array = outputs[key].copy()
            array[place] += sign * STEP
            ends.append(objective({**outputs, key: array}))
        slopes[place] = (ends[0] - ends[1]) / (2.0 * STEP)
    return slopes


def _order_and_split(definition: LossDefinition, case: LossCase) -> float:
    """Rows in another order, and in chunks of one and of two: the same sum, the same gradients."""
    whole, gradients = torch_loss(definition, case, torch.float64)
    scale = max(reference_of(definition, case).scale, 1e-9)
    errors = []
    num_rows = len(case.lengths)
    backwards = list(range(num_rows))[::-1]
    singles = [[row] for row in range(num_rows)]
    pairs = [[row for row in (i, i + 1) if row < num_rows] for i in range(0, num_rows, 2)]
    for parts in ([backwards], singles, pairs):
        total = 0.0
        joined = {key: np.zeros_like(array) for key, array in gradients.items()}
        for rows in parts:
            places = places_of(case.lengths, rows)
            loss, part = torch_loss(definition, rows_of(case, rows, places), torch.float64)
            total += loss
            for key, array in part.items():
                joined[key][places] += array
        errors += [abs(total - whole) / scale, *gradient_errors(joined, gradients)]
    return worst(errors)


def places_of(lengths: Sequence[int], rows: Iterable[int]) -> Array:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rows])


def rows_of(case: LossCase, rows: Sequence[int], places: Array) -> LossCase:
    lengths = tuple(case.lengths[r] for r in rows)
    inputs = {key: array[places] for key, array in case.inputs.items()}
    if "row" in inputs:
        inputs["row"] = np.repeat(np.arange(len(lengths)), lengths)
    outputs = {key: array[places] for key, array in case.outputs.items()}
    return replace(case, lengths=lengths, inputs=inputs, outputs=outputs)


def _extremes(definition: LossDefinition) -> list[LossCase]:
    """Differences of +-80 nats both ways, one token, 4,096 tokens, no token, all masked."""
    settings: list[Mapping[str, Any]] = [{}, *VARIANTS.get(definition.name, ())]
    if "kl_coefficient" in definition.config:
        settings.append({"kl_coefficient": 0.1, "kl_estimator": "k3"})
    cases = []
    for choice in settings:
        for lengths in ((1,), (4096,), (3, 4, 1)):
            base = random_case(definition, choice, lengths, seed=7)
            cases.append(base)
            cases += [
                _far_apart(base, lowered, sign)
                for lowered in ("policy", "others")
                for sign in (1.0, -1.0)
            ]
        empty = rows_of(base, [], np.zeros(0, np.int64))
        masked = replace(base, inputs={**base.inputs, "weight": 0.0 * base.inputs["weight"]})
        cases += [empty, masked]
    return [prepared(definition, case) for case in cases]


def _far_apart(case: LossCase, lowered: str, sign: float) -> LossCase:
    """The policy's logprobs 80 nats below all others, or the others 80 below the policy's."""
    outputs, inputs = dict(case.outputs), dict(case.inputs)
    for group in [outputs] if lowered == "policy" else [inputs]:
        for key in [name for name in group if name.endswith("logprobs")]:
            group[key] = group[key] - GAP
    if "values" in outputs:
        outputs["values"] = outputs["values"] + sign * GAP
    if "advantage" in inputs:
        inputs["advantage"] = sign * abs(inputs["advantage"])
    return replace(case, label=f"{lowered} {GAP} lower", outputs=outputs, inputs=inputs)


def _not_finite(definition: LossDefinition, case: LossCase) -> int:
    """How many losses of the case, and squared norms of gradients, are not finite."""
    numbers = [numpy_loss(definition, case)]
    for dtype in (torch.float32, torch.float64):
        loss, gradients = torch_loss(definition, case, dtype)
        numbers += [loss, *(_squared_norm(array, dtype) for array in gradients.values())]
    return sum(not np.isfinite(number) for number in numbers)


def _squared_norm(gradient: Array, dtype: torch.dtype) -> float:
    """As an optimizer that clips by the norm adds it up: in float32, 1e20 is too much already."""
    return float(torch.tensor(gradient, dtype=dtype).square().sum())
