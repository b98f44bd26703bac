"""One-digit sums in words: operands 1..9, 81 questions, 9 of them held out."""

import random

NUM_HELD_OUT = 9


def sums(seed: int = 0) -> list[dict[str, str]]:
    """All questions but those held out under the same seed: 72 rows."""
    return [make_row(a, b) for a, b in _shuffled_pairs(seed)[NUM_HELD_OUT:]]


def held_out_sums(seed: int = 0) -> list[dict[str, str]]:
    """Nine questions that `sums` with the same seed does not have."""
    return [make_row(a, b) for a, b in _shuffled_pairs(seed)[:NUM_HELD_OUT]]


def make_row(a: int, b: int) -> dict[str, str]:
    """The chat template is put around the prompt by `rollout_worker.chat_template: true`."""
    return {"prompt": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b)}


def _shuffled_pairs(seed: int) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(seed).shuffle(pairs)
    return pairs
