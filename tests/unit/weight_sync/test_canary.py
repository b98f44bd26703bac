"""The canary's arithmetic: it tells old from new, and says when it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from nexrl.testing.makers import make_row
from nexrl.types import FloatArray, RowChunk
from nexrl.weight_sync.canary import Canary, Probe, Verdict, synthetic_chunk

NUM_TOKENS = 400
GENERATOR = np.random.default_rng(0)


def noisy(logprobs: FloatArray, noise: float) -> FloatArray:
    """What another kernel or precision makes of the same weights: heavy tails included."""
    return (logprobs + noise * GENERATOR.standard_t(4, len(logprobs))).astype(np.float32)


def make_canary(old: FloatArray, *, noise: float = 0.0, synthetic: bool = False) -> Canary:
    """A canary that has seen one verified sync of an engine with that noise."""
    canary = Canary(tolerance=0.05, num_rows=4)
    chunk = RowChunk.from_rows([np.zeros(NUM_TOKENS // 4, np.int32)] * 4)
    canary.probe = Probe(chunk=chunk, logprobs=old, synthetic=synthetic)
    verdict = canary.judge(old, noisy(old, noise))
    canary.settle([verdict], old, unchanged=True)
    return canary


def judge(*, move: float, noise: float, serves_old: bool = False) -> Verdict:
    old = -GENERATOR.random(NUM_TOKENS).astype(np.float32)
    new = (old + move * GENERATOR.normal(size=NUM_TOKENS)).astype(np.float32)
    canary = make_canary(old, noise=noise)
    return canary.judge(noisy(new, noise / 3), noisy(old if serves_old else new, noise))


@pytest.mark.parametrize("noise", [0.0, 1e-4, 0.01])
def test_an_engine_on_the_new_weights_is_believed_and_one_on_the_old_is_not(noise: float) -> None:
    good = judge(move=20 * noise + 1e-3, noise=noise)
    assert (good.decided, good.fault) == (True, None)
    bad = judge(move=20 * noise + 1e-3, noise=noise, serves_old=True)
    assert bad.fault is not None
    assert "nearer the old" in bad.fault


def test_noise_alone_never_accuses_an_engine() -> None:
    """Learning rate 0 in low precision: two forwards of one policy differ, the verdict is open."""
    verdicts = [judge(move=0.0, noise=0.01) for _ in range(200)]
    assert all(v.fault is None for v in verdicts)
    assert sum(v.decided for v in verdicts) <= 2


def test_an_engine_on_other_weights_is_far_from_the_trainer() -> None:
    old = -GENERATOR.random(NUM_TOKENS).astype(np.float32)
    fault = make_canary(old).judge(old, old[::-1]).fault
    assert fault is not None
    assert "differ from the trainer's" in fault


def test_a_logprob_that_is_not_finite_is_never_believed() -> None:
    old = -GENERATOR.random(NUM_TOKENS).astype(np.float32)
    broken = old.copy()
    broken[7] = np.nan
    assert make_canary(old).judge(old, broken).fault is not None


def test_made_up_tokens_are_judged_relative_to_their_size() -> None:
    old = np.full(NUM_TOKENS, -20.0, np.float32)
    off = old + np.float32(0.5)
    assert make_canary(old, synthetic=True).judge(old, off).fault is None
    assert make_canary(old).judge(old, off).fault is not None


def test_undecided_rows_are_kept_until_they_tell() -> None:
    old = -GENERATOR.random(NUM_TOKENS).astype(np.float32)
    canary = make_canary(old, noise=0.01)
    first = canary.probe
    assert first is not None
    following = Probe(chunk=first.chunk, logprobs=old + np.float32(1.0))
    canary.settle([canary.judge(old, old)], old, unchanged=False)
    canary.adopt(following)
    assert canary.probe is first
    moved = old + np.float32(1.0)
    canary.settle([canary.judge(moved, moved)], moved, unchanged=False)
    canary.adopt(following)
    assert canary.probe is following


def test_a_candidate_takes_rows_spread_over_the_batch() -> None:
    rows = [make_row(prompt_ids=(n,), response_ids=(1, 2), logprobs=(-1, -1)) for n in range(9)]
    chunk = Canary(tolerance=0.05, num_rows=3).candidate(rows)
    assert chunk is not None
    assert chunk.token_ids[chunk.offsets[:-1]].tolist() == [0, 4, 8]
    assert Canary(tolerance=0.05, num_rows=3).candidate([]) is None


def test_made_up_tokens_are_the_same_every_time_and_inside_the_vocabulary() -> None:
    one, other = synthetic_chunk(11), synthetic_chunk(11)
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    assert one.token_ids.min() >= 0
    assert one.token_ids.max() < 11
