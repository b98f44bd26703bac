"""Batches of rows that are read, once more: pairs, labels, steps or answers to the weights after them.

The model is that of `reference_trainer`; a score is the value of the state after a response or step,
value table[last token]. The objective of an optimizer step is the mean over its entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nexrl.types import Trajectory
from tests.certify.hand_defaults import PREFERENCE_DEFAULTS
from tests.certify.loss_cases import Array
from tests.certify.reference_compositions import Offline
from tests.certify.reference_preference import PREFERENCE
from tests.certify.trained_batches import log_softmax

Pair = tuple[int, int]
"""(token before, token)."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """One pair, response or step end."""

    facts: dict[str, float]
    """What is known of it."""
    tokens: dict[str, list[Pair]]
    """By live input: tokens whose logprobs it sums, or, for a score, (last token, 0)."""
    graded: tuple[float, dict[str, float]] = (0.0, {})
    """Loss and slopes when it was trained."""
    live: dict[str, float] = field(default_factory=dict)
    """Its live inputs then."""


@dataclass(slots=True, kw_only=True)
class Read:
    """What a batch leaves."""

    tables: dict[str, Array]
    """By policy, after it."""
    start: dict[str, Array]
    """The same before it."""
    settings: dict[str, float]
    """Of the loss."""
    steps: list[list[Entry]] = field(default_factory=list)
    """Entries of each optimizer step."""
    norms: list[float] = field(default_factory=list)
    """Of each step's gradient."""
    lengths: list[int] = field(default_factory=list)
    """Trained tokens of each trajectory."""


def read(
    plan: Offline,
    batch: Sequence[Trajectory],
    tables: dict[str, Array],
    *,
    num_steps: int,
    lr: float,
) -> Read:
    """The batch after `plan`; `tables` of actor, reference and critic as it begins."""
    scores = plan.loss.endswith("reward_model")
    start = {**tables, "actor": tables["critic"] if scores else tables["actor"]}
    done = Read(
        tables={name: table.copy() for name, table in start.items()},
        start=start,
        settings={**PREFERENCE_DEFAULTS.get(plan.loss, {}), **plan.settings},
        lengths=[len(_response(t)) for t in batch],
    )
    items = list(dict.fromkeys(t.item_id for t in batch))
    for step in range(num_steps):
        own = [t for t in batch if items.index(t.item_id) * num_steps // len(items) == step]
        entries = _entries(plan.loss, own)
        _add_reference(plan.loss, entries, own, done)
        gradient = _gradient(plan.loss, entries, done)
        done.norms.append(math.sqrt(float((gradient**2).sum())))
        done.steps.append(entries)
        done.tables["actor"] = done.tables["actor"] - lr * gradient
    return done


def _response(trajectory: Trajectory) -> list[Pair]:
    row = trajectory.rows[0]
    ids = [int(i) for i in row.token_ids]
    return [(ids[t - 1], ids[t]) for t in range(1, len(ids)) if row.loss_mask[t]]


def _ends(trajectory: Trajectory, positions: Sequence[int]) -> list[list[Pair]]:
    ids = trajectory.rows[0].token_ids
    return [[(int(ids[position - 1]), 0)] for position in positions]


def _entries(loss: str, batch: Sequence[Trajectory]) -> list[Entry]:
    if loss == "process_reward_model":
        return [
            Entry(facts={"labels": label}, tokens={"scores": end})
            for t in batch
            for end, label in zip(
                _ends(t, t.extra["step_ends"]), t.extra["step_labels"], strict=True
            )
        ]
    if loss in ("kto", "cross_entropy"):
        return [
            Entry(
                facts={"desirable": float(t.extra.get("desirable", 0.0))},
                tokens={"logprobs": _response(t)},
            )
            for t in batch
        ]
    found = []
    for chosen in (t for t in batch if t.role == "chosen"):
        rejected = next(t for t in batch if t.item_id == chosen.item_id and t.role == "rejected")
        sides = {"chosen": chosen, "rejected": rejected}
        facts = {f"{side}_lengths": float(len(_response(t))) for side, t in sides.items()}
        if loss == "reward_model":
            facts = {"margin": float(chosen.extra.get("margin", 0.0))}
            tokens = {
                f"{side}_scores": _ends(t, [len(t.rows[0].token_ids)])[0]
                for side, t in sides.items()
            }
        else:
            tokens = {f"{side}_logprobs": _response(t) for side, t in sides.items()}
        found.append(Entry(facts=facts, tokens=tokens))
    return found


def _sum(table: Array, tokens: Sequence[Pair]) -> float:
    if table.ndim == 1:
        return math.fsum(float(table[before]) for before, _ in tokens)
    return math.fsum(float(log_softmax(table[before])[own]) for before, own in tokens)


def _add_reference(
    loss: str, entries: list[Entry], batch: Sequence[Trajectory], done: Read
) -> None:
    if loss not in ("dpo", "ipo", "hinge", "kto"):
        return
    for entry in entries:
        for key, tokens in entry.tokens.items():
            entry.facts[f"reference_{key}"] = _sum(done.tables["reference"], tokens)
    if loss == "kto":
        z0 = _reference_point(batch, done)
        for entry in entries:
            entry.facts["z0"] = z0


def _reference_point(batch: Sequence[Trajectory], done: Read) -> float:
    """KTO 2024, section 4.2: max(0, mean of policy - reference logprobs of mismatched pairs): each
    prompt with the response of the next row of the step that answers another prompt."""
    prompts = [[int(i) for i in t.rows[0].token_ids[~t.rows[0].loss_mask]] for t in batch]
    answers = [[int(i) for i in t.rows[0].token_ids[t.rows[0].loss_mask]] for t in batch]
    moved = []
    for i, prompt in enumerate(prompts):
        order = [*range(i + 1, len(prompts)), *range(i)]
        other = next((j for j in order if prompts[j] != prompt), None)
        if other is None:
            continue
        ids = [*prompt, *answers[other]]
        tokens = [(ids[t - 1], ids[t]) for t in range(len(prompt), len(ids))]
        moved.append(_sum(done.tables["actor"], tokens) - _sum(done.tables["reference"], tokens))
    return max(0.0, math.fsum(moved) / len(moved)) if moved else 0.0


def _gradient(loss: str, entries: list[Entry], done: Read) -> Array:
    table = done.tables["actor"]
    total = np.zeros_like(table)
    num_tokens = sum(len(tokens) for e in entries for tokens in e.tokens.values())
    for entry in entries:
        entry.live = {key: _sum(table, tokens) for key, tokens in entry.tokens.items()}
        if loss == "cross_entropy":
            # The mean over tokens of the step.
            entry.graded = -entry.live["logprobs"], {"logprobs": -1.0}
            share = 1.0 / num_tokens
        else:
            entry.graded = PREFERENCE[loss]({**entry.facts, **entry.live}, done.settings)
            share = 1.0 / len(entries)
        for key, slope in entry.graded[1].items():
            for before, own in entry.tokens[key]:
                _add(total, table, before, own, share * slope)
    return total


def _add(total: Array, table: Array, before: int, own: int, slope: float) -> None:
    if table.ndim == 1:
        total[before] += slope
        return
    total[before] -= slope * np.exp(log_softmax(table[before]))
    total[before][own] += slope


def facts_of(entries: Sequence[Entry], key: str) -> list[Any]:
    """A fact or live input of every entry."""
    return [{**entry.facts, **entry.live}[key] for entry in entries]
