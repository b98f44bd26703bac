"""Additions `a+b=` with operands 0..99; the answer's digits are reversed, lowest place first.

Reversed, each digit depends on what was written before it and on one place of each operand, which
a small model learns far sooner than the usual order.
"""

import random

NUM_OPERANDS = 100
NUM_HELD_OUT = 500


def train_pairs(seed: int = 0) -> list[dict[str, str]]:
    """All pairs but those held out under the same seed: 9,500 rows."""
    return [make_row(a, b) for a, b in _shuffled_pairs(seed)[NUM_HELD_OUT:]]


def held_out_pairs(seed: int = 0) -> list[dict[str, str]]:
    """500 pairs that `train_pairs` with the same seed does not have."""
    return [make_row(a, b) for a, b in _shuffled_pairs(seed)[:NUM_HELD_OUT]]


def make_row(a: int, b: int) -> dict[str, str]:
    """Example: `make_row(12, 34)` is `{"prompt": "12+34=", "answer": "64"}`."""
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]}


def _shuffled_pairs(seed: int) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(NUM_OPERANDS) for b in range(NUM_OPERANDS)]
    random.Random(seed).shuffle(pairs)
    return pairs
