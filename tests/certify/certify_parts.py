"""Checks of the parts that losses share: KL estimators, denominators, corrections."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nexrl.algorithms.aggregation import token_weights
from nexrl.algorithms.corrections import (
    ACTIONS,
    CORRECTION_PRESETS,
    CorrectionPreset,
    correction_weights,
)
from nexrl.algorithms.kl import KL_ESTIMATORS
from tests.certify.certificate_table import Errors, worst
from tests.certify.reference_divergences import correction, kl, token_weight

Array = npt.NDArray[Any]
STEP = 1e-6
HELD_AT = 20.0
"""Nats within which a difference of logprobs is held before it is exponentiated."""


def relative(found: Any, expected: Any) -> float:
    """Largest difference over the largest number expected."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    scale = max(float(abs(expected).max(initial=0.0)), 1e-9)
    return float(abs(found - expected).max(initial=0.0)) / scale


# --- KL -------------------------------------------------------------------------------------------


def certify_kl(name: str) -> Errors:
    """Value of the estimator (as in rewards) and its gradient (as in losses)."""
    rng = np.random.default_rng(0)
    logprobs = (-rng.gamma(2.0, 0.7, 40)).astype(np.float32).astype(np.float64)
    reference = (logprobs + rng.normal(0.0, 0.7, 40)).astype(np.float32).astype(np.float64)
    pairs = list(zip(logprobs.tolist(), reference.tolist(), strict=True))
    values, slopes = zip(*(kl(name, *pair) for pair in pairs), strict=True)
    errors = {
        label: worst(_kl_apart(name, logprobs, reference, values, slopes, dtype))
        for label, dtype in (("float64", torch.float64), ("float32", torch.float32))
    }
    # The straight-through estimators have the gradient of k2 by definition, not that of their value.
    smooth = "k2" if name.endswith("+") else name
    higher, lower = (KL_ESTIMATORS[smooth](logprobs + s * STEP, reference) for s in (1, -1))
    errors["differences"] = relative((higher - lower) / (2 * STEP), slopes)
    order = np.argsort(reference)
    whole = KL_ESTIMATORS[name](logprobs, reference)
    errors["invariance"] = relative(
        KL_ESTIMATORS[name](logprobs[order], reference[order]), whole[order]
    )
    bad = sum(_kl_not_finite(name, far) for far in (80.0, -80.0, 0.0))
    bad += sum(not _kl_is_held(name, far) for far in (80.0, -80.0))
    errors["extremes"] = float(bad)
    return errors


def _kl_graded(
    name: str, logprobs: Array, reference: Array, dtype: torch.dtype
) -> tuple[Array, Array]:
    live = torch.tensor(logprobs, dtype=dtype).requires_grad_()
    value = KL_ESTIMATORS[name](live, torch.tensor(reference, dtype=dtype))
    value.sum().backward()
    assert live.grad is not None
    return value.detach().double().numpy(), live.grad.double().numpy()


def _kl_apart(
    name: str, logprobs: Array, reference: Array, values: Any, slopes: Any, dtype: torch.dtype
) -> Iterator[float]:
    found, gradient = _kl_graded(name, logprobs, reference, dtype)
    yield relative(found, values)
    yield relative(gradient, slopes)
    if dtype == torch.float64:
        yield relative(KL_ESTIMATORS[name](logprobs, reference), values)


def _kl_not_finite(name: str, difference: float) -> int:
    bad = 0
    for length in (0, 1, 4096):
        for dtype in (torch.float32, torch.float64):
            arrays = _kl_graded(name, np.full(length, difference), np.zeros(length), dtype)
            bad += sum(not np.isfinite(array).all() for array in arrays)
    return bad


def _kl_is_held(name: str, difference: float) -> bool:
    """Beyond 20 nats: the value at 20, without gradient, as docs/algorithms.md says."""
    value, slope = _kl_graded(name, np.array([difference]), np.zeros(1), torch.float64)
    held = kl(name, math.copysign(HELD_AT, difference), 0.0)[0]
    return bool(relative(value, held) < 1e-9 and slope[0] == 0.0)


# --- denominators ---------------------------------------------------------------------------------

LONGEST = 8
LAYOUTS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((3, 1, 4, 2), (0, 0, 1, 2)),
    ((5,), (0,)),
    ((1,), (7,)),
    ((0, 2, 0, 8), (3, 3, 1, 0)),
    ((0, 0), (0, 1)),
    ((), ()),
    ((4096, 1), (0, 1)),
)
"""(trained tokens of each row, trajectory of each row)"""


