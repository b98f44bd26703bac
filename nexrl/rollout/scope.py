"""The scope of one attempt at a rollout: its seeds, its calls to services, what it has left.

The runner opens a `RolloutScope` in a context variable before it calls `step`; the clients on a
worker (`ScopedInference`, `ScopedReward`) and `put_trajectory` find it there. So one worker
instance serves every concurrent rollout, and blocking code in a thread is attributed as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from nexrl.errors import UserCodeError
from nexrl.services.inference.protocol import InferenceClient
from nexrl.services.reward.protocol import RewardResult, RewardService
from nexrl.types import (
    DEFAULT_POLICY,
    Completion,
    Draw,
    Prompt,
    Provenance,
    Sampling,
    Segment,
    Trajectory,
    derive_seed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What all rollouts of a runner have in common."""

    run_id: str
    """Run (and stage) that makes them."""
    seed: int
    """Seed of the run; validation has a domain of its own."""
    policy: str
    """Model that draws."""
    engine: str = ""
    """Engine name and build."""
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    """The engine's capability record."""
    reward_contract: str = ""
    """Identity of the reward function."""


@dataclass(slots=True, kw_only=True)
class RolloutScope:
    """What one attempt did so far. Owned by the runner.

    Invariant: after `close` nothing is added; late calls of abandoned code are refused. A retry has
    a scope of its own, so its calls are counted from 0 and draw the same seeds.
    """

    loop: asyncio.AbstractEventLoop
    """The runner's loop, for its clock and for calls from threads."""
    run: RunIdentity
    """The run."""
    rollout_id: str
    """The rollout that this is an attempt at."""
    source: Draw
    """The draw it belongs to."""
    member: int
    """Which of the group's rollouts."""
    started: float
    """When the rollout started, on the loop's clock."""
    deadline: float
    """End of the rollout's time."""
    attempt: int = 1
    """Which attempt, from 1."""
    num_calls: int = 0
    """Inference calls so far."""
    sampling: Sampling | None = None
    """Parameters of the last call, seeds included."""
    first_seed: int | None = None
    """Seed of the first choice of the first call."""
    segments: list[Segment] = field(default_factory=list)
    """Calls to services, in order of their end."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """What `put_trajectory` got."""
    failed_call: tuple[str, BaseException] | None = None
    """Service and error of the last call that did not succeed."""
    shared: dict[str, SharedCall] = field(default_factory=dict)
    """Calls that the members of the group share, by name; the group's, and ended with it."""
    bridges: dict[Future[Any], str] = field(default_factory=dict)
    """Calls that blocking code in a thread is waiting for, and their service."""
    interrupted: str = ""
    """Service that a thread was waiting for when the attempt was over."""
    closed: bool = False
    """The attempt is over."""

    def close(self) -> None:
        """Nothing may be added any more; threads that wait for a call wake up."""
        self.closed = True
        for bridge, service in tuple(self.bridges.items()):
            self.interrupted = service
            bridge.cancel()

    def check_open(self, what: str) -> None:
        """Raises when the rollout that calls has already ended."""
        if self.closed:
            raise UserCodeError(
                f"{what} was called after its rollout {self.rollout_id} had ended; the call is "
                "dropped"
            )

    def seeded(self, sampling: Sampling, n: int, policy: str) -> Sampling:
        """Parameters of the next call, with a seed for each choice unless the caller chose one.

        Retries and resumed runs reach the same call with the same seed; attempts are no input.
        """
        call = self.num_calls
        self.num_calls = call + 1
        if sampling.seed is None and not sampling.seeds:
            parts = (
                self.run.seed,
                policy,
                self.source.item_id,
                self.source.draw,
                self.member,
                call,
            )
            if n == 1:
                seeds: tuple[int, ...] = (derive_seed(*parts),)
            else:
                seeds = tuple(derive_seed(*parts, choice) for choice in range(n))
            sampling = Sampling(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop=sampling.stop,
                stop_token_ids=sampling.stop_token_ids,
                seeds=seeds,
            )
        self.sampling = sampling
        if call == 0:
            self.first_seed = sampling.seeds[0] if sampling.seeds else sampling.seed
        return sampling

    def note_call(self, service: str, queued: float) -> None:
        """A call to a service has ended."""
        now = self.loop.time()
        self.segments.append(
            Segment(kind=service, queued_s=queued, started_s=queued, finished_s=now)
        )

    def identity(self, *, role: str = "", index: int = 0) -> dict[str, Any]:
        """Identity fields and provenance of the trajectory with this index, as keywords of
        `Trajectory`. The baseline key is the draw, and the role where there is one (FR-046)."""
        source, run = self.source, self.run
        key = f"{source.item_id}/{source.draw}"
        return {
            "trajectory_id": f"{self.rollout_id}.{index}",
            "rollout_id": self.rollout_id,
            "group_id": f"{key}/{role}" if role else key,
            "item_id": source.item_id,
            "draw": source.draw,
            "member": self.member,
            "run_id": run.run_id,
            "policy": run.policy,
            "provenance": Provenance(
                sampling=self.sampling,
                seed=self.first_seed,
                engine=run.engine,
                capabilities=run.capabilities,
                reward_contract=run.reward_contract,
                segments=tuple(self.segments),
                attempts=self.attempt,
                started_s=self.started,
                finished_s=self.loop.time(),
            ),
        }

    def blames(self, error: BaseException) -> str:
        """The service whose failed call led to the error; "" when it was none."""
        if self.failed_call is None:
            return self.interrupted
        service, failed = self.failed_call
        cause: BaseException | None = error
        while cause is not None:
            if cause is failed:
                return service
            cause = cause.__cause__
        return self.interrupted


