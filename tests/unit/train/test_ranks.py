"""Two processes, each with its own rows, sum their gradients: the one of a single process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import distributed

from nexrl.algorithms.aggregation import token_weights
from nexrl.algorithms.losses import LOSSES
from nexrl.services.train.backends.hf_model import LoadedModel
from nexrl.testing.tiny_models import make_micro_model
from nexrl.types import FloatArray, LossSpec
from tests.certify.certify_service import (
    apart,
    chunk_rows,
    gradient_of,
    joined,
    loaded_models,
    step_of,
)
from tests.unit.train.rank_worker import write_share

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 200.0
Share = list[list[int]]
"""Rows of a rank by micro-step."""
TERMS = {"kl_coefficient": 0.3, "kl_estimator": "k3", "entropy_coefficient": 0.1}


@contextmanager
def meeting_place() -> Iterator[int]:
    """The port of a store on the loopback, held here: no other process can have taken it."""
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    yield store.port


@contextmanager
def rank_process(arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A rank that is killed when the test is done with it, whatever it is waiting for."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.train.rank_worker", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_ranks(
    model: Path, steps: Sequence[Path], leaving: Sequence[int] = ()
) -> list[tuple[int, str]]:
    """(exit code, what it said last) of two ranks, both within one deadline."""
    until = time.monotonic() + DEADLINE_S
    with ExitStack() as stack:
        port = stack.enter_context(meeting_place())
        given = [
            "--ranks",
            "2",
            "--port",
            str(port),
            "--model",
            str(model),
            "--steps",
            *map(str, steps),
        ]
        processes = [
            stack.enter_context(
                rank_process([*given, "--rank", str(rank), *["--leave"] * (rank in leaving)])
            )
            for rank in range(2)
        ]
        said = [p.communicate(timeout=max(1.0, until - time.monotonic()))[1] for p in processes]
        return [(p.returncode, text[-2000:]) for p, text in zip(processes, said, strict=True)]


def optimizer_step(
    folder: Path, model: LoadedModel, loss: str, aggregation: str, shares: Sequence[Share]
) -> FloatArray:
    """Its gradient in this process; its rows go to the ranks' files, by rank and micro-step."""
    chunk, case = step_of(LOSSES[loss], model, TERMS)
    trained = chunk.inputs["weight"] != 0
    counts = np.array([part.sum() for part in np.split(trained, chunk.offsets[1:-1])], np.int64)
    per_row = token_weights(counts, np.arange(len(counts)), aggregation, max_response_tokens=8)
    weight = (np.repeat(per_row, chunk.lengths) * trained).astype(np.float32)
    chunk = replace(chunk, inputs={**chunk.inputs, "weight": weight})
    folder.mkdir()
    (folder / "loss.json").write_text(json.dumps({"name": loss, "config": dict(case.settings)}))
    rows = chunk_rows(chunk)
    for rank, micro_steps in enumerate(shares):
        chunks = [joined([rows[r] for r in own]) for own in micro_steps]
        write_share(folder / f"share{rank}.npz", chunks)
    return gradient_of(model, [chunk], LossSpec(name=loss, config=case.settings))


def test_gradients_summed_over_two_processes_are_that_of_one(tmp_path: Path) -> None:
    """FR-028, FR-029: one denominator for the optimizer step, whatever the ranks.

    Three micro-steps on one rank and one on the other; a rank whose only row, number 3, has no
    trained token.
    """
    folder = make_micro_model(tmp_path / "model")
    model = loaded_models(folder).lm
    cases: dict[str, tuple[str, list[Share]]] = {
        "ppo": ("token_mean", [[[0], [4, 1], [3]], [[2]]]),
        "gspo": ("sequence_mean_token_mean", [[[4, 2], [0, 1]], [[3]]]),
    }
    expected = {
        loss: optimizer_step(tmp_path / loss, model, loss, aggregation, shares)
        for loss, (aggregation, shares) in cases.items()
    }
    assert run_ranks(folder, [tmp_path / loss for loss in cases]) == [(0, ""), (0, "")]
    for loss in cases:
        for rank in range(2):
            assert apart(np.load(tmp_path / loss / f"sum{rank}.npy"), expected[loss]) < 1e-6


def test_a_rank_that_leaves_ends_the_other_with_an_error_and_no_sum(tmp_path: Path) -> None:
    folder = make_micro_model(tmp_path / "model")
    optimizer_step(
        tmp_path / "step", loaded_models(folder).lm, "reinforce", "token_mean", [[[0, 1]], [[2]]]
    )
    (code, said), (left, _) = run_ranks(folder, [tmp_path / "step"], leaving=[1])
    assert left == 3
    assert code == 1, said
    assert "RuntimeError" in said
    assert not (tmp_path / "step" / "sum0.npy").exists()
