"""What the checks of the train contract are given: a service, a model for it, and chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nexrl.errors import NexRLError
from nexrl.services.train.protocol import TrainService
from nexrl.types import (
    CANDIDATE_IDS,
    Array,
    FloatArray,
    LossSpec,
    ModelSpec,
    OptimParams,
    RowChunk,
)

POLICY = "actor"
CROSS_ENTROPY = LossSpec(name="cross_entropy")
STEP = OptimParams(lr=1e-2, grad_clip_norm=1.0)
ROUNDING = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSubject:
    """What a check is given."""

    service: TrainService
    """Fresh: it hosts nothing."""
    spec: ModelSpec
    """A model that it can host; at least 8 token ids, at least 16 positions."""
    folder: Path
    """Empty scratch folder that the service can reach."""


Check = Callable[[TrainSubject], Awaitable[None]]


def contract_chunk(
    lengths: Sequence[int] = (5, 2, 7, 1, 3), *, seed: int = 0, loss: str = "cross_entropy"
) -> RowChunk:
    """Rows of ids 3 to 7 with the inputs of a loss (`*_top_k`: two candidates); a row's first token
    has weight 0."""
    rng = np.random.default_rng(seed)

    def draw(low: float, high: float) -> list[FloatArray]:
        return [rng.uniform(low, high, n).astype(np.float32) for n in lengths]

    weights = draw(0.1, 1.0)
    for weight in weights:
        weight[0] = 0.0
    inputs: dict[str, list[Array]] = {"weight": [*weights]}
    if loss == "value":
        inputs |= {"returns": [*draw(-1, 1)], "old_values": [*draw(-0.1, 0.1)]}
    elif loss.endswith("_top_k"):
        ids = [rng.permuted(np.tile(np.arange(3, 8), (n, 1)), axis=1)[:, :2] for n in lengths]
        inputs[CANDIDATE_IDS] = [rows.astype(np.int32) for rows in ids]
        teacher = [np.log(rng.uniform(0.1, 0.45, (n, 2))) for n in lengths]
        inputs["teacher_candidate_logprobs"] = [rows.astype(np.float32) for rows in teacher]
    elif loss != "cross_entropy":
        inputs |= {"advantage": [*draw(-1, 1)], "proximal_logprobs": [*draw(-3, -1)]}
    return RowChunk.from_rows([rng.integers(3, 8, n).astype(np.int32) for n in lengths], inputs)


def single_rows(chunk: RowChunk) -> list[RowChunk]:
    """One chunk for each row."""
    cuts = chunk.offsets[1:-1]
    parts = {name: np.split(values, cuts) for name, values in chunk.inputs.items()}
    return [
        RowChunk.from_rows(
            [ids], {name: [rows[i]] for name, rows in parts.items()}, chunk.temperature
        )
        for i, ids in enumerate(np.split(chunk.token_ids, cuts))
    ]


async def refused(call: Awaitable[object], kind: type[NexRLError], *words: str) -> None:
    """The call fails in that way, and its message has all the words."""
    message = ""
    try:
        await call
    except kind as error:
        message = str(error)
    assert message, f"accepted, where {kind.__name__} naming {words} was due"
    missing = [word for word in words if word not in message]
    assert not missing, f"the error does not name {missing}: {message}"