def certify_aggregation(method: str) -> Errors:
    """Weights of every row; those of a row do not depend on the order of rows."""
    found, moved, bad = [0.0], [0.0], 0
    for counts, owners in LAYOUTS:
        weights = _weights(method, counts, owners)
        expected = [
            token_weight(method, row, counts, owners, LONGEST) for row in range(len(counts))
        ]
        found.append(relative(weights, expected))
        moved.append(relative(_weights(method, counts[::-1], owners[::-1])[::-1], weights))
        bad += int((~np.isfinite(weights)).sum())
    return {"float64": worst(found), "invariance": worst(moved), "extremes": float(bad)}


def _weights(method: str, counts: tuple[int, ...], owners: tuple[int, ...]) -> Array:
    return token_weights(
        np.array(counts, np.int64),
        np.array(owners, np.int64),
        method,
        max_response_tokens=LONGEST,
    )


# --- corrections ----------------------------------------------------------------------------------


def certify_correction(name: str) -> Errors:
    """Weights and flags under a preset, and under its level with every action."""
    preset = CORRECTION_PRESETS[name]
    found = [correction_errors(replace(preset, action=action)) for action in ACTIONS]
    return {check: worst(errors[check] for errors in found) for check in found[0]}


def correction_errors(preset: CorrectionPreset) -> Errors:
    """Worst error of each check, named or not."""
    found, moved, bad = [_at_a_bound(preset), _unknown(preset)], [0.0], 0
    rng = np.random.default_rng(1)
    rows = np.repeat([0, 1, 2, 3], [1, 5, 2, 12])
    for bounds in ((preset.low, preset.high), (0.9, 1.2), (None, 1.05), (0.9, None)):
        for spread in (0.0, 1e-3, 0.3, 2.0):
            behavior = -rng.gamma(2.0, 0.7, len(rows))
            proximal = behavior + rng.normal(0.0, spread, len(rows))
            found.append(_correction_apart(preset, bounds, proximal, behavior, rows))
            whole = _correction(preset, bounds, proximal, behavior, rows)
            back = _correction(preset, bounds, proximal[::-1], behavior[::-1], rows[::-1])
            moved.append(worst(relative(a[::-1], b) for a, b in zip(back, whole, strict=True)))
        for length in (0, 1, 4096):
            for far in (80.0, -80.0):
                row = np.zeros(length, np.int64)
                weights, _ = _correction(preset, bounds, np.full(length, far), 0.0 * row, row)
                bad += int((~np.isfinite(weights)).sum())
                bad += int((weights.astype(np.float32) ** 2 > 1e30).sum())
    return {"float64": worst(found), "invariance": worst(moved), "extremes": float(bad)}


def _at_a_bound(preset: CorrectionPreset) -> float:
    """A ratio of exactly the bound is within it: ratios 1/2 and 2, bounds 1/2 and 2."""
    rows, bounds = np.arange(2), (0.5, 2.0)
    logs = np.array([-math.log(2.0), math.log(2.0)])
    weights, masked = _correction(preset, bounds, logs, np.zeros(2), rows)
    expected = [1.0, 1.0] if preset.action == "none" else [0.5, 2.0]
    return worst([relative(weights, expected), float(masked.sum())])


def _unknown(preset: CorrectionPreset) -> float:
    """A token whose engine logprob is unknown has ratio 1, also within its row."""
    rng = np.random.default_rng(3)
    rows = np.repeat([0, 1], [3, 4])
    proximal = -rng.gamma(2.0, 0.7, len(rows))
    behavior = proximal + rng.normal(0.0, 0.05, len(rows))
    unknown = np.arange(len(rows)) % 3 == 1
    given = np.where(unknown, np.nan, behavior)
    behavior = np.where(unknown, proximal, behavior)
    found = _correction(preset, (0.9, 1.2), proximal, given, rows)
    expected = _correction(preset, (0.9, 1.2), proximal, behavior, rows)
    return worst(relative(a, b) for a, b in zip(found, expected, strict=True))


def _correction(
    preset: CorrectionPreset,
    bounds: tuple[float | None, float | None],
    proximal: Array,
    behavior: Array,
    rows: Array,
) -> tuple[Array, Array]:
    low, high = bounds
    return correction_weights(
        proximal, behavior, rows, level=preset.level, action=preset.action, low=low, high=high
    )


def _correction_apart(
    preset: CorrectionPreset,
    bounds: tuple[float | None, float | None],
    proximal: Array,
    behavior: Array,
    rows: Array,
) -> float:
    low, high = bounds
    expected = correction(
        (proximal - behavior).tolist(),
        rows.tolist(),
        preset.level,
        preset.action,
        0.0 if low is None else low,
        np.inf if high is None else high,
    )
    found = _correction(preset, bounds, proximal, behavior, rows)
    return worst(relative(a, b) for a, b in zip(found, expected, strict=True))
