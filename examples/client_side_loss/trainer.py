"""A loss on this side of the wire: rank a group's rollouts as their rewards do.

    p = softmax over a group of the rows' summed logprobs
    q = softmax over the same of reward / temperature
    loss = mean over groups of KL(q || p) - coefficient x mean entropy

It couples all rows of a group, which may travel in different calls, so no per-token formula can say
it. Here it is a function of what `forward` returns; only gradients of logprobs and entropy are sent
back, so it works on every train service.
"""

import numpy as np
import torch

from nexrl.algorithms.groups import group_index
from nexrl.trainer.batched_trainer import BatchedTrainer, step_metrics
from nexrl.trainer.batching import flatten


class RankingTrainer(BatchedTrainer):
    """Listwise ranking of the trajectories of each group."""

    needs = ("reward",)

    async def train(self, trajectories):
        table = flatten(trajectories)
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        groups = torch.from_numpy(group_index(t.group_id for t in trajectories))
        owners = torch.from_numpy(table.spread(table.trajectories))

        def objective(plan, outputs):
            """A scalar, from [n] outputs at the step's trained tokens in float64."""
            owner = owners[torch.from_numpy(plan.positions)]
            sums = torch.zeros(len(rewards), dtype=torch.float64)
            sums = sums.index_add(0, owner, outputs["logprobs"])
            losses = []
            for group in groups[owner].unique():
                members = torch.nonzero(groups == group)[:, 0]
                wanted = torch.log_softmax(rewards[members] / self.arguments["temperature"], 0)
                found = torch.log_softmax(sums[members], 0)
                losses.append((wanted.exp() * (wanted - found)).sum())
            bonus = self.arguments["entropy_coefficient"] * outputs["entropy"].mean()
            return torch.stack(losses).mean() - bonus

        plans = self.plan_steps(table, trajectories)
        outcome = await self.run_client_steps(
            table, plans, objective, outputs=("logprobs", "entropy")
        )
        entropy = outcome.columns["entropy"][table.mask]
        return {**step_metrics(outcome), "entropy": float(np.mean(entropy))}
