"""A train service small enough to reason about: a table of bigram logits, plain SGD, float64.

It keeps the whole TrainService contract (`fake_train.py`), with the named losses of
`nexrl.algorithms` and their true gradients, so that tests of trainers and weight sync need no
language model. A value policy is a table of one value for each previous token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nexrl.services.train.chunk_checks import row_numbers, scored_positions
from nexrl.services.train.outputs import empty_output, top_count
from nexrl.services.train.policy_door import LossCall
from nexrl.testing.fake_train import FakeTrainService, Table
from nexrl.types import (
    CANDIDATE_IDS,
    DEFAULT_POLICY,
    OUTPUT_MASK,
    Array,
    BackwardOutput,
    BoolArray,
    FloatArray,
    ModelSpec,
    OptimParams,
    RowChunk,
)


def bigram_logprobs(table: Any, chunk: RowChunk) -> FloatArray:
    """[N] logprob of each token given the one before it; 0 for the first of each row."""
    logits = np.asarray(table, np.float64)[_previous(chunk)] / chunk.temperature
    logits -= logits.max(axis=1, keepdims=True)
    scores = logits[np.arange(chunk.num_tokens), chunk.token_ids] - np.log(
        np.exp(logits).sum(axis=1)
    )
    scores[chunk.offsets[:-1]] = 0.0
    logprobs: FloatArray = scores.astype(np.float32)
    return logprobs


def _previous(chunk: RowChunk) -> npt.NDArray[np.int64]:
    return np.roll(chunk.token_ids.astype(np.int64), 1)


class ToyTrainService(FakeTrainService):
    """One [V, V] table of logits for each language model, one [V] table for each value policy.

    Hosts a policy `actor` from the start; `create` without a source draws logits from the seed.
    `chunks` holds those that losses were computed on.
    """

    def __init__(self, vocab_size: int = 16, *, max_positions: int = 1 << 20) -> None:
        super().__init__(vocab_size=vocab_size, max_positions=max_positions)
        self.tables[DEFAULT_POLICY] = self._new_table(ModelSpec())
        self.chunks: list[RowChunk] = []

    def _new_table(self, spec: ModelSpec) -> Table:
        if spec.head == "value":
            return np.zeros(self.vocab_size)
        return np.random.default_rng(spec.seed).normal(size=(self.vocab_size, self.vocab_size))

    def _vocab_size(self, table: Table) -> int:
        return len(table)

    def _forward(
        self, policy: str, chunk: RowChunk, outputs: tuple[str, ...]
    ) -> Mapping[str, Array]:
        return _reported(_outputs(self._tensor(policy), chunk, outputs), outputs, chunk)

    def _loss(
        self, policy: str, chunk: RowChunk, call: LossCall, outputs: tuple[str, ...]
    ) -> tuple[BackwardOutput, Table]:
        """Sum of term x weight over the trained tokens."""
        self.chunks.append(chunk)
        table = self._tensor(policy).requires_grad_()
        found = _outputs(table, chunk, {*call.outputs, *outputs})
        total = _total(call, found, chunk) if call.trained.any() else 0.0 * table.sum()
        total.backward()
        reported = _reported(found, outputs, chunk)
        return BackwardOutput(loss=float(total.detach()), outputs=reported), table.grad.numpy()

    def _gradient(
        self, policy: str, chunk: RowChunk, trained: BoolArray, gradients: Mapping[str, FloatArray]
    ) -> Table:
        import torch

        at = torch.tensor(np.flatnonzero(trained))
        table = self._tensor(policy).requires_grad_()
        found = _outputs(table, chunk, set(gradients))
        total = 0.0 * table.sum()
        for name, gradient in gradients.items():
            given = torch.tensor(np.asarray(gradient, np.float64))
            total = total + (found[name][at] * given[at]).sum()
        total.backward()
        found_gradient: Table = table.grad.numpy()
        return found_gradient

    def _stepped(self, table: Table, gradient: Table, norm: float, params: OptimParams) -> Table:
        """table -= lr x gradient, clipped."""
        clip = params.grad_clip_norm
        scale = min(1.0, clip / norm) if clip and norm else 1.0
        return table - params.lr * scale * gradient

    def _tensor(self, policy: str) -> Any:
        import torch

        return torch.tensor(self._table(policy))


def _outputs(table: Any, chunk: RowChunk, names: Collection[str]) -> dict[str, Any]:
    """[N, ...] by name, not yet zeroed where nothing was asked for."""
    import torch

    of_previous = table[torch.tensor(_previous(chunk))]
    if table.ndim == 1:
        return {"values": of_previous}
    logprobs = torch.log_softmax(of_previous / chunk.temperature, -1)
    ids = torch.tensor(chunk.token_ids.astype(np.int64))
    found = {
        "logprobs": logprobs.gather(1, ids[:, None])[:, 0],
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
    }
    if "candidate_logprobs" in names:
        candidates = np.clip(chunk.inputs[CANDIDATE_IDS], 0, table.shape[1] - 1)
        index = torch.tensor(candidates.astype(np.int64))
        found["candidate_logprobs"] = logprobs.gather(1, index)
    for num_top in {k for name in names if (k := top_count(name))}:
        top = torch.topk(logprobs, num_top, dim=-1)
        found |= {f"top_ids:{num_top}": top.indices, f"top_logprobs:{num_top}": top.values}
    return found


def _total(call: LossCall, found: Mapping[str, Any], chunk: RowChunk) -> Any:
    """Sum of term x weight over the trained tokens."""
    import torch

    at = np.flatnonzero(call.trained)
    inputs = {
        name: torch.tensor(values[at].astype(np.int64 if name == CANDIDATE_IDS else np.float64))
        for name, values in call.inputs.items()
    }
    if call.definition.level == "row":
        inputs["row"] = torch.tensor(row_numbers(chunk, at))
    used = {name: found[name][torch.tensor(at)] for name in call.outputs}
    return (call.definition.term(used, inputs, call.config) * inputs["weight"]).sum()


def _reported(
    found: Mapping[str, Any], names: tuple[str, ...], chunk: RowChunk
) -> dict[str, Array]:
    """The outputs asked for where they are wanted, 0 elsewhere."""
    wanted = scored_positions(chunk, chunk.inputs.get(OUTPUT_MASK))
    reported = {name: empty_output(name, chunk) for name in names}
    for name, array in reported.items():
        array[wanted] = found[name].detach().numpy()[wanted]
    return reported
