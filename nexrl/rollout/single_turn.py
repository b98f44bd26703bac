"""SingleTurnWorker: one prompt, one completion, one reward.

The built-in worker of `rollout_worker.type: single_turn`, and the shortest path through the
rollout: prompt -> inference -> reward -> trajectory. Members of a group ask for the same prompt at
the same time; the inference client coalesces them.
"""

from __future__ import annotations

from typing import Any

from nexrl.errors import ConfigError, ServiceError
from nexrl.rollout.greedy_baseline import GREEDY_REWARD, GreedyBaseline
from nexrl.rollout.rollout_worker import RolloutWorker, WorkerContext
from nexrl.rollout.scope import current_scope
from nexrl.types import Completion, Trajectory


class SingleTurnWorker(RolloutWorker):
    """A `prompt` string or chat `messages` in, a scored trajectory out; with a greedy baseline also
    the reward of the greedy completion, which the members of a group share."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._baseline = self._build_baseline() if context.greedy_baseline else None

    async def step(self, data_item: dict[str, Any]) -> Trajectory:
        """Draw, score, and keep what was drawn exactly as it was drawn."""
        prompt = self.prompts.of_row(data_item)
        greedy = None if self._baseline is None else self._baseline.begin(prompt, data_item)
        completions = await self.inference.generate(
            prompt, sampling=self.sampling, policy=self.policy
        )
        completion = completions[0]
        fields = _ending(completion, self.sampling.max_tokens)
        if self.reward is not None:
            result = await self.reward.score(completion.text, data_item, completion)
            fields["reward"] = result.value
            fields["reward_parts"] = result.parts
        if greedy is not None and (value := await greedy()) is not None:
            fields["extra"] = {GREEDY_REWARD: value}
            fields["metrics"] = {GREEDY_REWARD: value}
        if (scope := current_scope()) is not None:
            fields.update(scope.identity())
        return completion.to_trajectory(prompt=prompt.text, **fields)

    def _build_baseline(self) -> GreedyBaseline:
        if self.reward is None:
            raise ConfigError(
                "trainer.algorithm.greedy_baseline needs rollout_worker.reward, which judges the "
                "greedy completion; give it as `path.py:name` or `package.module:name`"
            )
        return GreedyBaseline(
            inference=self.inference,
            reward=self.reward,
            sampling=self.sampling,
            policy=self.policy,
            check=lambda completion: _ending(completion, self.sampling.max_tokens),
        )


def _ending(completion: Completion, max_tokens: int) -> dict[str, Any]:
    """What the finish reason says beyond `length`: a draw cut short of `max_tokens` met the end of
    the context; one that the engine broke off is no completion at all."""
    reason = completion.finish_reason
    if reason == "length":
        return {
            "truncation_cause": "context" if len(completion.token_ids) < max_tokens else "length"
        }
    if reason in ("abort", "error"):
        raise ServiceError(
            f"the engine broke a completion off after {len(completion.token_ids)} tokens: "
            f"{completion.raw_finish_reason or reason}"
        )
    return {}
