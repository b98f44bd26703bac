"""Checks of the losses on offline data: pairs, labelled responses, step ends.

PreferenceLoss -> cases -> {check: worst error}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nexrl.algorithms.preference_losses import PreferenceLoss
from tests.certify.certificate_table import Errors, worst
from tests.certify.reference_preference import PREFERENCE

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Settings = Mapping[str, float]

LIVE = (
    "chosen_logprobs",
    "rejected_logprobs",
    "logprobs",
    "chosen_scores",
    "rejected_scores",
    "scores",
)
"""Inputs that depend on the model; the others are given."""
VARIANTS: Mapping[str, tuple[Settings, ...]] = {
    "dpo": ({"beta": 0.5, "label_smoothing": 0.2}, {"sft_coefficient": 0.3}),
    "ipo": ({"beta": 0.7, "sft_coefficient": 0.3},),
    "hinge": ({"beta": 1.3, "sft_coefficient": 0.3},),
    "simpo": ({"beta": 2.0, "margin": 0.8, "sft_coefficient": 0.3},),
    "orpo": ({"odds_coefficient": 1.0},),
    "kto": ({"beta": 0.6, "desirable_weight": 1.3, "undesirable_weight": 0.8},),
    "reward_model": ({"margin": 0.5},),
}
STEP = 1e-6


def certify_preference(definition: PreferenceLoss) -> Errors:
    """Worst error of each check; the name must have a reference."""
    cases = list(_cases(definition))
    found = [_against_reference(definition, *case, torch.float64) for case in cases]
    found += [_gradient_of_z0(definition, *case) for case in cases if "z0" in definition.required]
    return {
        "float64": worst(found),
        "float32": worst(_against_reference(definition, *case, torch.float32) for case in cases),
        "differences": worst(_finite_differences(definition, *case) for case in cases),
        "invariance": worst(_order_and_split(definition, *case) for case in cases),
        "extremes": float(sum(_not_finite(definition, *case) for case in _extremes(definition))),
    }


def evaluate(
    definition: PreferenceLoss, inputs: Arrays, settings: Settings, dtype: torch.dtype
) -> tuple[Array, dict[str, Array]]:
    """[P] losses on torch, and the gradient of their sum by live input."""
    tensors = {
        key: torch.tensor(array, dtype=dtype if array.dtype.kind == "f" else None)
        for key, array in inputs.items()
    }
    live = {key: tensor.requires_grad_() for key, tensor in tensors.items() if key in LIVE}
    losses = definition.loss(tensors, settings)
    if losses.requires_grad:
        losses.sum().backward()
    gradients = {
        key: (torch.zeros_like(tensor) if tensor.grad is None else tensor.grad).double().numpy()
        for key, tensor in live.items()
    }
    return losses.detach().double().numpy(), gradients


def reference(
    definition: PreferenceLoss, inputs: Arrays, settings: Settings
) -> tuple[Array, dict[str, Array]]:
    """[P] losses and gradients of the reference."""
    complete = definition.resolve(settings)
    count = len(next(inputs[key] for key in LIVE if key in inputs))
    losses = np.zeros(count)
    gradients = {key: np.zeros(count) for key in LIVE if key in inputs}
    for p in range(count):
        entry = {key: float(array[p] if array.ndim else array) for key, array in inputs.items()}
        losses[p], slopes = PREFERENCE[definition.name](entry, complete)
        for key, slope in slopes.items():
            gradients[key][p] = slope
    return losses, gradients


# --- cases ----------------------------------------------------------------------------------------


def _cases(definition: PreferenceLoss) -> Iterator[tuple[Arrays, Settings]]:
    for number, settings in enumerate(({}, *VARIANTS.get(definition.name, ()))):
        for seed in range(3):
            yield random_inputs(definition, settings, 7, seed=10 * number + seed), settings
        one = random_inputs(definition, settings, 1, seed=number)
        yield one, settings
        if definition.rows == "pair":
            swap = {key: one[key.replace("rejected", "chosen")] for key in one}
            yield swap, settings
        if "desirable" in one:
            for label in (True, False):
                yield {**one, "desirable": np.array([label]), "z0": np.array(0.0)}, settings


def random_inputs(
    definition: PreferenceLoss, settings: Settings, count: int, *, seed: int
) -> dict[str, Array]:
    """P entries that float32 holds exactly."""
    rng = np.random.default_rng(seed)
    lengths = {side: rng.integers(1, 9, count) for side in ("chosen", "rejected", "")}
    inputs: dict[str, Array] = {}
    optional = [*definition.optional] if settings else []
    for key in (*definition.required, *optional):
        side = next((s for s in ("chosen", "rejected") if s in key), "")
        if key.endswith("lengths"):
            inputs[key] = lengths[side]
        elif key.endswith("logprobs"):
            inputs[key] = -lengths[side] * rng.uniform(0.2, 1.5, count)
        elif key == "desirable":
            inputs[key] = rng.random(count) < 0.5
        elif key == "z0":
            inputs[key] = np.array(rng.uniform(0.0, 1.0))
        elif key == "margin":
            inputs[key] = rng.uniform(0.0, 1.0, count)
        elif key == "labels":
            inputs[key] = (rng.random(count) < 0.5).astype(np.float64)
        else:
            inputs[key] = rng.normal(0.0, 2.0, count)
    return {
        key: array.astype(np.float32).astype(np.float64) if array.dtype.kind == "f" else array
        for key, array in inputs.items()
    }


def _extremes(definition: PreferenceLoss) -> Iterator[tuple[Arrays, Settings]]:
    """Sums of 1 and 4,096 tokens, 80 nats a token apart either way; certain ones; no entry."""
    for settings in ({}, *VARIANTS.get(definition.name, ())):
        base = random_inputs(definition, settings, 4, seed=3)
        for tokens in (1, 4096):
            for side in ("chosen", "rejected", "reference", ""):
                moved = dict(base)
                for key in base:
                    if key.endswith("lengths"):
                        moved[key] = np.full(4, tokens)
                    elif key.endswith("logprobs"):
                        far = key.startswith(side) if side else True
                        moved[key] = np.full(4, -80.0 * tokens if far else -1e-9)
                    elif key.endswith("scores"):
                        moved[key] = np.full(4, 80.0 if key.startswith(side) else -80.0)
                yield moved, settings
                certain = {k: 0.0 * v if k.endswith("logprobs") else v for k, v in moved.items()}
                yield certain, settings
        yield {key: array[:0] if array.ndim else array for key, array in base.items()}, settings


# --- checks ---------------------------------------------------------------------------------------


def _apart(found: Array, expected: Array) -> float:
    scale = max(float(abs(expected).max(initial=0.0)), 1e-9)
    return float(abs(found - expected).max(initial=0.0)) / scale


def _against_reference(
    definition: PreferenceLoss, inputs: Arrays, settings: Settings, dtype: torch.dtype
) -> float:
    expected, slopes = reference(definition, inputs, settings)
    losses, gradients = evaluate(definition, inputs, settings, dtype)
    errors = [_apart(losses, expected), *(_apart(gradients[k], slopes[k]) for k in slopes)]
    if dtype == torch.float64:
        errors.append(_apart(np.asarray(definition.loss(inputs, settings)), expected))
    return worst(errors)


def _gradient_of_z0(definition: PreferenceLoss, inputs: Arrays, settings: Settings) -> float:
    """No gradient flows through the reference point (KTO 2024), whatever it was computed from."""
    tensors = {key: torch.tensor(array) for key, array in inputs.items()}
    tensors["z0"] = tensors["z0"].double().requires_grad_()
    losses = definition.loss(
        {**tensors, "logprobs": tensors["logprobs"].requires_grad_()}, settings
    )
    losses.sum().backward()
    slope = tensors["z0"].grad
    return 0.0 if slope is None else float(slope.abs().max())


def _finite_differences(definition: PreferenceLoss, inputs: Arrays, settings: Settings) -> float:
    _, slopes = reference(definition, inputs, settings)
    errors = []
    for key, expected in slopes.items():
        ends = [
            np.asarray(definition.loss({**inputs, key: inputs[key] + sign * STEP}, settings))
            for sign in (1.0, -1.0)
        ]
        errors.append(_apart((ends[0] - ends[1]) / (2.0 * STEP), expected))
    return worst(errors)


def _order_and_split(definition: PreferenceLoss, inputs: Arrays, settings: Settings) -> float:
    """Entries backwards and one at a time: the same losses and gradients."""
    losses, gradients = evaluate(definition, inputs, settings, torch.float64)
    errors = []
    backwards = [slice(None, None, -1)]
    singles = [slice(p, p + 1) for p in range(len(losses))]
    for parts in (backwards, singles):
        for part in parts:
            cut = {
                key: array[part].copy() if array.ndim else array for key, array in inputs.items()
            }
            some, slopes = evaluate(definition, cut, settings, torch.float64)
            errors.append(_apart(some, losses[part]))
            errors += [_apart(slopes[key], gradients[key][part]) for key in gradients]
    return worst(errors)


def _not_finite(definition: PreferenceLoss, inputs: Arrays, settings: Settings) -> int:
    numbers: list[Array] = [np.asarray(definition.loss(inputs, settings))]
    for dtype in (torch.float32, torch.float64):
        losses, gradients = evaluate(definition, inputs, settings, dtype)
        numbers += [losses, *gradients.values()]
    return sum(not np.isfinite(array).all() for array in numbers)
