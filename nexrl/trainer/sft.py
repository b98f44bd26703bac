"""SftTrainer: cross entropy on the loss mask; rewards and logprobs are not looked at."""

from __future__ import annotations

import numpy as np

from nexrl.algorithms.metrics import length_metrics
from nexrl.trainer.batched_trainer import BatchedTrainer, step_metrics
from nexrl.trainer.batching import flatten
from nexrl.types import LossSpec, Trajectory, TrajectoryStatus


class SftTrainer(BatchedTrainer):
    """Minimises -logprob of the trained tokens, with the configured aggregation.

    Invariant: the loss is that of the model's own distribution, temperature 1, whatever drew the
    rows.
    """

    async def train(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """One batch; metrics are loss/total, nll/token, grad_norm, lr and response_length/*."""
        table = flatten(trajectories, temperature=1.0)
        plans = self.plan_steps(table, trajectories)
        outcome = await self.run_steps(
            table,
            plans,
            {"weight": self.weight_column(table, plans)},
            LossSpec(name="cross_entropy"),
        )
        lengths = table.trained_lengths(len(trajectories))
        truncated = np.array([t.status is TrajectoryStatus.TRUNCATED for t in trajectories])
        metrics = {**length_metrics(lengths, truncated), **step_metrics(outcome)}
        if table.num_rows:
            logprobs = outcome.columns["logprobs"][table.mask]
            metrics["nll/token"] = float(-logprobs.mean(dtype=np.float64))
        return metrics
