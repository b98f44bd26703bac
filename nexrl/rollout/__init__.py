"""Rollouts: one data item in, trajectories out. A recipe imports `RolloutWorker` from here."""

from nexrl.rollout.rollout_worker import BaseRolloutWorker, RolloutWorker, WorkerContext

__all__ = ["BaseRolloutWorker", "RolloutWorker", "WorkerContext"]
