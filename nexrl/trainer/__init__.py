"""Trainers: what happens to a batch of trajectories."""

from nexrl.trainer.trainer import BaseTrainer, Trainer, TrainerContext, TrainReport

__all__ = ["BaseTrainer", "TrainReport", "Trainer", "TrainerContext"]
