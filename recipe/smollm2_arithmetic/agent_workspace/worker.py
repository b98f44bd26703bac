"""One prompt, one completion, and a reward function that also hears why the completion ended."""

from typing import Any

from nexrl.rollout.rollout_worker import RolloutWorker
from nexrl.types import Trajectory


class SumWorker(RolloutWorker):
    """The built-in `single_turn`, with `finish_reason` among the reward's keywords."""

    async def step(self, data_item: dict[str, Any]) -> Trajectory:
        """Draw and score one answer."""
        completion = (await self.generate(data_item["prompt"]))[0]
        heard = {**data_item, "finish_reason": completion.finish_reason}
        result = await self.score(completion, heard)
        return completion.to_trajectory(
            prompt=data_item["prompt"], reward=result.value, reward_parts=result.parts
        )
