"""Checks of what is neither a loss nor an advantage: filters, shaping, entropy, learning rates.

name -> {check: worst error}, those worked by hand among them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nexrl.algorithms.aggregation import AGGREGATIONS, token_weights
from nexrl.algorithms.filters import GROUP_FILTERS
from nexrl.algorithms.schedule import learning_rate
from nexrl.algorithms.shaping import shape_rewards, trained_after_masking
from nexrl.config.schema_algorithm import EntropyConfig
from nexrl.services.train.backends.token_scores import token_scores
from nexrl.testing.makers import make_draw, make_group, make_record
from nexrl.trainer.policy_steps import EntropyBonus
from nexrl.types import RolloutGroup
from tests.certify import reference_rules as reference
from tests.certify.certificate_table import Errors, worst
from tests.certify.certify_parts import Array, relative
from tests.certify.hand_rules import (
    ENTROPY_BY_HAND,
    FILTERS_BY_HAND,
    HELD_BY_HAND,
    MASKED_BY_HAND,
    RATES_BY_HAND,
    SHAPING_BY_HAND,
)
from tests.certify.reference_divergences import token_weight

STEP = 1e-6
LONGEST = 20

# --- filters --------------------------------------------------------------------------------------

Members = Sequence[tuple[str, float | None]]


def certify_filter(name: str) -> Errors:
    """Shares of groups on which filter and reference disagree."""
    groups = list(_groups())
    huge: list[tuple[Members, str]] = [
        ((("a", 1e300), ("a", -1e300)), ".."),
        ((("a", -1e300), ("a", -1e300)), "tt"),
        (tuple(("a", float(i == 7)) for i in range(4096)), "t" * 4096),
    ]
    return {
        "float64": _disagreement(name, groups),
        "by hand": float(
            sum(
                verdict != dropped
                for members, marks, dropped in FILTERS_BY_HAND[name]
                for verdict in (_drops(name, members, marks), _expected(name, members, marks))
            )
        ),
        "invariance": float(
            np.mean([_drops(name, m[::-1], t[::-1]) != _drops(name, m, t) for m, t in groups])
        ),
        "extremes": _disagreement(name, huge) * len(huge),
    }


def _disagreement(name: str, groups: Sequence[tuple[Members, str]]) -> float:
    return float(np.mean([_drops(name, *group) != _expected(name, *group) for group in groups]))


def _groups() -> Iterator[tuple[Members, str]]:
    """Random groups of one to six members with one to three baselines, rewards near each other,
    apart, equal or missing, and any of them truncated."""
    rng = np.random.default_rng(0)
    for number in range(300):
        size = int(rng.integers(1, 7))
        spread = (0.0, 1e-9, 3e-8, 1.0)[number % 4]
        centre = (0.0, 1.0, -40.0)[number % 3]
        rewards = centre + spread * rng.integers(0, 2, size)
        absent = rng.random(size) < 0.2
        keys = rng.choice(["a", "b", "c"][: 1 + number % 3], size)
        members = [
            (str(key), None if gone else float(reward))
            for key, reward, gone in zip(keys, rewards, absent, strict=True)
        ]
        yield members, "".join(rng.choice(["t", "t", "."], size))


def _drops(name: str, members: Members, marks: str) -> bool:
    return GROUP_FILTERS[name](_rollouts(members, marks)) is not None


def _expected(name: str, members: Members, marks: str) -> bool:
    return reference.FILTERS[name](members, [mark == "t" for mark in marks])


def _rollouts(members: Members, marks: str) -> RolloutGroup:
    draw = make_draw()
    records = [
        make_record(
            draw,
            member,
            reward=reward,
            group_id=key,
            status="truncated" if mark == "t" else "completed",
        )
        for member, ((key, reward), mark) in enumerate(zip(members, marks, strict=True))
    ]
    return make_group(records=records)


# --- shaping --------------------------------------------------------------------------------------

OFF: Mapping[str, Any] = {"overlong_cache": None, "overlong_penalty": 1.0, "length_penalty": 0.0}
SHAPINGS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "overlong_cache": ({"overlong_cache": 1}, {"overlong_cache": 7}, {"overlong_cache": LONGEST}),
    "overlong_penalty": tuple(
        {"overlong_cache": 6, "overlong_penalty": penalty} for penalty in (0.0, 0.3, 2.0)
    ),
    "length_penalty": (
        {"length_penalty": 0.02},
        {"length_penalty": 0.5, "overlong_cache": 5, "overlong_penalty": 0.7},
    ),
}


def certify_shaping(name: str) -> Errors:
    """Rewards after shaping; for `mask_truncated` the weights of what is left."""
    if name == "mask_truncated":
        return _certify_masking()
    choices = [{**OFF, **choice} for choice in SHAPINGS[name]]
    rng = np.random.default_rng(1)
    rewards, lengths = rng.normal(0.0, 1.0, 60), rng.integers(0, 2 * LONGEST, 60)
    found = [_shaped(rewards, lengths, choice) for choice in choices]
    far = [
        _shaped(np.full(3, reward), np.array([0, 1, 2**40]), choice)
        for choice in choices
        for reward in (1e300, -1e300)
    ]
    far += [_shaped(rewards[:0], lengths[:0], choice) for choice in choices]
    backwards = [_shaped(rewards[::-1], lengths[::-1], choice)[::-1] for choice in choices]
    single = [
        np.concatenate([_shaped(rewards[i : i + 1], lengths[i : i + 1], c) for i in range(60)])
        for c in choices
    ]
    return {
        "float64": worst(
            relative(one, _shaped_reference(rewards, lengths, choice))
            for one, choice in zip(found, choices, strict=True)
        ),
        "by hand": worst(_shaping_by_hand(name)),
        "invariance": worst(
            relative(one, other)
            for moved in (backwards, single)
            for one, other in zip(moved, found, strict=True)
        ),
        "extremes": float(sum(not np.isfinite(array).all() for array in far)),
    }


def _shaped(rewards: Array, lengths: Array, settings: Mapping[str, Any]) -> Array:
    return shape_rewards(rewards, lengths, max_response_tokens=LONGEST, **settings)


def _shaped_reference(rewards: Array, lengths: Array, settings: Mapping[str, Any]) -> list[float]:
    return [
        reference.shaped(
            reward,
            length,
            longest=LONGEST,
            cache=settings["overlong_cache"],
            overlong_penalty=settings["overlong_penalty"],
            length_penalty=settings["length_penalty"],
        )
        for reward, length in zip(rewards.tolist(), lengths.tolist(), strict=True)
    ]


def _shaping_by_hand(name: str) -> Iterator[float]:
    settings, expected = SHAPING_BY_HAND[name]
    complete = {**OFF, **settings}
    lengths, ones = np.array(list(expected)), np.ones(len(expected))
    yield relative(_shaped(ones, lengths, complete), list(expected.values()))
    yield relative(_shaped_reference(ones, lengths, complete), list(expected.values()))


def _certify_masking() -> Errors:
    """Under every aggregation, a batch weighs as if what is masked had never been drawn."""
    rng = np.random.default_rng(2)
    apart, moved, bad = [0.0], [0.0], 0
    for number in range(20):
        size = number % 7
        truncated = rng.random(size) < (0.0, 0.4, 1.0)[number % 3]
        counts = rng.integers(0, 5, size)
        for method in AGGREGATIONS:
            weights = _masked_weights(truncated, counts, method)
            apart.append(relative(weights, _masked_reference(truncated, counts, method)))
            back = _masked_weights(truncated[::-1], counts[::-1], method)[::-1]
            moved.append(relative(back, weights))
            bad += int((~np.isfinite(weights)).sum())
    flags = np.array(MASKED_BY_HAND[0])
    kept = trained_after_masking(flags, mask_truncated=False)
    worked = _masked_weights(flags, np.array(MASKED_BY_HAND[1]), "token_mean")
    return {
        "float64": worst(apart),
        "by hand": relative(worked, MASKED_BY_HAND[2]) + float(not kept.all()),
        "invariance": worst(moved),
        "extremes": float(bad),
    }


def _masked_weights(truncated: Array, counts: Array, method: str) -> Array:
    kept = trained_after_masking(truncated, mask_truncated=True)
    weights = np.zeros(len(counts))
    owners = np.arange(len(counts))
    weights[kept] = token_weights(counts[kept], owners[kept], method, max_response_tokens=LONGEST)
    return weights


def _masked_reference(truncated: Array, counts: Array, method: str) -> list[float]:
    alive = [0 if cut else int(n) for cut, n in zip(truncated, counts, strict=True)]
    owners = range(len(alive))
    return [token_weight(method, row, alive, owners, LONGEST) for row in owners]


# --- entropy --------------------------------------------------------------------------------------


def certify_entropy(name: str) -> Errors:
    """`coefficient`: the entropy that the bonus multiplies, from logits, and that it stays where it
    is; `target` and `rate`: the coefficient as it is driven."""
    errors = dict(_certify_control(name))
    if name == "coefficient":
        scored = _certify_scores()
        for check, error in scored.items():
            errors[check] = worst([errors.get(check, 0.0), error])
    return errors


def _certify_scores() -> Errors:
    rng = np.random.default_rng(3)
    logits = rng.normal(0.0, 2.0, (7, 11)).astype(np.float32)
    weights = rng.uniform(0.1, 1.0, 7)
    apart, smooth, moved, bad = [], [], [], 0
    for temperature in (1.0, 0.6):
        values, slopes = _scored(logits, weights, temperature)
        known = [reference.entropy(row, temperature) for row in logits.tolist()]
        expected = np.array([slope for _, slope in known]) * weights[:, None]
        apart += [relative(values, [value for value, _ in known]), relative(slopes, expected)]
        smooth.append(relative(_entropy_differences(logits, weights, temperature), expected))
        back, back_slopes = _scored(logits[::-1].copy(), weights[::-1], temperature)
        moved += [relative(back[::-1], values), relative(back_slopes[::-1], slopes)]
        for far in (80.0, -80.0):
            wide = np.zeros((2, 4096), np.float32)
            wide[:, 0] = far
            bad += sum(not np.isfinite(a).all() for a in _scored(wide, weights[:2], temperature))
        bad += sum(a.size for a in _scored(logits[:0], weights[:0], temperature)[:1])
    worked = [
        relative(found, expected)
        for logit_row, temperature, value, slopes in ENTROPY_BY_HAND
        for found, expected in zip(
            reference.entropy(logit_row, temperature), (value, slopes), strict=True
        )
    ]
    return {
        "float32": worst(apart),
        "by hand": worst(worked),
        "differences": worst(smooth),
        "invariance": worst(moved),
        "extremes": float(bad),
    }


def _scored(logits: Array, weights: Array, temperature: float) -> tuple[Array, Array]:
    """Entropies, and the gradient of their weighted sum by the logits, as the train service has it."""
    live = torch.tensor(logits).requires_grad_()
    targets = torch.zeros(len(logits), dtype=torch.int64)
    found = token_scores(live, targets, temperature=temperature, with_entropy=True)["entropy"]
    total = (found * torch.tensor(np.ascontiguousarray(weights), dtype=torch.float32)).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert live.grad is not None
    return found.detach().double().numpy(), live.grad.double().numpy()


def _entropy_differences(logits: Array, weights: Array, temperature: float) -> Array:
    """Central differences of the reference."""
    wide, slopes = logits.astype(np.float64), np.zeros(logits.shape)
    for place in np.ndindex(*logits.shape):
        ends = []
        for sign in (1.0, -1.0):
            row = wide[place[0]].copy()
            row[place[1]] += sign * STEP
            ends.append(reference.entropy(row.tolist(), temperature)[0])
        slopes[place] = weights[place[0]] * (ends[0] - ends[1]) / (2.0 * STEP)
    return slopes


CONTROLS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "coefficient": (
        {"start": 0.0, "target": None, "rate": 0.01},
        {"start": 0.3, "target": None, "rate": 1.0},
    ),
    "target": tuple({"start": 0.01, "target": t, "rate": 0.004} for t in (0.1, 0.7, 3.0)),
    "rate": tuple({"start": s, "target": 0.7, "rate": r} for s in (0.0, 0.4) for r in (1e-4, 0.03)),
}


def _certify_control(name: str) -> Iterator[tuple[str, float]]:
    rng = np.random.default_rng(4)
    entropies = [0.7, *rng.uniform(0.0, 1.5, 60).tolist(), *[0.0] * 40, *[5.0] * 60]
    yield (
        "float64",
        worst(
            relative(_driven(entropies, **c), reference.held_coefficients(entropies, **c))
            for c in CONTROLS[name]
        ),
    )
    start, target, rate, seen, expected = HELD_BY_HAND[name]
    choice: dict[str, Any] = {"start": start, "target": target, "rate": rate}
    yield (
        "by hand",
        worst(
            relative(found, expected)
            for found in (
                _driven(seen, **choice),
                reference.held_coefficients(seen, **choice),
            )
        ),
    )
    extreme = [0.0, 1e-300, 80.0, 1e300, math.nan, 0.0]
    driven = [
        relative(_driven(extreme, **c), reference.held_coefficients(extreme, **c))
        for c in CONTROLS[name]
    ]
    yield "extremes", float(sum(not error < 1e-9 for error in driven))


def _driven(
    entropies: Sequence[float], *, start: float, target: float | None, rate: float
) -> list[float]:
    bonus = EntropyBonus(EntropyConfig(coefficient=start, target=target, rate=rate))
    found = [bonus.coefficient]
    for seen in entropies:
        bonus.update(seen)
        found.append(bonus.coefficient)
    return found


# --- learning rates -------------------------------------------------------------------------------


def certify_schedule(name: str) -> Errors:
    """Every step of stages with and without warm-up, of one step, and beyond their end."""
    apart, bad = [], 0
    for peak, warmup, total, lowest in (
        (3e-4, 0, 10, 0.0),
        (1.0, 3, 17, 0.1),
        (1e-6, 5, 5, 0.5),
        (2.0, 0, 1, 1.0),
        (2.0, 9, 4, 0.2),
    ):
        steps = [*range(total + 3), 10**9]
        found = [_rate(name, step, peak, warmup, total, lowest) for step in steps]
        expected = [
            reference.learning_rate(
                step, peak=peak, warmup=warmup, total=total, schedule=name, min_ratio=lowest
            )
            for step in steps
        ]
        apart.append(relative(found, expected))
        bad += sum(not math.isfinite(rate) for rate in found)
    worked = [_rate(name, step, 1.0, 2, 6, 0.1) for step in range(8)]
    known = [
        reference.learning_rate(step, peak=1.0, warmup=2, total=6, schedule=name, min_ratio=0.1)
        for step in range(8)
    ]
    return {
        "float64": worst(apart),
        "by hand": worst(relative(one, RATES_BY_HAND[name]) for one in (worked, known)),
        "extremes": float(bad),
    }


def _rate(name: Any, step: int, peak: float, warmup: int, total: int, lowest: float) -> float:
    return learning_rate(
        step,
        peak=peak,
        warmup_steps=warmup,
        total_steps=total,
        schedule=name,
        min_ratio=lowest,
    )


CHECKS: Mapping[str, Callable[[str], Errors]] = {
    "filter": certify_filter,
    "shaping rule": certify_shaping,
    "entropy setting": certify_entropy,
    "learning-rate schedule": certify_schedule,
}
