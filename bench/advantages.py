"""Milliseconds of CPU for the advantages of a large batch: `python bench/advantages.py`.

8,192 trajectories x 2,048 trained tokens in groups of 8, down to one number for each token: spread
to float64, and to float32 as the trainer sends it. Columns of tokens come in float32, or with
`--inputs float64` as the built-in trainer has them. `--ragged` draws lengths between 1 and twice the
mean.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from nexrl.algorithms.advantage_definition import AdvantageInputs, AdvantageSettings
from nexrl.algorithms.advantages import ADVANTAGES, compute_advantages
from nexrl.algorithms.groups import Float64Array, IndexArray

GROUP_SIZE = 8
TURN_TOKENS = 64


def make_inputs(lengths: IndexArray, *, token_rewards: bool, dtype: str) -> AdvantageInputs:
    """Everything that any estimator asks for, random, per-token arrays in `dtype`."""
    generator = np.random.default_rng(0)
    num, num_tokens = len(lengths), int(lengths.sum())

    def tokens() -> Float64Array:
        return generator.standard_normal(num_tokens, np.float32).astype(dtype, copy=False)

    counts = -(-lengths // TURN_TOKENS)
    turn_lengths = np.full(int(counts.sum()), TURN_TOKENS)
    turn_lengths[np.cumsum(counts) - 1] = lengths - (counts - 1) * TURN_TOKENS
    rewards = (generator.random(num) < 0.4).astype(np.float64)
    return AdvantageInputs(
        rewards=rewards,
        groups=np.arange(num) // GROUP_SIZE,
        lengths=lengths,
        token_rewards=tokens() * 0.01 if token_rewards else None,
        values=tokens(),
        turn_rewards=generator.random(len(turn_lengths)),
        turn_lengths=turn_lengths,
        turn_counts=counts,
        turn_anchors=generator.integers(-1, 9, len(turn_lengths)),
        reward_parts={"answer": rewards, "format": generator.random(num)},
        greedy_rewards=np.zeros(num),
        behavior_logprobs=-np.abs(tokens()),
        teacher_logprobs=-np.abs(tokens()),
    )


def measure(
    name: str, inputs: AdvantageInputs, settings: AdvantageSettings, rounds: int
) -> dict[str, float]:
    """Best of some rounds, in milliseconds of this process's CPU time."""
    assert inputs.lengths is not None
    best: dict[str, float] = {}
    for dtype in (np.float64, np.float32):
        for _ in range(rounds):
            begin = time.process_time()
            compute_advantages(name, inputs, settings).spread(inputs.lengths, dtype)
            took = (time.process_time() - begin) * 1e3
            best[dtype.__name__] = min(best.get(dtype.__name__, np.inf), took)
    return best


def main() -> None:
    """Print a line per estimator, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--trajectories", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=2048, help="mean trained tokens")
    parser.add_argument("--ragged", action="store_true", help="lengths differ")
    parser.add_argument("--token-rewards", action="store_true", help="with a reward at each token")
    parser.add_argument("--inputs", choices=("float32", "float64"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    lengths = np.full(args.trajectories, args.tokens)
    if args.ragged:
        lengths = np.random.default_rng(1).integers(1, 2 * args.tokens, args.trajectories)
    inputs = make_inputs(lengths, token_rewards=args.token_rewards, dtype=args.inputs)
    results = {
        name: measure(name, inputs, AdvantageSettings(gamma=0.999, gae_lambda=0.95), args.rounds)
        for name in ADVANTAGES
    }
    adaptive = AdvantageSettings(gae_lambda=0.95, critic_lambda=1.0, length_adaptive=0.05)
    results["gae (decoupled, length-adaptive)"] = measure("gae", inputs, adaptive, args.rounds)
    if args.json:
        print(json.dumps(results))
        return
    for name, took in results.items():
        print(f"{name:34s}" + "".join(f"  {dtype} {ms:6.1f} ms" for dtype, ms in took.items()))


if __name__ == "__main__":
    main()
