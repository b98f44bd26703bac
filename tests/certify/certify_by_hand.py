"""Both the implementation and the reference on the numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from nexrl.algorithms.advantage_definition import AdvantageInputs, AdvantageSettings
from nexrl.algorithms.advantages import compute_advantages
from nexrl.algorithms.aggregation import token_weights
from nexrl.algorithms.corrections import CORRECTION_PRESETS, correction_weights
from nexrl.algorithms.kl import KL_ESTIMATORS
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from tests.certify.certificate_table import worst
from tests.certify.certify_losses import reference_of, torch_loss
from tests.certify.certify_parts import relative
from tests.certify.certify_preference import evaluate, reference
from tests.certify.hand_losses import LOSSES_BY_HAND, LossByHand
from tests.certify.hand_parts import (
    ADVANTAGES_BY_HAND,
    AGGREGATIONS_BY_HAND,
    CORRECTIONS_BY_HAND,
    KL_BY_HAND,
    PREFERENCES_BY_HAND,
    AdvantageByHand,
    PreferenceByHand,
)
from tests.certify.loss_cases import Array, LossCase, prepared
from tests.certify.reference_advantages import REFERENCES
from tests.certify.reference_divergences import correction, kl, token_weight


def by_hand(family: str, name: str) -> float | None:
    """Worst error over the entries of a name; None when there is none."""
    worked = _BY_FAMILY.get(family)
    errors = list(worked(name)) if worked else []
    return worst(errors) if errors else None


def _arrays(numbers: Mapping[str, Any]) -> dict[str, Array]:
    return {key: np.asarray(value, np.float64) for key, value in numbers.items()}


# --- losses ---------------------------------------------------------------------------------------


def hand_case(entry: LossByHand) -> LossCase:
    """The entry as arguments of its loss; one row, weights 1."""
    definition = LOSSES[entry.name]
    output = np.asarray(entry.output, np.float64)
    ones = np.ones(len(output))
    inputs = {"weight": ones, **_arrays(entry.inputs)}
    if "proximal_logprobs" in definition.required:
        inputs.setdefault("proximal_logprobs", -ones)
    if "candidate_ids" in definition.required:
        inputs["candidate_ids"] = np.zeros(output.shape, np.int64)
    if definition.level == "row":
        inputs["row"] = np.zeros(len(output), np.int64)
    case = LossCase(
        label="by hand",
        lengths=(len(output),),
        outputs={definition.needs[0]: output},
        inputs=inputs,
        settings=definition.resolve(entry.settings),
    )
    return case if set(definition.prepares) & set(inputs) else prepared(definition, case)


def _losses(name: str) -> Iterator[float]:
    definition = LOSSES[name]
    for entry in LOSSES_BY_HAND:
        if entry.name == name:
            case = hand_case(entry)
            term = definition.term(case.outputs, case.inputs, case.settings)
            yield relative(term, entry.terms)
            total, gradients = torch_loss(definition, case, torch.float64)
            expected = reference_of(definition, case)
            for loss, slopes in ((total, gradients), (expected.loss, expected.gradients)):
                yield relative(loss, math.fsum(entry.terms))
                yield relative(slopes[definition.needs[0]], entry.slopes)


# --- advantages -----------------------------------------------------------------------------------


def hand_inputs(entry: AdvantageByHand) -> AdvantageInputs:
    """The entry's lists as arrays."""
    fields: dict[str, Any] = {"groups": [0] * len(entry.inputs["rewards"]), **entry.inputs}
    parts = {key: np.asarray(v, np.float64) for key, v in fields.pop("reward_parts", {}).items()}
    whole = ("groups", "lengths", "turn_lengths", "turn_counts", "turn_anchors")
    arrays: dict[str, Any] = {
        key: np.asarray(value, np.int64 if key in whole else np.float64)
        for key, value in fields.items()
    }
    return AdvantageInputs(**arrays, reward_parts=parts)


