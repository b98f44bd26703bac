"""PreferenceTrainer: dpo, ipo, hinge, simpo, orpo and kto on offline pairs or labelled responses.

Adds to `offline_trainer.py` what these losses know beside the policy's own logprobs: those of a
frozen reference, lengths, and kto's reference point, which says how far the policy has moved from
the reference on average:

z0 = max(0, mean of log policy(y'|x) - log reference(y'|x)) over mismatched pairs: each row's prompt
x with the response y' of the next row of the optimizer step that answers another prompt, the last
ones with the first (Ethayarajh et al. 2024, section 4.2). It needs forward passes only and carries
no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from nexrl.algorithms.groups import IndexArray
from nexrl.trainer.batched_trainer import StepPlan
from nexrl.trainer.batching import RowTable, flatten
from nexrl.trainer.offline_rows import OfflineBatch
from nexrl.trainer.offline_trainer import Constants, OfflineTrainer
from nexrl.types import FloatArray, ModelSpec, TokenRow, Trajectory

REFERENCE = "reference"
_Z0 = "z0"


class PreferenceTrainer(OfflineTrainer):
    """Minimises a loss of response logprobs, summed over all trained tokens of a response.

    Invariant: the reference is the policy as the stage began, also after a resume; z0 of an
    optimizer step comes from the weights that the step starts from.
    """

    scores: ClassVar[bool] = False

    @property
    def further_policies(self) -> tuple[ModelSpec, ...]:
        """The reference, for losses that have one."""
        if not self.loss.needs_reference:
            return ()
        return (ModelSpec(policy=REFERENCE, copy_of=self.policy, trainable=False),)

    async def prepare(self, batch: OfflineBatch) -> Constants:
        """Lengths, reference logprobs, and room for z0."""
        constants = await super().prepare(batch)
        lengths, table = batch.lengths(), batch.table
        for side, segments in batch.sides.items():
            constants[f"{side}lengths"] = lengths[segments]
        if self.loss.needs_reference:
            sums = batch.sums(await self._logprobs(REFERENCE, table))
            for side, segments in batch.sides.items():
                constants[f"reference_{side}logprobs"] = sums[segments]
        if _Z0 in self.loss.required:
            constants[_Z0] = np.zeros(len(batch.owners))
        return constants

    async def prepare_step(self, batch: OfflineBatch, plan: StepPlan, constants: Constants) -> None:
        """z0 of the step, for kto."""
        if _Z0 in constants:
            at = batch.entries_of(plan.rows)
            constants[_Z0][at] = await self._reference_point(batch, plan)

    async def _reference_point(self, batch: OfflineBatch, plan: StepPlan) -> float:
        """max(0, mean of policy - reference logprobs over mismatched rows)."""
        info = await self.train_service.info(self.policy)
        table = mismatched_rows(batch.table, plan.rows, max_tokens=info.max_positions)
        if not table.num_rows:
            self.tracker.warn(
                "kto: an optimizer step of a single prompt has no mismatched pair, so its z0 is 0 "
                "(accepted: data.batch_size of at least 2 x trainer.num_optimizer_steps, with "
                "different prompts)"
            )
            return 0.0
        policy, reference = [
            (await self._logprobs(name, table)).astype(np.float64)
            for name in (self.policy, REFERENCE)
        ]
        moved = (policy - reference)[table.mask]
        return max(0.0, float(moved.sum()) / table.num_rows)

    async def _logprobs(self, policy: str, table: RowTable) -> FloatArray:
        """[N] of trained tokens under the present weights."""
        every = np.arange(table.num_rows)
        return (await self.forward_outputs(policy, table, every, ("logprobs",)))["logprobs"]


def mismatched_rows(table: RowTable, rows: IndexArray, *, max_tokens: int) -> RowTable:
    """Prompt of each row and response of the next with another prompt, cut to what the model takes.

    Responses are what follows the first trained token. Rows whose prompt leaves no room are left
    out; the table is empty when all rows have one prompt.
    """
    made = [
        _joined(table, prompt, response, max_tokens) for prompt, response in _pairs(table, rows)
    ]
    return flatten([Trajectory(rows=(row,)) for row in made])


def _pairs(table: RowTable, rows: IndexArray) -> Iterator[tuple[int, int]]:
    numbers = rows.tolist()
    prompts = [table.token_ids[table.starts[r] : _border(table, r)].tobytes() for r in numbers]
    for place, row in enumerate(numbers):
        others = (*range(place + 1, len(numbers)), *range(place))
        found = next((other for other in others if prompts[other] != prompts[place]), None)
        if found is not None:
            yield row, numbers[found]


def _joined(table: RowTable, prompt: int, response: int, max_tokens: int) -> TokenRow:
    own, other = _border(table, prompt), _border(table, response)
    before = table.token_ids[table.starts[prompt] : own]
    after = table.token_ids[other : table.starts[response] + table.lengths[response]]
    token_ids = np.concatenate([before, after])[:max_tokens]
    return TokenRow(token_ids=token_ids, loss_mask=np.arange(len(token_ids)) >= len(before))


def _border(table: RowTable, row: int) -> int:
    """Position in the table of a row's first trained token."""
    start = int(table.starts[row])
    return start + int(np.argmax(table.mask[start : start + int(table.lengths[row])]))