@dataclass(slots=True, kw_only=True)
class SharedCall:
    """Work that one member of a rollout group began and all of its members may wait for."""

    task: asyncio.Task[Any]
    """Ends with an answer, an error, or the group."""
    scope: RolloutScope
    """Its own seeds and calls to services."""
    starter: RolloutScope
    """The attempt that began it."""

    def __post_init__(self) -> None:
        # Nobody may be left to hear of an error; it is each waiting member's to report.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def has_failed(self) -> bool:
        """It ended without an answer."""
        task = self.task
        return task.done() and (task.cancelled() or task.exception() is not None)


_SCOPE: ContextVar[RolloutScope | None] = ContextVar("nexrl_rollout_scope", default=None)


def current_scope() -> RolloutScope | None:
    """The attempt that the running code belongs to; None outside the runner."""
    return _SCOPE.get()


def enter_scope(scope: RolloutScope) -> None:
    """Make it the current one for the running task and what it starts."""
    _SCOPE.set(scope)


class ScopedInference:
    """InferenceClient that gives each call its seeds and notes when it ran."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = DEFAULT_POLICY
    ) -> list[Completion]:
        """See `InferenceClient.generate`."""
        scope = _SCOPE.get()
        if scope is None:
            return await self._client.generate(prompt, sampling=sampling, n=n, policy=policy)
        scope.check_open("generate()")
        sampling = scope.seeded(sampling, n, policy)
        queued = scope.loop.time()
        try:
            return await self._client.generate(prompt, sampling=sampling, n=n, policy=policy)
        except BaseException as error:
            scope.failed_call = ("inference", error)
            raise
        finally:
            scope.note_call("inference", queued)


class ScopedReward:
    """RewardService that notes when it ran; closing it is its owner's business."""

    def __init__(self, service: RewardService) -> None:
        self._service = service
        self.contract = service.contract

    async def score(
        self, completion_text: str, row: Mapping[str, Any], completion: Completion | None = None
    ) -> RewardResult:
        """See `RewardService.score`."""
        scope = _SCOPE.get()
        if scope is None:
            return await self._service.score(completion_text, row, completion)
        scope.check_open("score()")
        queued = scope.loop.time()
        try:
            return await self._service.score(completion_text, row, completion)
        except BaseException as error:
            scope.failed_call = ("reward", error)
            raise
        finally:
            scope.note_call("reward", queued)
