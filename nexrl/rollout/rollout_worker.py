"""RolloutWorker: what a user writes. One data item goes in, a trajectory comes out.

The runner calls `step` for every member of every rollout group, concurrently on one instance.
`self.inference`, `self.reward` and `self.renderer` are all that a worker needs to know of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError as BridgeCancelledError
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from nexrl.config.schema import DataConfig, RolloutWorkerConfig
from nexrl.errors import ConfigError, DeadlineError, UserCodeError
from nexrl.protocols import Renderer
from nexrl.rollout.prompts import PromptBuilder, PromptLike
from nexrl.rollout.scope import RolloutScope, ScopedInference, ScopedReward, current_scope
from nexrl.services.inference.protocol import InferenceClient
from nexrl.services.reward.protocol import RewardResult, RewardService
from nexrl.types import DEFAULT_POLICY, Completion, Sampling, Trajectory

T = TypeVar("T")
StepResult = Trajectory | list[Trajectory] | None

_BRIDGE_GRACE_S = 5.0
"""Seconds past a rollout's deadline in which the loop must have woken a thread that waits."""
_SAMPLING_FIELDS = tuple(f.name for f in fields(Sampling))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Everything a worker is given; built once by whoever wires the run."""

    inference: InferenceClient | None
    """Draws tokens; None for workers that do not (`uses_inference = False`)."""
    renderer: Renderer
    """Text and messages to token ids and back."""
    reward: RewardService | None = None
    """The reward function of the configuration; None when there is none."""
    config: RolloutWorkerConfig = field(default_factory=RolloutWorkerConfig)
    """Section `rollout_worker`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Section `data`: names of the columns."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are drawn: training or validation parameters."""
    policy: str = DEFAULT_POLICY
    """Model that draws."""
    seed: int = 0
    """Seed for randomness of the worker's own; calls to inference are seeded by the runner."""
    engine: str = ""
    """Engine name and build, stored with every trajectory."""
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    """The engine's capability record, stored with every trajectory."""
    greedy_baseline: bool = False
    """Whether `Trajectory.extra["greedy_reward"]` is asked for: trainer.algorithm.greedy_baseline,
    never in validation. A worker that ignores it leaves its trajectories untrained."""


