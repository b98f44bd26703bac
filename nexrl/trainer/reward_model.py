"""RewardModelTrainer: a score for a whole response (Bradley-Terry) or for each of its steps.

The policy that is trained has a value head in place of its output head (`ModelSpec.head`). Its
publications are folders that `services/reward/model.py` uses as a reward.
"""

from __future__ import annotations

from typing import ClassVar

from nexrl.errors import ConfigError
from nexrl.trainer.offline_trainer import OfflineTrainer


class RewardModelTrainer(OfflineTrainer):
    """Minimises a loss of scores: values of the state after a response, or after a step.

    Invariant: the policy has a value head, checked before the first batch.
    """

    scores: ClassVar[bool] = True

    async def setup(self) -> None:
        """ConfigError when the train service hosts a language model under the policy's name."""
        await super().setup()
        info = await self.train_service.info(self.policy)
        if "values" not in info.outputs:
            raise ConfigError(
                f"trainer.algorithm {self.loss.name} trains a value head, and policy "
                f"{self.policy!r} on the train service has the outputs {sorted(info.outputs)} "
                "(accepted: one created with head value)"
            )
