"""Tasks of reasoning-gym as data and reward; needs the extra `recipes`.

A question is held out by its own text, not by the seed that made it: small tasks repeat questions,
and a different seed would hold out nothing.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

SPLITS = ("train", "held_out")
HELD_OUT_SHARE = 10
"""One question in so many is held out."""


def questions(
    task: str, split: str, size: int, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The questions of one split among `size` generated ones; `settings` are those of the task."""
    from reasoning_gym import create_dataset

    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    made = create_dataset(task, size=size, seed=seed, **dict(settings or {}))
    return [
        {"prompt": entry["question"], "answer": entry["answer"], "task": task, "entry": dict(entry)}
        for entry in made
        if is_held_out(entry["question"]) == (split == "held_out")
    ]


def is_held_out(question: str) -> bool:
    """Decided by the text alone, the same in every run."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def score_answer(completion: str, entry: Mapping[str, Any], task: str, **_: object) -> float:
    """What reasoning-gym itself says: 1 for right, and for some tasks a little for close."""
    return float(_scorer(task)(completion.strip(), dict(entry)))


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return scorer
