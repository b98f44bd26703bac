"""Rows, rewards and a worker for `bench/learn.py`: the sums of recipe/arithmetic, as each preset
wants them.

Answers are written lowest place first, as in the recipe: `12+34=` is answered `64`.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from nexrl.rollout.rollout_worker import RolloutWorker
from nexrl.services.reward.signature import instant
from nexrl.types import Trajectory, Turn

sys.path.insert(0, str(Path(__file__).parents[1] / "recipe" / "arithmetic" / "agent_workspace"))

from data import held_out_pairs, train_pairs

Row = dict[str, Any]


def _wrong(answer: str, rng: random.Random) -> str:
    """The answer with one digit changed."""
    place = rng.randrange(len(answer))
    digit = (int(answer[place]) + rng.randint(1, 9)) % 10
    return f"{answer[:place]}{digit}{answer[place + 1 :]}"


def _rows(held_out: bool) -> list[Row]:
    return held_out_pairs(0) if held_out else train_pairs(0)


def pairs(held_out: bool = False) -> list[Row]:
    """The right sum and one with a wrong digit."""
    rng = random.Random(1)
    return [
        {"prompt": r["prompt"], "chosen": r["answer"], "rejected": _wrong(r["answer"], rng)}
        for r in _rows(held_out)
    ]


def labelled(held_out: bool = False) -> list[Row]:
    """Right sums labelled good and wrong ones bad, in turn."""
    rng = random.Random(2)
    return [
        {
            "prompt": r["prompt"],
            "answer": _wrong(r["answer"], rng) if i % 2 else r["answer"],
            "label": i % 2 == 0,
        }
        for i, r in enumerate(_rows(held_out))
    ]


def steps(held_out: bool = False) -> list[Row]:
    """Every digit is a step; half of them are changed, and so wrong."""
    rng = random.Random(3)
    rows = []
    for r in _rows(held_out):
        written = [digit if rng.random() < 0.5 else _wrong(digit, rng) for digit in r["answer"]]
        labels = [float(a == b) for a, b in zip(written, r["answer"], strict=True)]
        rows.append({"prompt": r["prompt"], "steps": written, "label": labels})
    return rows


@instant
def parts(completion: str, answer: str, **_: object) -> dict[str, float]:
    """Two named parts: the whole answer, and its lowest digit."""
    return {"exact": float(completion == answer), "lowest": float(completion[:1] == answer[:1])}


class DigitTurns(RolloutWorker):
    """Every token of the answer is a turn: its anchor is what stands before it, its own reward 0.25
    for the right digit.
    """

    async def step(self, data_item: Row) -> Trajectory:
        """One completion, cut into turns."""
        prompt, answer = data_item["prompt"], data_item["answer"]
        completion = (await self.generate(prompt))[0]
        trajectory = completion.to_trajectory(
            prompt=prompt, reward=float(completion.text == answer)
        )
        row = trajectory.rows[0]
        start = len(completion.prompt_token_ids)
        turns = tuple(
            Turn(
                start=start + t,
                end=start + t + 1,
                anchor=prompt + completion.text[:t],
                reward=0.25 * float(completion.text[t : t + 1] == answer[t : t + 1] != ""),
            )
            for t in range(len(completion.token_ids))
        )
        return replace(trajectory, rows=(replace(row, turns=turns),))
