"""Checks of the advantage estimators, each against its reference.

layouts of trajectories, turns and tokens -> {check: worst error}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.advantage_definition import (
    AdvantageDefinition,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
)
from nexrl.algorithms.advantages import compute_advantages
from nexrl.algorithms.baseline_advantages import moved_baseline
from tests.certify.certificate_table import Errors, worst
from tests.certify.reference_advantages import REFERENCES, Found, moved

Array = npt.NDArray[Any]
MOMENTUM = 0.9
"""Share of the moving baseline that a batch leaves, where nothing else is said."""

GROUPINGS: Mapping[str, Sequence[int]] = {
    "groups of four": (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2),
    "incomplete, interleaved groups": (3, 0, 3, 1, 0, 3, 2, 2, 2, 2, 2),
    "a singleton among groups": (0, 0, 0, 5, 1, 1),
    "one trajectory": (0,),
    "no trajectory": (),
}
SETTINGS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "grpo": ({"std": "population"}, {"std": "none"}),
    "pass_at_k": ({"pass_k": 1}, {"pass_k": 3, "success_reward": 0.5}),
    "gdpo": ({"whiten": False}, {"part_weights": {"format": 0.25}}),
    "reinforce_pp_baseline": ({"whiten": False},),
    "reinforce": (
        {"baseline": "batch"},
        {"baseline": "moving"},
        {"baseline": "moving", "moving_baseline": 0.3},
        {"baseline": "moving", "moving_baseline": 0.0},
    ),
    "gae": (
        {"gamma": 0.9, "gae_lambda": 0.8, "whiten": False},
        {"gamma": 0.9, "gae_lambda": 0.8, "critic_lambda": 1.0},
        {"gamma": 0.99, "length_adaptive": 0.3},
    ),
    "reinforce_pp": ({"gamma": 0.9}, {"whiten": False}),
    "step_returns": ({"gamma": 0.7},),
    "gigpo": ({"gamma": 0.7, "step_weight": 0.5}, {"std": "none"}),
    "distill": (
        {"distill_coefficient": 0.5, "task_coefficient": 2.0},
        {"task_coefficient": 1.0, "std": "population"},
    ),
}
PER_TOKEN = ("token_rewards", "values", "behavior_logprobs", "teacher_logprobs")
PER_TURN = ("turn_rewards", "turn_lengths", "turn_anchors")


def certify_advantage(definition: AdvantageDefinition) -> Errors:
    """Worst error of each check; the name must have a reference."""
    choices = [AdvantageSettings(**s) for s in ({}, *SETTINGS.get(definition.name, ()))]
    cases = [(inputs, choice) for choice in choices for inputs in advantage_cases(definition)]
    further = [(inputs, choice) for choice in choices for inputs in uneven_cases()]
    if definition.name in LARGE:
        further.append((large_batch(), choices[-1]))
    found = [_against_reference(definition, *case) for case in (*cases, *further)]
    if definition.name == "reinforce":
        found += [_moving_baseline(inputs) for inputs, _ in (*cases, *further)]
    return {
        "float64": worst(found),
        "float32": worst(_against_reference(definition, *case, np.float32) for case in cases),
        "invariance": worst(_reordered(definition, *case) for case in (*cases, *further)),
        "extremes": float(sum(_not_finite(definition, inputs) for inputs in _extremes())),
    }


# --- cases ----------------------------------------------------------------------------------------


def advantage_cases(definition: AdvantageDefinition) -> Iterator[AdvantageInputs]:
    """Every grouping, with binary, spread and constant rewards, with and without token rewards."""
    for number, groups in enumerate(GROUPINGS.values()):
        for kind in ("binary", "spread", "constant"):
            inputs = make_inputs(groups, seed=number, rewards=kind)
            yield inputs
            if kind == "spread":
                yield replace(inputs, token_rewards=None)


def uneven_cases() -> Iterator[AdvantageInputs]:
    """Rewards that differ by rounding alone, rewards near 1e9, trajectories without a trained token,
    and those of more tokens, or turns, than are stepped over at once."""
    groups = GROUPINGS["incomplete, interleaved groups"]
    inputs = replace(make_inputs(groups, seed=7, rewards="constant"), token_rewards=None)
    jitter = np.random.default_rng(0).uniform(-1.0, 1.0, len(groups))
    for centre, spread in ((0.7, 1e-10), (0.7, 1e-5), (-1e9, 1.0)):
        drawn = centre + spread * jitter
        yield replace(inputs, rewards=drawn, reward_parts={**inputs.reward_parts, "answer": drawn})
    lengths = (0, 40, 1, 17, 33, 16, 0, 48, 2, 0, 0)
    yield _without_empty_turns(
        make_inputs((0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4), seed=8, lengths=lengths)
    )
    yield _of_single_tokens(make_inputs((0, 0, 0, 1), seed=9, lengths=(37, 1, 16, 20)))


def _without_empty_turns(inputs: AdvantageInputs) -> AdvantageInputs:
    """Trajectories without a trained token have no turn either."""
    assert inputs.turn_lengths is not None
    alive = inputs.turn_lengths > 0
    turns = {name: getattr(inputs, name)[alive] for name in PER_TURN}
    return replace(inputs, turn_counts=alive.astype(np.int64), **turns)


def _of_single_tokens(inputs: AdvantageInputs) -> AdvantageInputs:
    """Every token is a turn."""
    assert inputs.lengths is not None
    rng, total = np.random.default_rng(9), int(inputs.lengths.sum())
    return replace(
        inputs,
        turn_counts=inputs.lengths,
        turn_lengths=np.ones(total, np.int64),
        turn_rewards=rng.normal(0.0, 1.0, total),
        turn_anchors=rng.integers(-1, 3, total),
    )


LARGE = ("gae", "reinforce_pp")
"""Estimators that work through a batch in parts, of about 65,536 tokens."""


def large_batch() -> AdvantageInputs:
    """More tokens than fit in two parts, in short trajectories."""
    rng = np.random.default_rng(10)
    lengths = rng.integers(1, 48, 6000)
    return make_inputs(np.arange(6000) // 4, seed=10, lengths=lengths)  # type: ignore[arg-type]


def make_inputs(
    groups: Sequence[int],
    *,
    seed: int = 0,
    rewards: str = "spread",
    lengths: Sequence[int] | None = None,
) -> AdvantageInputs:
    """Everything an estimator may use; trajectories have one to three turns of one to four tokens."""
    rng = np.random.default_rng(seed)
    num = len(groups)
    counts = rng.integers(1, 4, num) if lengths is None else np.ones(num, np.int64)
    turn_lengths = rng.integers(1, 5, int(counts.sum())) if lengths is None else np.array(lengths)
    owners = np.repeat(np.arange(num), counts)
    tokens = np.bincount(owners, weights=turn_lengths, minlength=num).astype(np.int64)
    drawn = {
        "binary": (rng.random(num) < 0.5).astype(np.float64),
        "spread": rng.normal(0.5, 1.0, num),
        "constant": np.full(num, 0.7),
    }[rewards]
    total = int(tokens.sum())

    def per_token(low: float, high: float) -> Array:
        return rng.uniform(low, high, total).astype(np.float32).astype(np.float64)

    return AdvantageInputs(
        rewards=drawn,
        groups=np.array(groups, np.int64),
        lengths=tokens,
        token_rewards=np.zeros(total) if rewards == "constant" else per_token(-0.1, 0.1),
        values=per_token(-1.0, 1.0),
        turn_rewards=np.where(rng.random(len(owners)) < 0.5, 0.0, rng.normal(size=len(owners))),
        turn_lengths=turn_lengths.astype(np.int64),
        turn_counts=counts.astype(np.int64),
        turn_anchors=rng.integers(-1, 3, len(owners)),
        reward_parts={"answer": drawn, "format": (rng.random(num) < 0.7).astype(np.float64)},
        greedy_rewards=rng.normal(0.5, 1.0, num),
        behavior_logprobs=per_token(-3.0, 0.0),
        teacher_logprobs=per_token(-3.0, 0.0),
    )


def _extremes() -> Iterator[AdvantageInputs]:
    """One token and 4,096, no trajectory, huge rewards, teacher and student 80 nats apart."""
    yield make_inputs(())
    for length in (1, 4096):
        inputs = make_inputs((0, 0, 1), lengths=(length, 1, length))
        yield inputs
        yield replace(inputs, rewards=np.array([1e12, 1e12, -1e12]))
        yield replace(inputs, rewards=np.array([1e12, -1e12, 0.0]))
        for sign in (1.0, -1.0):
            yield replace(inputs, teacher_logprobs=inputs.behavior_logprobs + 80.0 * sign)


# --- checks ---------------------------------------------------------------------------------------


def _numbers(found: Advantages | Found) -> list[Array]:
    if isinstance(found, Found):
        first: Any = found.tokens if found.trajectories is None else found.trajectories
    else:
        first = found.per_token if found.per_trajectory is None else found.per_trajectory
    arrays = [first] if found.returns is None else [first, found.returns]
    return [np.asarray(array, np.float64) for array in arrays]


def _apart(found: Sequence[Array], expected: Sequence[Array]) -> float:
    """Largest difference over the largest number expected, at least 1e-3 of a reward; where nothing
    is expected (nan), anything will do."""
    errors = [0.0]
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return float("inf")
        defined = ~np.isnan(other)
        one, other = one[defined], other[defined]
        scale = max(float(abs(other).max(initial=0.0)), 1e-3)
        errors.append(float(abs(one - other).max(initial=0.0)) / scale)
    return worst(errors)


def _against_reference(
    definition: AdvantageDefinition,
    inputs: AdvantageInputs,
    settings: AdvantageSettings,
    dtype: type[np.floating[Any]] = np.float64,
) -> float:
    columns = {
        name: getattr(inputs, name).astype(dtype)
        for name in PER_TOKEN
        if getattr(inputs, name) is not None
    }
    found = compute_advantages(definition, replace(inputs, **columns), settings)
    return _apart(_numbers(found), _numbers(REFERENCES[definition.name](inputs, settings)))


def _moving_baseline(inputs: AdvantageInputs) -> float:
    """The baseline that the batch leaves, from none and from another."""
    errors = []
    for present in (None, 0.0, -3.0):
        for momentum in (MOMENTUM, 0.25):
            found = moved_baseline(present, inputs, momentum=momentum)
            expected = moved(present, inputs, momentum)
            if found is None or expected is None:
                errors.append(0.0 if found is expected else float("inf"))
            else:
                errors.append(abs(found - expected) / max(abs(expected), 1e-3))
    return worst(errors)


def _reordered(
    definition: AdvantageDefinition, inputs: AdvantageInputs, settings: AdvantageSettings
) -> float:
    """Trajectories backwards: the same advantages, backwards."""
    order = np.arange(len(inputs.rewards))[::-1]
    assert inputs.lengths is not None
    assert inputs.turn_counts is not None
    tokens = _places(inputs.lengths, order)
    turns = _places(inputs.turn_counts, order)
    columns: dict[str, Any] = {
        **{name: _moved(getattr(inputs, name), tokens) for name in PER_TOKEN},
        **{name: _moved(getattr(inputs, name), turns) for name in PER_TURN},
        **{
            name: getattr(inputs, name)[order]
            for name in ("rewards", "groups", "lengths", "turn_counts", "greedy_rewards")
        },
        "reward_parts": {part: numbers[order] for part, numbers in inputs.reward_parts.items()},
    }
    moved = replace(inputs, **columns)
    whole = _numbers(compute_advantages(definition, inputs, settings))
    found = _numbers(compute_advantages(definition, moved, settings))
    per_trajectory = len(whole[0]) == len(order) and len(tokens) != len(order)
    return _apart(found, [array[order if per_trajectory else tokens] for array in whole])


def _places(counts: Array, order: Array) -> Array:
    starts = np.concatenate([[0], np.cumsum(counts)])
    parts = [np.arange(starts[i], starts[i + 1]) for i in order]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _moved(array: Array | None, places: Array) -> Array | None:
    return None if array is None else array[places]


def _not_finite(definition: AdvantageDefinition, inputs: AdvantageInputs) -> int:
    found = _numbers(compute_advantages(definition, inputs, AdvantageSettings()))
    return sum(not np.isfinite(array).all() for array in found)
