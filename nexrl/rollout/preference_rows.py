"""Workers for offline data: judged responses of a data item as rows. No inference.

The built-in workers of `rollout_worker.type`: `preference` (a chosen and a rejected response),
`labelled` (a response that is desirable or not), `process` (a response whose steps are right or
wrong). Their rows are trained by `trainer/preference.py` and `trainer/reward_model.py`; formats in
docs/preference.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from nexrl.errors import ConfigError, DataError
from nexrl.rollout.rollout_worker import WorkerContext
from nexrl.rollout.supervised import ImitationWorker, found_in, row_of
from nexrl.types import IntArray, Trajectory

CHOSEN, REJECTED = "chosen", "rejected"
"""Roles of a pair's two trajectories."""


class PreferenceWorker(ImitationWorker):
    """Two trajectories of one item: roles `chosen` and `rejected`, tokenised as supervised rows.

    Invariant: both start with the same prompt tokens and their responses differ; an item where
    they do not cannot teach a preference and is an error that names it.
    """

    async def step(self, data_item: dict[str, Any]) -> list[Trajectory]:
        """Chosen and rejected, in this order; the pair's margin, where it has one, in `extra`."""
        data = self.context.data
        chosen = self.imitation_of(data_item, data.chosen_key, "data.chosen_key")
        rejected = self.imitation_of(data_item, data.rejected_key, "data.rejected_key")
        if np.array_equal(chosen.rows[0].token_ids, rejected.rows[0].token_ids):
            raise DataError(
                f"columns {data.chosen_key!r} and {data.rejected_key!r} hold the same response "
                f"({chosen.response!r:.80}): nothing is preferred; leave such rows out with "
                "data.filter"
            )
        margin = data_item.get(data.margin_key)
        extra = {} if margin is None else {"margin": _number(margin, data.margin_key)}
        return [
            replace(chosen, role=CHOSEN, extra=extra),
            replace(rejected, role=REJECTED, extra=extra),
        ]


class LabelledWorker(ImitationWorker):
    """One trajectory with `extra["desirable"]`, tokenised as a supervised row."""

    async def step(self, data_item: dict[str, Any]) -> Trajectory:
        """The response of the answer column and its label."""
        data = self.context.data
        label = data_item.get(data.label_key)
        if not _is_truth(label):
            raise DataError(
                f"column {data.label_key!r} (data.label_key) must be true (desirable) or false, "
                f"got {found_in(data_item, data.label_key)}"
            )
        response = self.imitation_of(data_item, data.answer_key, "data.answer_key")
        return replace(response, extra={"desirable": bool(label)})


class ProcessWorker(ImitationWorker):
    """One trajectory of steps, with `extra["step_ends"]` and `extra["step_labels"]`.

    Steps are tokenised one by one, each with `arguments.step_separator` behind it, so that every
    step end is a border between tokens. Invariant: `step_ends[k]` is the number of row tokens up
    to and with step k; the row ends with the last step, without an end-of-sequence token.
    """

    accepted_arguments: ClassVar[tuple[str, ...]] = ("step_separator",)

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        if unknown := sorted(set(self.arguments) - set(self.accepted_arguments)):
            raise ConfigError(
                f"rollout_worker.arguments.{unknown[0]}: the process worker has no such setting "
                f"(accepted: {', '.join(self.accepted_arguments)})"
            )
        self._separator = str(self.arguments.get("step_separator", ""))

    async def step(self, data_item: dict[str, Any]) -> Trajectory:
        """All steps of the item as one row."""
        key = self.context.data.steps_key
        steps = data_item.get(key)
        if not isinstance(steps, list | tuple) or not steps:
            raise DataError(
                f"column {key!r} (data.steps_key) must be a non-empty list of strings, got "
                f"{found_in(data_item, key)}"
            )
        labels = self._labels(data_item, len(steps))
        prompt = self.prompts.of_row(data_item)
        parts = [self._step_tokens(step, f"{key}[{i}]") for i, step in enumerate(steps)]
        ends = len(prompt.token_ids) + np.cumsum([len(part) for part in parts])
        return Trajectory(
            prompt=prompt.text,
            response="".join(f"{step}{self._separator}" for step in steps),
            rows=(row_of(prompt.token_ids, np.concatenate(parts)),),
            extra={"step_ends": ends.tolist(), "step_labels": labels},
        )

    def _step_tokens(self, step: Any, where: str) -> IntArray:
        if not isinstance(step, str) or not step:
            raise DataError(f"{where} must be a non-empty string, got {step!r:.80}")
        tokens = self.renderer.encode(step + self._separator, add_special_tokens=False)
        if not len(tokens):
            raise DataError(f"{where} has no tokens, so it has no end to judge")
        return tokens

    def _labels(self, data_item: Mapping[str, Any], num_steps: int) -> list[float]:
        key = self.context.data.label_key
        labels = data_item.get(key)
        if not isinstance(labels, list | tuple) or len(labels) != num_steps:
            raise DataError(
                f"column {key!r} (data.label_key) must be a list with one label for each of the "
                f"{num_steps} steps, got {found_in(data_item, key)}"
            )
        values = [
            float(x) if _is_truth(x) else _number(x, f"{key}[{i}]") for i, x in enumerate(labels)
        ]
        for index, value in enumerate(values):
            if not 0.0 <= value <= 1.0:
                raise DataError(
                    f"{key}[{index}] must be true, false or a probability in [0, 1], got {value:g}"
                )
        return values


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) or (type(value) is int and value in (0, 1))


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where} must be a finite number, got {value!r:.80}")
    return float(value)
