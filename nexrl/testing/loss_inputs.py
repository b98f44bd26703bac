"""Outputs and inputs of any named loss, for tests and benchmarks: random, or at an extreme."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nexrl.algorithms.loss_definition import LossDefinition
from nexrl.algorithms.losses import LOSSES

NUM_CANDIDATES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCase:
    """A loss with everything its term, its KL and its entropy need, on numpy in float64."""

    loss: LossDefinition
    """What is evaluated."""
    outputs: Mapping[str, Any]
    """[n, ...] outputs of a model by name."""
    inputs: Mapping[str, Any]
    """[n, ...] inputs by name, `row` among them for losses of rows."""
    rows: npt.NDArray[np.int64]
    """[n] row of each token."""

    def at(self, positions: npt.NDArray[np.int64]) -> LossCase:
        """The tokens at `positions`, in that order; rows keep their numbers."""
        return replace(
            self,
            outputs={name: array[positions] for name, array in self.outputs.items()},
            inputs={name: array[positions] for name, array in self.inputs.items()},
            rows=self.rows[positions],
        )

    def by_row(self) -> Iterator[LossCase]:
        """One case for each row, numbered from 0 as a service numbers those of a micro-batch."""
        for row in np.unique(self.rows):
            part = self.at(np.flatnonzero(self.rows == row))
            zeros = np.zeros_like(part.rows)
            inputs = {**part.inputs, "row": zeros} if "row" in part.inputs else part.inputs
            yield replace(part, inputs=inputs, rows=zeros)

    def moved(self, output: str, at: tuple[int, ...], step: float) -> LossCase:
        """The same with one entry of an output changed by `step`."""
        array = self.outputs[output].copy()
        array[at] += step
        return replace(self, outputs={**self.outputs, output: array})


def make_loss_case(
    name: str,
    *,
    rows: tuple[int, ...] = (3, 2),
    seed: int = 0,
    difference: float | None = None,
) -> LossCase:
    """A case of the named loss over rows of the given lengths.

    `difference` puts every logprob that far above (or below) all those it is compared with; None
    draws them near each other.
    """
    loss, generator = LOSSES[name], np.random.default_rng(seed)
    owners = np.repeat(np.arange(len(rows)), rows).astype(np.int64)
    n = len(owners)
    base = -0.5 - 2.0 * generator.random(n)
    tails = np.log(generator.dirichlet(np.ones(NUM_CANDIDATES + 1), size=n))[:, :NUM_CANDIDATES]

    def near(array: Any) -> Any:
        return array + 0.1 * generator.normal(size=array.shape)

    outputs = {
        "logprobs": base,
        "entropy": generator.random(n),
        "values": generator.normal(size=n),
        "candidate_logprobs": tails,
    }
    inputs = {
        "weight": np.full(n, 1.0 / n),
        "advantage": np.repeat(generator.normal(size=len(rows)), rows),
        "proximal_logprobs": near(base),
        "behavior_logprobs": near(base),
        "reference_logprobs": near(base),
        "teacher_logprobs": near(base),
        "teacher_candidate_logprobs": near(tails) - 0.3,
        "candidate_ids": np.zeros((n, NUM_CANDIDATES), np.int32),
        "correction": generator.random(n),
        "returns": generator.normal(size=n),
        "old_values": near(outputs["values"]),
        "selected": (generator.random(n) < 0.5).astype(np.float64),
    }
    if difference is not None:
        _pull_apart(outputs, inputs, difference)
    wanted = {*loss.required, *loss.optional, *(("row",) if loss.level == "row" else ())}
    regularised = ("logprobs", "entropy") if "kl_coefficient" in loss.config else ()
    return LossCase(
        loss=loss,
        outputs={k: v for k, v in outputs.items() if k in {*loss.needs, *regularised}},
        inputs={k: v for k, v in {**inputs, "row": owners}.items() if k in wanted},
        rows=owners,
    )


def _pull_apart(outputs: dict[str, Any], inputs: dict[str, Any], difference: float) -> None:
    """Put outputs `difference` from every input that they are compared with."""
    top = -0.5 if difference > 0 else -0.5 + difference
    for name in outputs:
        if "logprobs" in name:
            outputs[name] = np.full_like(outputs[name], top - np.log(NUM_CANDIDATES))
    for name in inputs:
        if "logprobs" in name:
            inputs[name] = np.full_like(inputs[name], top - difference - np.log(NUM_CANDIDATES))
    outputs["values"] = np.full_like(outputs["values"], difference)
    for name in ("returns", "old_values"):
        inputs[name] = np.zeros_like(inputs[name])