def _advantages(name: str) -> Iterator[float]:
    for entry in ADVANTAGES_BY_HAND:
        if entry.name == name:
            inputs, settings = hand_inputs(entry), AdvantageSettings(**entry.settings)
            found = compute_advantages(name, inputs, settings)
            known = REFERENCES[name](inputs, settings)
            for per_trajectory, per_token, returns in (
                (found.per_trajectory, found.per_token, found.returns),
                (known.trajectories, known.tokens, known.returns),
            ):
                yield relative(
                    per_token if per_trajectory is None else per_trajectory, entry.expected
                )
                if entry.returns is not None:
                    yield relative(returns, entry.returns)


# --- the rest -------------------------------------------------------------------------------------


def _preference_inputs(entry: PreferenceByHand) -> dict[str, Array]:
    definition = PREFERENCE_LOSSES[entry.name]
    inputs: dict[str, Any] = dict.fromkeys(definition.required, 0.0)
    inputs.update({key: 1.0 for key in inputs if key.endswith("lengths")})
    inputs.update(entry.inputs)
    return {key: np.array([value], np.float64) for key, value in inputs.items()}


def _preferences(name: str) -> Iterator[float]:
    definition = PREFERENCE_LOSSES[name]
    for entry in PREFERENCES_BY_HAND:
        if entry.name == name:
            inputs = _preference_inputs(entry)
            if "desirable" in inputs:
                inputs["desirable"] = inputs["desirable"] != 0
            for loss, slopes in (
                evaluate(definition, inputs, entry.settings, torch.float64),
                reference(definition, inputs, entry.settings),
            ):
                yield relative(loss, [entry.loss])
                for key, slope in entry.slopes.items():
                    yield relative(slopes[key], [slope])


def _kl(name: str) -> Iterator[float]:
    if name in KL_BY_HAND:
        value, slope = KL_BY_HAND[name]
        live = torch.tensor([-1.0], dtype=torch.float64).requires_grad_()
        behind = torch.tensor([-1.0 - math.log(2.0)], dtype=torch.float64)
        found = KL_ESTIMATORS[name](live, behind)
        found.sum().backward()
        assert live.grad is not None
        yield relative(found.detach().numpy(), [value])
        yield relative(live.grad.numpy(), [slope])
        yield relative(kl(name, -1.0, -1.0 - math.log(2.0)), (value, slope))


def _aggregations(name: str) -> Iterator[float]:
    if name in AGGREGATIONS_BY_HAND:
        counts, owners = (3, 1, 4), (0, 0, 1)
        found = token_weights(np.array(counts), np.array(owners), name, max_response_tokens=8)
        yield relative(found, AGGREGATIONS_BY_HAND[name])
        known = [token_weight(name, row, counts, owners, 8) for row in range(3)]
        yield relative(known, AGGREGATIONS_BY_HAND[name])


def _corrections(name: str) -> Iterator[float]:
    if name in CORRECTIONS_BY_HAND:
        preset, rows = CORRECTION_PRESETS[name], [0, 0, 1]
        logs = [math.log(4.0), -math.log(4.0), math.log(3.0)]
        found, _ = correction_weights(
            np.array(logs),
            np.zeros(3),
            np.array(rows),
            level=preset.level,
            action=preset.action,
            low=preset.low,
            high=preset.high,
        )
        yield relative(found, CORRECTIONS_BY_HAND[name])
        low, high = preset.low or 0.0, math.inf if preset.high is None else preset.high
        known, _ = correction(logs, rows, preset.level, preset.action, low, high)
        yield relative(known, CORRECTIONS_BY_HAND[name])


_BY_FAMILY: Mapping[str, Callable[[str], Iterator[float]]] = {
    "advantage": _advantages,
    "loss": _losses,
    "preference loss": _preferences,
    "KL estimator": _kl,
    "aggregation": _aggregations,
    "correction": _corrections,
}
