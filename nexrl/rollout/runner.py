"""RolloutRunner: draws in, rollout records out. Group fan-out, deadlines, retries, failures.

Between admission and the pool: the controller calls `run_group` for each admitted draw, and every
member that starts ends exactly once through `on_end`, whatever its worker does.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable
from typing import Any, cast

from nexrl.blocking_pool import BlockingPool
from nexrl.errors import FailureClass, UserCodeError, classify, user_frame
from nexrl.protocols import Tracker
from nexrl.rollout.deadlines import DeadlineQueue
from nexrl.rollout.group import Member, OnEnd, RunningGroup
from nexrl.rollout.outcome import (
    Outcome,
    cancelled,
    collect,
    describe_deadline,
    describe_failure,
    ended,
    failed,
    identified,
    truncated,
)
from nexrl.rollout.rollout_worker import RolloutWorker
from nexrl.rollout.scope import RolloutScope, RunIdentity, enter_scope
from nexrl.types import Draw, Failure, RolloutRecord

_MAX_THREADS = 64
_STUCK_GRACE_S = 5.0
"""Seconds after its deadline at which a step that swallows its cancellation is left alone."""


class RolloutRunner:
    """Runs rollout groups on one worker, as section `rollout_worker` of its context says.

    Invariant: every member of every group given to `run_group` ends exactly once through `on_end`,
    with a status and, unless it ended well, a reason; a failure never becomes a reward, and one
    member's end never touches a sibling.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        *,
        num_rollouts: int,
        run_id: str,
        run_seed: int,
        tracker: Tracker,
        deadline_s: float | None = None,
    ) -> None:
        """`deadline_s` stands in for rollout_worker.deadline_s where it is given."""
        context = worker.context
        config, retry = context.config, context.config.failure_policy
        self._worker = worker
        self._num_rollouts = num_rollouts
        self._deadline_s = deadline_s or config.deadline_s
        self._max_attempts = retry.max_attempts if retry.retry_member else 1
        self._retry_delay_s = retry.retry_delay_s
        self._on_deadline = config.on_deadline
        self._run = RunIdentity(
            run_id=run_id,
            seed=run_seed,
            policy=context.policy,
            engine=context.engine,
            capabilities=context.capabilities,
            reward_contract=context.reward.contract if context.reward is not None else "",
        )
        self._tracker = tracker
        self._deadlines = DeadlineQueue(
            self._deadline_s, grace_s=_STUCK_GRACE_S, after_grace=self._abandon_if_stuck
        )
        self._builtin = type(worker).__module__.startswith("nexrl.")
        self._blocking = not inspect.iscoroutinefunction(worker.step)
        # A blocking step holds a thread for as long as it runs, so waiting for a thread happens
        # here, before the rollout's deadline begins to count.
        num_threads = min(config.max_concurrent, _MAX_THREADS)
        self._num_free = num_threads if self._blocking else config.max_concurrent
        self._waiting: deque[Member] = deque()
        self._threads = BlockingPool(num_threads, name=f"step of {type(worker).__name__}")
        self._groups: set[RunningGroup] = set()
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._starting: asyncio.Task[None] | None = None
        self._ready = False
        self._closed = False

    async def start(self) -> None:
        """Call the worker's `setup`, once; UserCodeError when it raises. `run_group` does it too."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._set_up(), name="worker setup")
        await asyncio.shield(self._starting)
        self._ready = True

    async def run_group(self, draw: Draw, on_end: OnEnd) -> None:
        """Run all members of a draw; returns when each has ended through `on_end`.

        Cancelling it ends the members that still run as `cancelled(shutdown)`. Raises what `on_end`
        raises, after all members have ended.
        """
        group = RunningGroup.of(draw, on_end, run_id=self._run.run_id, size=self._num_rollouts)
        self._groups.add(group)
        try:
            if not self._ready:
                await self.start()
            for member in group.members:
                self._start_or_wait(member)
            await group.done
        finally:
            if group.num_running:
                await self._close_group(group)
            self._groups.discard(group)
            self._end_shared(group)
            group.members.clear()  # a cycle would keep all of it until the collector comes

    async def aclose(self) -> None:
        """End running rollouts, the threads and the worker; idempotent."""
        if self._closed:
            return
        self._closed = True
        for group in tuple(self._groups):
            group.closing = True
            if not group.done.done():
                group.done.set_result(None)  # `run_group` ends what still runs
        tasks = self._abandoned.union(*(group.tasks for group in self._groups))
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STUCK_GRACE_S)
        if self._starting is not None:
            self._starting.cancel()
        self._deadlines.close()
        await self._threads.aclose()
        if (closing := self._worker.aclose()) is not None:
            async with asyncio.timeout(_STUCK_GRACE_S):
                await closing

    # --- group --------------------------------------------------------------------------------

    async def _close_group(self, group: RunningGroup) -> None:
        """End the members that have not ended, those that never started included."""
        group.closing = True
        if tasks := group.tasks:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_STUCK_GRACE_S)
        # A task that is cancelled before its first step never reaches its own handler.
        for member in group.members:
            if not member.ended:
                await self._end(member, cancelled(member.put, "shutdown"))
        if group.done.done() and not group.done.cancelled():
            group.done.exception()  # the first error is on its way already

    def _end_shared(self, group: RunningGroup) -> None:
        """Calls that members shared end with the last of them."""
        for call in group.shared.values():
            if not call.task.done():
                call.task.cancel()
                self._leave_alone(call.task)
        group.shared.clear()

    def _leave_alone(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for it any more but `aclose`."""
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    def _start_or_wait(self, member: Member) -> None:
        """Members start in the order of asking; one that waits has no task yet."""
        if self._num_free:
            self._num_free -= 1
            self._start(member)
        else:
            self._waiting.append(member)

    def _start(self, member: Member) -> None:
        group = member.group
        member.holds_slot = True
        member.task = group.loop.create_task(self._run_member(member), context=group.context.copy())

    def _free_slot(self, member: Member) -> None:
        member.holds_slot = False
        while self._waiting:
            following = self._waiting.popleft()
            if not following.group.closing:
                self._start(following)
                return
        self._num_free += 1

    def _abandon_if_stuck(self, member: Member) -> None:
        """A step that swallows its cancellation is ended on its behalf, and its task left alone."""
        task = member.task
        if task is None or member.ended or member.group.closing:
            return
        member.task = None
        self._leave_alone(task)
        self._leave_alone(member.group.loop.create_task(self._end_stuck(member)))

    async def _end_stuck(self, member: Member) -> None:
        group = member.group
        failure = Failure(
            failure_class=FailureClass.USER_CODE,
            message=(
                f"step() of {type(self._worker).__name__} did not end when it was cancelled at its "
                f"deadline of {self._deadline_s:g} s (item {group.draw.item_id}, member "
                f"{member.index}); it swallows asyncio.CancelledError"
            ),
            where="step",
            error_type="DeadlineError",
        )
        try:
            await self._end(member, failed(failure, member.put))
        except Exception as error:  # noqa: BLE001 - `run_group` raises it
            group.fail(error)

    # --- member -------------------------------------------------------------------------------

    async def _run_member(self, member: Member) -> None:
        try:
            with self._tracker.activity("rollout", member.rollout_id):
                outcome = await self._run_attempts(member)
            await self._end(member, outcome)
        except asyncio.CancelledError:
            if not member.ended:
                await self._end(member, cancelled(member.put, "shutdown"))
            raise
        except Exception as error:  # noqa: BLE001 - `run_group` raises it
            member.group.fail(error)

    async def _run_attempts(self, member: Member) -> Outcome:
        """Attempts until one ends well or for good, or the rollout's time is over."""
        loop = member.group.loop
        task = member.task
        member.started = loop.time()
        self._deadlines.enter(member, loop, member.started)
        last_failure: Failure | None = None
        try:
            while True:
                outcome = await self._attempt(member, self._open_scope(member, loop))
                last_failure = outcome.failure
                if last_failure is None or not self._may_retry(member, last_failure, loop.time()):
                    return outcome
                self._tracker.count("rollout/retries")
                await asyncio.sleep(self._retry_delay(member))
        except asyncio.CancelledError as error:
            if not member.overdue or (task is not None and task.cancelling() > 1):
                raise
            return self._at_deadline(member, error, last_failure)
        finally:
            self._deadlines.leave(member)
            if member.overdue and task is not None:
                task.uncancel()

    def _retry_delay(self, member: Member) -> float:
        return self._retry_delay_s * 2.0 ** (member.attempts - 1)

    def _may_retry(self, member: Member, failure: Failure, now: float) -> bool:
        return (
            failure.retryable
            and member.attempts < self._max_attempts
            and member.deadline is not None
            and now + self._retry_delay(member) < member.deadline
        )

    def _open_scope(self, member: Member, loop: asyncio.AbstractEventLoop) -> RolloutScope:
        assert member.deadline is not None
        member.attempts += 1
        member.scope = scope = RolloutScope(
            loop=loop,
            run=self._run,
            rollout_id=member.rollout_id,
            source=member.group.draw,
            member=member.index,
            started=member.started,
            deadline=member.deadline,
            attempt=member.attempts,
            shared=member.group.shared,
        )
        enter_scope(scope)
        return scope

    async def _attempt(self, member: Member, scope: RolloutScope) -> Outcome:
        """One call of `step`; any exception but a cancellation from outside becomes an outcome."""
        # Its own: a worker may change nested lists and dicts; leaves are shared.
        item = {key: _copied(value) for key, value in member.group.draw.row.items()}
        try:
            if self._blocking:
                result: Any = await self._threads.run(lambda: self._worker.step(item))
                if inspect.isawaitable(result):
                    result = await result
            else:
                result = await cast(Awaitable[Any], self._worker.step(item))
            return ended(collect(result, scope.trajectories))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return self._judge(error, scope)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            return self._judge(error, scope)
        finally:
            scope.close()

    def _judge(self, error: BaseException, scope: RolloutScope) -> Outcome:
        failure = describe_failure(error, scope, builtin=self._builtin)
        if failure.error_type == "ContextOverflowError" and scope.trajectories:
            return truncated(scope.trajectories, "context")
        return failed(failure, scope.trajectories)

    def _at_deadline(
        self, member: Member, error: asyncio.CancelledError, last_failure: Failure | None
    ) -> Outcome:
        scope = member.scope
        assert scope is not None
        failure = describe_deadline(
            error, scope, deadline_s=self._deadline_s, last_failure=last_failure
        )
        infrastructure = failure.failure_class is FailureClass.INFRASTRUCTURE
        if self._on_deadline == "truncate" and scope.trajectories and not infrastructure:
            return truncated(scope.trajectories, "deadline")
        return failed(failure, scope.trajectories)

    async def _end(self, member: Member, outcome: Outcome) -> None:
        """The one place where a rollout ends; a second end of the same one is only counted."""
        if member.holds_slot:
            self._free_slot(member)
        if member.ended:
            self._tracker.count("rollout/late_results")
            return
        member.ended = True
        group = member.group
        record = RolloutRecord(
            rollout_id=member.rollout_id,
            group_key=group.draw.key,
            member=member.index,
            status=outcome.status,
            reason=outcome.reason,
            trajectories=identified(outcome.trajectories, member.scope) if member.scope else (),
            failure=outcome.failure,
            attempts=max(member.attempts, 1),
            duration_s=0.0 if member.deadline is None else group.loop.time() - member.started,
        )
        self._tracker.rollout_ended(record)
        await group.on_end(record)
        group.member_ended()

    # --- worker -------------------------------------------------------------------------------

    async def _set_up(self) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                if inspect.iscoroutinefunction(self._worker.setup):
                    await self._worker.setup()
                else:
                    waiting = await self._threads.run(self._worker.setup)
                    if waiting is not None:
                        await waiting
        except Exception as error:
            if classify(error) is not FailureClass.USER_CODE or isinstance(error, UserCodeError):
                raise
            raise UserCodeError(
                f"setup() of {type(self._worker).__name__} raised {type(error).__name__}: {error} "
                f"at {user_frame(error)}"
            ) from error


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(entry) for key, entry in value.items()}
    if type(value) is list:
        return [_copied(entry) for entry in value]
    return value
