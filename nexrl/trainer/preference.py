"""PreferenceTrainer: dpo, ipo, hinge, simpo, orpo and kto on offline pairs or labelled responses.

Adds to `offline_trainer.py` what these losses know beside the policy's own logprobs: those of a
frozen reference, lengths, and kto's reference point.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from nexrl.trainer.batched_trainer import StepPlan
from nexrl.trainer.kto import mismatched_rows
from nexrl.trainer.offline_rows import OfflineBatch
from nexrl.trainer.offline_trainer import Constants, OfflineTrainer
from nexrl.types import ModelSpec

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
            column = await self.forward_column(REFERENCE, table, np.arange(table.num_rows))
            sums = batch.sums(column)
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
        """max(0, mean of policy - reference logprobs over mismatched rows), see `kto.py`."""
        info = await self.train_service.info(self.policy)
        table = mismatched_rows(batch.table, plan.rows, max_tokens=info.max_positions)
        if not table.num_rows:
            self.tracker.warn(
                "kto: an optimizer step of a single prompt has no mismatched pair, so its z0 is 0 "
                "(accepted: data.batch_size of at least 2 x trainer.num_optimizer_steps, with "
                "different prompts)"
            )
            return 0.0
        rows = np.arange(table.num_rows)
        policy, reference = [
            await self.forward_column(name, table, rows) for name in (self.policy, REFERENCE)
        ]
        moved = policy.astype(np.float64) - reference.astype(np.float64)
        return max(0.0, float(moved[table.mask].sum()) / table.num_rows)
