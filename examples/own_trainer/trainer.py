"""Expert iteration: supervised training on the best rollouts of each group."""

from collections import defaultdict

import numpy as np

from nexrl.trainer import Trainer
from nexrl.types import LossSpec, RowChunk


class BestOfGroup(Trainer):
    """Cross entropy on the `trainer.arguments.keep` best trajectories of each group."""

    needs = ("reward",)

    async def train(self, trajectories):
        groups = defaultdict(list)
        for trajectory in trajectories:
            groups[trajectory.group_id].append(trajectory)
        best = [
            trajectory
            for group in groups.values()
            for trajectory in sorted(group, key=lambda t: -t.reward)[: self.arguments["keep"]]
        ]
        rows = [row for trajectory in best for row in trajectory.rows]
        num_tokens = sum(row.num_trained_tokens for row in rows)
        # One denominator for the whole optimizer step: the service computes plain sums.
        weights = [(row.loss_mask / num_tokens).astype(np.float32) for row in rows]
        chunk = RowChunk.from_rows([row.token_ids for row in rows], {"weight": weights})
        output = await self.train_service.forward_backward(
            self.policy, chunk, LossSpec(name="cross_entropy")
        )
        result = await self.train_service.optim_step(self.policy, self.next_optim_params())
        return {
            "loss/total": output.loss,
            "grad_norm": result.grad_norm,
            "reward/best_mean": float(np.mean([t.reward for t in best])),
        }
