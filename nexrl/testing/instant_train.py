"""A train service that answers at once: for tests and benchmarks of everything around it.

It keeps the contract of `TrainService` (`fake_train.py`; the suite in `contracts/train.py` runs
against it) and does no arithmetic: logprobs are the ones that came with the chunk, and a step changes
one small tensor, so that versions have different checksums.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nexrl.services.train.chunk_checks import scored_positions
from nexrl.services.train.outputs import empty_output
from nexrl.services.train.policy_door import LossCall, check_source
from nexrl.testing.fake_train import FakeTrainService, Table
from nexrl.types import (
    OUTPUT_MASK,
    Array,
    BackwardOutput,
    BoolArray,
    FloatArray,
    ModelSpec,
    OptimParams,
    RowChunk,
)

PLAUSIBLE = -1.0
"""Logprob of a token about which the chunk says nothing; its negative is every entropy."""


class InstantTrain(FakeTrainService):
    """`TrainService` without a model: the loss is sum(weight x -logprob), whatever its name, and
    the gradient's norm is the sum of what was given to it."""

    def __init__(self, *, vocab_size: int = 1 << 17, max_positions: int = 1 << 20) -> None:
        super().__init__(vocab_size=vocab_size, max_positions=max_positions)

    def _new_table(self, spec: ModelSpec) -> Table:
        check_source(spec)
        return np.zeros(4 if spec.head == "value" else (2, 2), np.float32)

    def _forward(
        self, policy: str, chunk: RowChunk, outputs: tuple[str, ...]
    ) -> Mapping[str, Array]:
        return _outputs(chunk, outputs)

    def _loss(
        self, policy: str, chunk: RowChunk, call: LossCall, outputs: tuple[str, ...]
    ) -> tuple[BackwardOutput, Table]:
        weight = np.where(call.trained, call.inputs["weight"], 0.0)
        loss = -float(np.dot(weight, _logprobs(chunk, call.trained)))
        result = BackwardOutput(loss=loss, outputs=_outputs(chunk, outputs))
        return result, self._of_norm(policy, float(np.abs(weight).sum()))

    def _gradient(
        self, policy: str, chunk: RowChunk, trained: BoolArray, gradients: Mapping[str, FloatArray]
    ) -> Table:
        total = sum(float(np.abs(g[trained]).sum()) for g in gradients.values())
        return self._of_norm(policy, total)

    def _of_norm(self, policy: str, norm: float) -> Table:
        gradient = np.zeros_like(self.tables[policy], np.float64)
        gradient.flat[0] = norm
        return gradient

    def _stepped(self, table: Table, gradient: Table, norm: float, params: OptimParams) -> Table:
        return table + np.float32(params.lr)


def _logprobs(chunk: RowChunk, positions: BoolArray) -> FloatArray:
    for name in ("behavior_logprobs", "proximal_logprobs"):
        if name in chunk.inputs:
            return np.where(positions, chunk.inputs[name], 0.0).astype(np.float32)
    return np.where(positions, np.float32(PLAUSIBLE), np.float32(0.0))


def _outputs(chunk: RowChunk, names: tuple[str, ...]) -> dict[str, Array]:
    """Values are 0, like those of a new head; the likeliest ids are 0, 1, 2 ..."""
    positions = scored_positions(chunk, chunk.inputs.get(OUTPUT_MASK))
    found = {name: empty_output(name, chunk) for name in names}
    for name, array in found.items():
        if name == "logprobs":
            array[:] = _logprobs(chunk, positions)
        elif name.startswith("top_ids"):
            array[positions] = np.arange(array.shape[1])
        elif name != "values":
            array[positions] = -PLAUSIBLE if name == "entropy" else PLAUSIBLE
    return found
