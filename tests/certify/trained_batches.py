"""Batches that whole trainers are certified on: sampled trajectories, and rows that are read.

Everything that a composition may look at is in them: uneven groups, one without signal, a trajectory
without a reward, several rows and turns, observations between drawn tokens, truncated answers,
engine logprobs that differ from the policy's, a teacher's, rewards in parts.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from nexrl.types import (
    Column,
    PolicyVersion,
    TokenRow,
    Trajectory,
    TrajectoryStatus,
    Turn,
    VersionSpan,
)
from tests.certify.loss_cases import Array

VOCAB = 20
TEMPERATURE = 0.8
LONGEST = 10
VERSION = 3
"""Of the trainer; some rows are one older."""
REWARDS: tuple[tuple[float | None, ...], ...] = (
    (1.0, 0.0, 0.0, 1.0, 0.0),
    (0.0, None, 1.0, 1.0),
    (1.0, 1.0, 1.0),
    (0.5, 1.0, 0.0, 0.0, 0.25),
)
"""By group and member."""


def log_softmax(row: Array, temperature: float = 1.0) -> Array:
    """Logprobs of a row of logits."""
    scaled = row / temperature
    scaled = scaled - scaled.max()
    found: Array = scaled - np.log(np.exp(scaled).sum())
    return found


def sampled_batch(table: Array) -> list[Trajectory]:
    """Trajectories of a bigram policy [V, V], their engine logprobs about 1 nat, 0.3 nats
    or hardly off, by row."""
    rng = np.random.default_rng(12)
    made: list[Trajectory] = []
    for group, rewards in enumerate(REWARDS):
        for member, reward in enumerate(rewards):
            number = len(made)
            num_rows = 2 if number in (3, 9) else 1
            rows = [_row(rng, table, longest=LONGEST // num_rows) for _ in range(num_rows)]
            if number == 7:
                rows = [replace(rows[0], behavior_logprobs=None, versions=())]
            made.append(
                Trajectory(
                    rows=tuple(rows),
                    reward=reward,
                    reward_parts={
                        "answer": reward or 0.0,
                        "format": float(rng.integers(0, 2)),
                    },
                    status=TrajectoryStatus.TRUNCATED
                    if number % 5 == 1
                    else TrajectoryStatus.COMPLETED,
                    group_id=f"i{group}/0",
                    item_id=f"i{group}",
                    trajectory_id=f"t{group}.{member}",
                    extra={"greedy_reward": float(rng.integers(0, 2))},
                )
            )
    return made


def _row(rng: Any, table: Array, *, longest: int) -> TokenRow:
    """Prompt, one or two turns with an observation between them."""
    prompt, first = int(rng.integers(1, 3)), int(rng.integers(1, longest // 2 + 1))
    second = int(rng.integers(0, longest - first + 1))
    spans = [(prompt, prompt + first)]
    if second:
        spans.append((prompt + first + 2, prompt + first + 2 + second))
    length = spans[-1][1]
    ids = rng.integers(0, VOCAB, length).astype(np.int32)
    drawn = np.zeros(length, np.bool_)
    for start, end in spans:
        drawn[start:end] = True
    logprobs = np.zeros(length)
    for t in np.flatnonzero(drawn):
        logprobs[t] = log_softmax(table[ids[t - 1]], TEMPERATURE)[ids[t]]
    apart = float(rng.choice([0.3, 1.2, 1e-3]))
    behavior = np.minimum(logprobs + rng.normal(0.0, apart, length), -1e-3) * drawn
    teacher = np.minimum(logprobs + rng.normal(0.0, 0.5, length), -1e-3) * drawn
    turns = [
        Turn(
            start=start,
            end=end,
            reward=None if index else float(rng.integers(0, 3)) / 2,
            anchor=str(rng.choice(["", "door", "key"])) if index else "door",
        )
        for index, (start, end) in enumerate(spans)
    ]
    return TokenRow(
        token_ids=ids,
        loss_mask=drawn,
        sampled=drawn,
        behavior_logprobs=behavior.astype(np.float32),
        temperature=TEMPERATURE,
        turns=tuple(turns),
        versions=_drawn_by(spans, VERSION - int(rng.integers(0, 2))),
        columns={"teacher_logprobs": Column(values=teacher.astype(np.float32))},
    )


def _drawn_by(spans: list[tuple[int, int]], number: int) -> tuple[VersionSpan, ...]:
    version = PolicyVersion(policy="actor", incarnation=0, number=number)
    return tuple(VersionSpan(start=start, end=end, version=version) for start, end in spans)


def long_batch(table: Array) -> list[Trajectory]:
    """Two trajectories: one of 4,300 tokens, one of 80."""
    rng = np.random.default_rng(14)
    made = []
    for member, length in enumerate((4300, 80)):
        ids = rng.integers(0, VOCAB, length).astype(np.int32)
        logprobs = [0.0, *(log_softmax(table[a])[b] for a, b in pairwise(ids.tolist()))]
        drawn = np.arange(length) > 0
        behavior = (np.array(logprobs) - rng.uniform(0.0, 0.1, length)) * drawn
        row = TokenRow(
            token_ids=ids,
            loss_mask=drawn,
            sampled=drawn,
            behavior_logprobs=behavior.astype(np.float32),
            turns=(Turn(start=1, end=length),),
            columns={"teacher_logprobs": Column(values=behavior.astype(np.float32))},
        )
        fields: dict[str, Any] = {
            "reward_parts": {"answer": 1.0, "format": 1.0},
            "extra": {"greedy_reward": 0.0},
        }
        made.append(
            Trajectory(rows=(row,), reward=float(member), group_id="g", item_id="i", **fields)
        )
    return made


# --- rows that are read ---------------------------------------------------------------------------


def read_batch(rows: str) -> list[Trajectory]:
    """Six items: pairs, labelled responses, judged steps, or answers (`tokens`)."""
    rng = np.random.default_rng(13)
    made: list[Trajectory] = []
    earlier: tuple[list[int], list[int]] = [], []
    for item in range(6):
        prompt = rng.integers(0, VOCAB, 1 + item % 2).tolist()
        good, bad = (rng.integers(0, VOCAB, int(rng.integers(1, 6))).tolist() for _ in range(2))
        if item == 5:
            # Nobody can tell these apart: neither the pair's sides nor two differing labels.
            prompt, good = earlier
            bad = good
        earlier = prompt, good
        if rows == "pair":
            extra = {"margin": 0.25 * item} if item % 2 else {}
            made.append(_read(item, prompt, good, role="chosen", extra=extra))
            made.append(_read(item, prompt, bad, role="rejected"))
        elif rows == "labelled":
            made.append(_read(item, prompt, good, extra={"desirable": item % 3 != 1}))
        elif rows == "process":
            ends = [len(prompt) + len(good), len(prompt) + len(good) + len(bad)]
            facts = {"step_ends": ends, "step_labels": [1.0, float(item % 2)]}
            made.append(_read(item, prompt, good + bad, extra=facts))
        else:
            made.append(_read(item, prompt, good))
    return made


def _read(item: int, prompt: list[int], response: list[int], **fields: Any) -> Trajectory:
    ids = np.array(prompt + response, np.int32)
    return Trajectory(
        rows=(TokenRow(token_ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt)),),
        item_id=f"i{item}",
        trajectory_id=f"i{item}{fields.get('role', '')}",
        **fields,
    )