class RolloutWorker:
    """One data item -> one trajectory. Subclass it and write `step`.

    Invariant: one instance serves all concurrent rollouts, so what belongs to one rollout lives in
    local variables of `step`, never on `self`.

    `setup` (called once, before the first rollout) and `aclose` may be overridden, sync or async.

    Example:
        class Adder(RolloutWorker):
            async def step(self, data_item: dict) -> Trajectory:
                completion = (await self.generate(data_item["prompt"]))[0]
                reward = float(completion.text.strip() == data_item["answer"])
                return completion.to_trajectory(prompt=data_item["prompt"], reward=reward)
    """

    uses_inference: ClassVar[bool] = True
    """False when `step` never draws tokens; the run then needs no engine for it."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.config = context.config
        self.arguments: Mapping[str, Any] = context.config.arguments
        self.sampling = context.sampling
        self.policy = context.policy
        self.renderer = context.renderer
        self.reward = None if context.reward is None else ScopedReward(context.reward)
        self.prompts = PromptBuilder(context.renderer, context.config, context.data)
        self._inference = None if context.inference is None else ScopedInference(context.inference)

    def step(self, data_item: dict[str, Any]) -> StepResult | Awaitable[StepResult]:
        """Turn one data item into a trajectory, or a list of them (one for each role), or nothing
        after `put_trajectory`. A plain `def` may block: it runs in a thread. `data_item` is the
        call's own copy."""
        raise NotImplementedError(f"{type(self).__name__} does not define step()")

    def setup(self) -> Awaitable[None] | None:
        """Called once before the first rollout: load what all rollouts share."""
        return None

    def aclose(self) -> Awaitable[None] | None:
        """Called once after the last rollout: release what `setup` took."""
        return None

    @property
    def inference(self) -> ScopedInference:
        """The inference client; every call is seeded and timed."""
        if self._inference is None:
            raise ConfigError(
                f"{type(self).__name__} draws tokens but says uses_inference = False, so the run "
                "gave it no inference service"
            )
        return self._inference

    def put_trajectory(self, trajectory: Trajectory) -> None:
        """Hand over a trajectory before `step` returns; kept if the rollout ends by its deadline
        and rollout_worker.on_deadline is `truncate`."""
        if not isinstance(trajectory, Trajectory):
            raise UserCodeError(
                f"put_trajectory() accepts a Trajectory, got {type(trajectory).__name__}: "
                f"{trajectory!r:.80}"
            )
        scope = self._scope("put_trajectory()")
        scope.check_open("put_trajectory()")
        scope.trajectories.append(trajectory)

    _put_trajectory = put_trajectory

    async def generate(self, prompt: PromptLike, n: int = 1, **sampling: Any) -> list[Completion]:
        """Draw n completions of a text, messages, token ids or a Prompt; keywords override fields
        of `self.sampling`, for example `max_tokens=8`."""
        return await self.inference.generate(
            self.prompts.build(prompt),
            sampling=self._overridden(sampling) if sampling else self.sampling,
            n=n,
            policy=self.policy,
        )

    def generate_blocking(
        self, prompt: PromptLike, n: int = 1, **sampling: Any
    ) -> list[Completion]:
        """`generate` for a blocking `step`, which runs in a thread."""
        return self._bridge("generate", "inference", lambda: self.generate(prompt, n, **sampling))

    async def score(self, completion: Completion, data_item: Mapping[str, Any]) -> RewardResult:
        """Judge a completion by the configured reward function."""
        if self.reward is None:
            raise ConfigError(
                f"{type(self).__name__} calls score() but rollout_worker.reward is not set; give it "
                "as `path.py:name` or `package.module:name`"
            )
        return await self.reward.score(completion.text, data_item, completion)

    def score_blocking(self, completion: Completion, data_item: Mapping[str, Any]) -> RewardResult:
        """`score` for a blocking `step`, which runs in a thread."""
        return self._bridge("score", "reward", lambda: self.score(completion, data_item))

    def _overridden(self, overrides: Mapping[str, Any]) -> Sampling:
        for name in overrides:
            if name not in _SAMPLING_FIELDS:
                raise UserCodeError(
                    f"generate() got {name}={overrides[name]!r}; sampling parameters are "
                    f"{', '.join(_SAMPLING_FIELDS)}"
                )
        return replace(self.sampling, **overrides)

    @staticmethod
    def _scope(what: str) -> RolloutScope:
        scope = current_scope()
        if scope is None:
            raise UserCodeError(
                f"{what} works only inside step(): it was called outside a rollout, or from a "
                "thread that step() started without its context variables"
            )
        return scope

    def _bridge(self, name: str, service: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the runner's loop and wait for it in this thread."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise UserCodeError(
                f"{name}_blocking() was called on the event loop, which it would block; in an "
                f"`async def step` write `await self.{name}(...)`"
            )
        scope = self._scope(f"{name}_blocking()")
        scope.check_open(f"{name}_blocking()")
        future = asyncio.run_coroutine_threadsafe(start(), scope.loop)
        scope.bridges[future] = service
        try:
            if scope.closed:  # closed between the check and the add: nobody else would cancel it
                future.cancel()
            left = scope.deadline - scope.loop.time()
            return future.result(timeout=max(0.0, left) + _BRIDGE_GRACE_S)
        except BridgeCancelledError:
            raise UserCodeError(f"{name}_blocking() was waiting when its rollout ended") from None
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                raise
            future.cancel()
            raise DeadlineError(
                f"{name}_blocking() waited past the end of its rollout's time: the event loop did "
                "not end it"
            ) from error
        finally:
            scope.bridges.pop(future, None)


BaseRolloutWorker = RolloutWorker
