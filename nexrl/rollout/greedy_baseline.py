"""GreedyBaseline: the reward of a draw's greedy completion, found once for all members of its group.

What `trainer.algorithm.greedy_baseline` (remax) asks of a worker. Between `SingleTurnWorker.step`,
whose members all wait for the same number, and the services that draw and judge. The number ends up
in `Trajectory.extra["greedy_reward"]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nexrl.errors import DeadlineError
from nexrl.rollout.scope import (
    RolloutScope,
    ScopedInference,
    ScopedReward,
    SharedCall,
    current_scope,
    enter_scope,
)
from nexrl.types import Completion, Prompt, Sampling

GREEDY_REWARD = "greedy_reward"
"""Key in `Trajectory.extra`, and name of what the trainer needs."""
GREEDY_MEMBER = -1
"""Stands for a member in the seed of the draw: no member's own seeds depend on the baseline."""
GreedyCall = Callable[[], Awaitable[float | None]]


class GreedyBaseline:
    """Invariant: a rollout group has at most one greedy call under way, and one that succeeded
    serves all of its members; one that failed fails those that wait for it, and their next attempts
    share a new one. Its calls to services stand among those of the member that began it, so that
    each is counted once.
    """

    def __init__(
        self,
        *,
        inference: ScopedInference,
        reward: ScopedReward,
        sampling: Sampling,
        policy: str,
        check: Callable[[Completion], Any],
    ) -> None:
        """`check` raises for a completion that the engine broke off."""
        self._inference = inference
        self._reward = reward
        self._sampling = replace(sampling, temperature=0.0)
        self._policy = policy
        self._check = check

    def begin(self, prompt: Prompt, data_item: Mapping[str, Any]) -> GreedyCall:
        """Start, or join what a sibling has started; await the call's answer when it is needed.

        The answer is None when the reward function abstains. Outside a runner nothing is shared.
        """
        row = dict(data_item)
        scope = current_scope()
        if scope is None:
            return partial(self._find, prompt, row)
        shared = scope.shared.get(GREEDY_REWARD)
        if shared is None or shared.has_failed:
            shared = self._start(scope, prompt, row)
        return partial(_wait, shared, scope)

    def _start(self, starter: RolloutScope, prompt: Prompt, row: Mapping[str, Any]) -> SharedCall:
        own = RolloutScope(
            loop=starter.loop,
            run=starter.run,
            rollout_id=f"{starter.rollout_id} (greedy)",
            source=starter.source,
            member=GREEDY_MEMBER,
            started=starter.loop.time(),
            deadline=starter.deadline,
        )
        task = starter.loop.create_task(self._find_within(own, prompt, row))
        shared = SharedCall(task=task, scope=own, starter=starter)
        starter.shared[GREEDY_REWARD] = shared
        return shared

    async def _find_within(
        self, scope: RolloutScope, prompt: Prompt, row: Mapping[str, Any]
    ) -> float | None:
        enter_scope(scope)
        timer = asyncio.timeout_at(scope.deadline)
        try:
            async with timer:
                return await self._find(prompt, row)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise DeadlineError(
                f"the greedy completion of item {scope.source.item_id} was not drawn and scored by "
                "the deadline of the rollout that began it (rollout_worker.deadline_s)"
            ) from error
        finally:
            scope.close()

    async def _find(self, prompt: Prompt, row: Mapping[str, Any]) -> float | None:
        (completion,) = await self._inference.generate(
            prompt, sampling=self._sampling, policy=self._policy
        )
        self._check(completion)
        return (await self._reward.score(completion.text, row, completion)).value


async def _wait(shared: SharedCall, scope: RolloutScope) -> float | None:
    """The answer, for one member: its end does not end the call, which belongs to the group."""
    try:
        found: float | None = await asyncio.shield(shared.task)
    except BaseException as error:
        failed = shared.scope.failed_call
        scope.failed_call = (failed[0] if failed else "greedy_baseline", error)
        raise
    if shared.starter is scope:
        scope.segments.extend(shared.scope.segments)
        scope.segments.sort(key=lambda segment: segment.finished_s)
    return found
