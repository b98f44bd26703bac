"""Rows dealt to ranks: one denominator for the optimizer step, whatever the rank count.

weights of the whole step -> rows dealt to R ranks, each in micro-steps of its own
    -> each rank sums its terms, gradients are summed over ranks, nothing is divided == the whole

A rank may hold rows without a trained token, or no row, and ranks need not make equally many
micro-steps. What the trainer knows of the whole step (weights, correction, what `prepare` found) is
made before rows are dealt, as it is in the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nexrl.algorithms.aggregation import AGGREGATIONS, token_weights
from nexrl.algorithms.loss_definition import LossDefinition
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.preference_losses import PreferenceLoss
from tests.certify.certificate_table import worst
from tests.certify.certify_losses import Graded, gradient_errors, places_of, rows_of, torch_loss
from tests.certify.certify_parts import relative
from tests.certify.certify_preference import (
    VARIANTS as PREFERENCE_VARIANTS,
)
from tests.certify.certify_preference import (
    evaluate,
    random_inputs,
    reference,
)
from tests.certify.loss_cases import LossCase, prepared, random_case
from tests.certify.loss_variants import VARIANTS
from tests.certify.reference_divergences import token_weight
from tests.certify.reference_losses import graded

Deal = Sequence[Sequence[Sequence[int]]]
"""Rows by rank and micro-step."""
WeightsOf = Callable[[Sequence[int]], np.ndarray[Any, Any]]
"""Rows -> the weight of each of their trained tokens."""

COUNTS = (5, 1, 3, 8, 2, 0)
"""Trained tokens of each row; the last has none."""
OWNERS = (0, 0, 1, 2, 2, 3)
"""Trajectory of each row."""
LONGEST = 8
DEALS: Mapping[str, Deal] = {
    "two ranks, three micro-steps and one": (((0,), (1, 2), (3,)), ((4, 5),)),
    "two ranks, one without a trained token": (((3, 1), (0, 2, 4)), ((5,),)),
    "three ranks, trajectories apart": (((0, 3),), ((1,), (2,), (4,)), ((5,),)),
    "three ranks, one without a row": (((4, 0), (3,)), ((2, 1, 5),), ()),
}


def certify_ranks(definition: LossDefinition, methods: Sequence[str] = ()) -> float:
    """Worst difference from the reference over the whole step, under each aggregation allowed."""
    allowed = (definition.aggregation,) if definition.aggregation else tuple(AGGREGATIONS)
    return worst(
        rank_error(definition, settings, method)
        for settings in _settings(definition)
        for method in methods or allowed
    )


def certify_aggregation_ranks(method: str) -> float:
    """A loss of level token and one of level row, under one denominator."""
    return worst(certify_ranks(LOSSES[name], (method,)) for name in ("ppo", "vespo"))


def _settings(definition: LossDefinition) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = [{}, *VARIANTS.get(definition.name, ())[:1]]
    if "kl_coefficient" in definition.config:
        terms = {"kl_coefficient": 0.3, "kl_estimator": "k3", "entropy_coefficient": 0.05}
        found.append(terms)
    return found


def rank_error(
    definition: LossDefinition,
    settings: Mapping[str, Any],
    method: str,
    weights_of: Callable[[str, Sequence[int]], np.ndarray[Any, Any]] | None = None,
) -> float:
    """Worst over all deals. `weights_of` (aggregation, rows) stands in for the weights of the whole
    step where a test wants to see a wrong denominator found."""
    case = _case(definition, settings, method)
    whole = _reference(definition, case, method)
    errors: list[float] = []
    for deal in DEALS.values():
        own = None if weights_of is None else _by_rank(deal, method, weights_of)
        given = case if own is None else replace(case, inputs={**case.inputs, "weight": own})
        loss, gradients = _summed(definition, given, deal)
        errors.append(abs(loss - whole.loss) / max(whole.scale, 1e-9))
        errors += gradient_errors(gradients, whole.gradients)
    return worst(errors)


def _case(definition: LossDefinition, settings: Mapping[str, Any], method: str) -> LossCase:
    case = random_case(definition, settings, COUNTS, seed=3)
    extra: dict[str, Any] = {"weight": np.repeat(_weights(method, range(len(COUNTS))), COUNTS)}
    if "correction" in definition.optional:
        extra["correction"] = np.where(np.arange(sum(COUNTS)) % 3 == 0, 0.0, 1.5)
    return prepared(definition, replace(case, inputs={**case.inputs, **extra}))


def _weights(method: str, rows: Sequence[int]) -> np.ndarray[Any, Any]:
    """[rows] denominators over these rows alone."""
    return token_weights(
        np.array([COUNTS[r] for r in rows], np.int64),
        np.array([OWNERS[r] for r in rows], np.int64),
        method,
        max_response_tokens=LONGEST,
    )


def weights_by_rank(method: str, rows: Sequence[int]) -> np.ndarray[Any, Any]:
    """What a rank would do that asks only itself: the mistake that this check is there for."""
    return _weights(method, rows)


def _by_rank(deal: Deal, method: str, weights_of: Any) -> np.ndarray[Any, Any]:
    """[tokens] weights that each rank made of its own rows, averaged over ranks."""
    found = np.zeros(len(COUNTS))
    for rank in deal:
        rows = [row for step in rank for row in step]
        found[rows] = weights_of(method, rows) / len(deal)
    return np.repeat(found, COUNTS)


def _reference(definition: LossDefinition, case: LossCase, method: str) -> Any:
    weights = [token_weight(method, row, COUNTS, OWNERS, LONGEST) for row in range(len(COUNTS))]
    inputs = {**case.inputs, "weight": np.repeat(weights, COUNTS)}
    return graded(definition.name, case.outputs, inputs, case.settings)


def _summed(definition: LossDefinition, case: LossCase, deal: Deal) -> Graded:
    total = 0.0
    summed = {key: np.zeros_like(array) for key, array in case.outputs.items()}
    for rank in deal:
        for rows in rank:
            places = places_of(case.lengths, rows)
            loss, part = torch_loss(definition, rows_of(case, rows, places), torch.float64)
            total += loss
            for key, array in part.items():
                summed[key][places] += array
    return total, summed


# --- losses of pairs ------------------------------------------------------------------------------

NUM_ENTRIES = 7
ENTRY_DEALS: Sequence[Deal] = (
    (((0, 1), (2,), (3, 4)), ((5, 6),)),
    (((6, 0),), ((1,), (2,), (3, 4, 5)), ()),
)


def certify_preference_ranks(definition: PreferenceLoss) -> float:
    """The mean over the P entries of a step, whoever holds them: each rank sums loss / P."""
    errors = []
    for number, settings in enumerate(({}, *PREFERENCE_VARIANTS.get(definition.name, ()))):
        inputs = random_inputs(definition, settings, NUM_ENTRIES, seed=number)
        losses, slopes = reference(definition, inputs, settings)
        for deal in ENTRY_DEALS:
            total, found = 0.0, {key: np.zeros(NUM_ENTRIES) for key in slopes}
            for entries in (list(step) for rank in deal for step in rank):
                part = {k: v[entries] if v.ndim else v for k, v in inputs.items()}
                some, gradients = evaluate(definition, part, settings, torch.float64)
                total += float(some.sum()) / NUM_ENTRIES
                for key in slopes:
                    found[key][entries] += gradients[key] / NUM_ENTRIES
            errors.append(relative(total, losses.mean()))
            errors += [relative(found[key], slopes[key] / NUM_ENTRIES) for key in slopes]
    return worst(errors)
