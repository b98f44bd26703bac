"""Every loss through the PyTorch train service: its gradient by the model's weights.

rows -> one chunk | chunks of one row | rows backwards | micro-batches padded, single, packed
     -> the same gradient, and that of the reference sent through `backward`
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nexrl.algorithms.loss_definition import LossDefinition
from nexrl.config.schema import TrainServiceConfig
from nexrl.services.train.backends.hf_model import LoadedModel, load_model
from nexrl.services.train.backends.torch_policy import TorchPolicy
from nexrl.testing.tiny_models import make_micro_model
from nexrl.types import CANDIDATE_IDS, FloatArray, LossSpec, RowChunk
from tests.certify.certificate_table import worst
from tests.certify.loss_cases import NUM_CANDIDATES, Array, LossCase, prepared, random_case
from tests.certify.loss_variants import VARIANTS
from tests.certify.reference_losses import graded

LENGTHS = (6, 2, 9, 1, 4)
"""Tokens of each row; the first of each is never trained, nor is a second one in longer rows."""
CPU = torch.device("cpu")
LAYOUTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("rows", "forwards", {"micro_batch_tokens": 512}),
    ("chunk", "forwards", {"micro_batch_tokens": 1}),
    ("chunk", "backwards", {"micro_batch_tokens": 20}),
    ("chunk", "forwards", {"micro_batch_tokens": 64, "packing": True}),
    ("rows", "backwards", {"micro_batch_tokens": 12, "packing": True}),
)
"""One call for the chunk or one for each row; order of rows; settings of the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """Micro models that the service trains."""

    lm: LoadedModel
    """Gives logprobs, entropy, candidate logprobs."""
    value: LoadedModel
    """Gives values."""


def hosted_models(folder: Path) -> Hosted:
    """Models of a folder that is made here."""
    return loaded_models(make_micro_model(folder))


def loaded_models(folder: Path) -> Hosted:
    """A model away from the uniform distribution of fresh weights, and one with a value head."""
    loaded = load_model(str(folder), setting="certify", device=CPU)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    value = loaded.copied("value")
    assert value.value_head is not None
    with torch.no_grad():
        value.value_head.weight.copy_(torch.linspace(-1, 1, value.value_head.in_features))
    return Hosted(lm=loaded, value=value)


def certify_in_service(definition: LossDefinition, hosted: Hosted) -> float:
    """Worst difference of a gradient over the largest entry, over settings and layouts."""
    model = hosted.value if "values" in definition.needs else hosted.lm
    choices: list[Mapping[str, Any]] = [{}, *VARIANTS.get(definition.name, ())[:1]]
    if "kl_coefficient" in definition.config:
        extra = {"kl_coefficient": 0.3, "kl_estimator": "k3", "entropy_coefficient": 0.1}
        choices.append(extra)
    return worst(_worst(definition, model, choice) for choice in choices)


def _worst(definition: LossDefinition, model: LoadedModel, choice: Mapping[str, Any]) -> float:
    chunk, case = step_of(definition, model, choice)
    loss = LossSpec(name=definition.name, config=case.settings)
    whole = gradient_of(model, [chunk], loss)
    expected = _reference_gradient(definition, model, chunk, case)
    errors = [apart(whole, expected)]
    rows = chunk_rows(chunk)
    for cut, order, settings in LAYOUTS:
        ordered = rows if order == "forwards" else rows[::-1]
        chunks = ordered if cut == "rows" else [joined(ordered)]
        errors.append(apart(gradient_of(model, chunks, loss, **settings), whole))
    return worst(errors)


def apart(found: FloatArray, expected: FloatArray) -> float:
    """Largest difference over the largest entry expected."""
    return float(abs(found - expected).max() / max(abs(expected).max(), 1e-6))


# --- one optimizer step ---------------------------------------------------------------------------


def step_of(
    definition: LossDefinition, model: LoadedModel, choice: Mapping[str, Any]
) -> tuple[RowChunk, LossCase]:
    """The chunk [N] and its trained tokens [n] as a case; logprobs are those of the model."""
    rng = np.random.default_rng(5)
    total = sum(LENGTHS)
    ids = rng.integers(3, 8, total).astype(np.int32)
    trained = np.ones(total, np.bool_)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)[:-1]])
    trained[starts] = False
    trained[[start + 1 for start, n in zip(starts, LENGTHS, strict=True) if n > 2]] = False
    counts = tuple(int(part.sum()) for part in np.split(trained, starts[1:]))
    candidates = rng.permuted(np.tile(np.arange(3, 8), (total, 1)), axis=1)[:, :NUM_CANDIDATES]
    plain = RowChunk(
        lengths=np.array(LENGTHS, np.int32),
        token_ids=ids,
        inputs={CANDIDATE_IDS: candidates.astype(np.int32)},
    )
    wanted = definition.outputs(choice)
    seen = hosted_policy(model).forward(plain, wanted).outputs
    live = tuple(n for n in counts if n)
    case = random_case(definition, choice, live, seed=11)
    outputs = {key: np.asarray(seen[key], np.float64)[trained] for key in wanted}
    case = _case_at(case, outputs, candidates[trained], live)
    case = prepared(definition, case)
    inputs = {
        key: _spread(
            array.astype(plain.inputs[key].dtype if key in plain.inputs else np.float32), trained
        )
        for key, array in case.inputs.items()
        if key != "row"
    }
    return RowChunk(lengths=plain.lengths, token_ids=ids, inputs=inputs), case


def _case_at(
    case: LossCase, outputs: dict[str, Array], candidates: Array, lengths: tuple[int, ...]
) -> LossCase:
    """The case moved to where the model is: what it is compared with stays as far away."""
    inputs = dict(case.inputs)
    for key in inputs:
        if key.endswith("logprobs") and "logprobs" in outputs and inputs[key].ndim == 1:
            away = inputs[key] - case.outputs["logprobs"]
            inputs[key] = (outputs["logprobs"] + away).astype(np.float32).astype(np.float64)
    if CANDIDATE_IDS in inputs:
        inputs[CANDIDATE_IDS] = candidates
    return LossCase(
        label=case.label, lengths=lengths, outputs=outputs, inputs=inputs, settings=case.settings
    )


def _spread(array: Array, trained: Array) -> Array:
    full = np.zeros((len(trained), *array.shape[1:]), array.dtype)
    full[trained] = array
    return full


def chunk_rows(chunk: RowChunk) -> list[RowChunk]:
    """Its rows, each a chunk."""
    cuts = chunk.offsets[1:-1]
    parts = {key: np.split(array, cuts) for key, array in chunk.inputs.items()}
    return [
        RowChunk.from_rows([ids], {key: [rows[i]] for key, rows in parts.items()})
        for i, ids in enumerate(np.split(chunk.token_ids, cuts))
    ]


def joined(rows: Sequence[RowChunk]) -> RowChunk:
    """One chunk of several."""
    keys = rows[0].inputs
    inputs = {key: [row.inputs[key] for row in rows] for key in keys}
    return RowChunk.from_rows([row.token_ids for row in rows], inputs)


# --- the service ----------------------------------------------------------------------------------


def hosted_policy(
    model: LoadedModel, *, micro_batch_tokens: int = 512, packing: bool = False
) -> TorchPolicy:
    """A copy of the model as the train service hosts it."""
    config = TrainServiceConfig(micro_batch_tokens=micro_batch_tokens, packing=packing)
    return TorchPolicy("actor", model.copied(), config, trainable=True, stop=threading.Event())


def flat_gradient(policy: TorchPolicy) -> FloatArray:
    """By every parameter, 0 where nothing was trained."""
    parameters = policy.model.named_parameters().values()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat: FloatArray = torch.cat([g.reshape(-1) for g in grads]).numpy().copy()
    return flat


def gradient_of(
    model: LoadedModel, chunks: Sequence[RowChunk], loss: LossSpec, **settings: Any
) -> FloatArray:
    """By every parameter, summed over one call for each chunk."""
    policy = hosted_policy(model, **settings)
    for chunk in chunks:
        policy.forward_backward(chunk, loss, ())
    return flat_gradient(policy)


def _reference_gradient(
    definition: LossDefinition, model: LoadedModel, chunk: RowChunk, case: LossCase
) -> FloatArray:
    expected = graded(definition.name, case.outputs, case.inputs, case.settings)
    trained = chunk.inputs["weight"] != 0
    gradients = {
        key: _spread(array.astype(np.float32), trained) for key, array in expected.gradients.items()
    }
    inputs = {k: v for k, v in chunk.inputs.items() if k == CANDIDATE_IDS}
    policy = hosted_policy(model)
    policy.backward(
        RowChunk(lengths=chunk.lengths, token_ids=chunk.token_ids, inputs=inputs), gradients
    )
    return flat_gradient(policy)
