"""A rollout group on its way: the members of one draw, and when all of them have ended.

Records of the runner, which alone changes them; `deadlines.py` knows members, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from nexrl.rollout.scope import RolloutScope, SharedCall
from nexrl.types import Draw, RolloutRecord, Trajectory

OnEnd = Callable[[RolloutRecord], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Member:
    """One member of a rollout group.

    Invariant: `ended` turns true once and for all, just before `on_end` is called.
    """

    group: RunningGroup
    index: int
    rollout_id: str
    attempts: int = 0
    started: float = 0.0
    deadline: float | None = None
    """None before it starts."""
    overdue: bool = False
    """Its deadline came before its end."""
    task: asyncio.Task[None] | None = None
    """None before it starts, and when its step swallowed its cancellation."""
    scope: RolloutScope | None = None
    """Of the present attempt."""
    holds_slot: bool = False
    """It counts as one of `max_concurrent`."""
    ended: bool = False

    @property
    def put(self) -> Sequence[Trajectory]:
        """What the present attempt handed over so far."""
        return self.scope.trajectories if self.scope else ()


@dataclass(slots=True, eq=False)
class RunningGroup:
    """The members of a draw.

    Invariant: `done` is set when `num_running` reaches 0, or fails with the first error of `on_end`;
    once `closing` no member starts any more.
    """

    draw: Draw
    on_end: OnEnd
    num_running: int
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    done: asyncio.Future[None] = field(init=False)
    context: Context = field(default_factory=copy_context)
    """A member may be started by the end of another; what that one set is not its business."""
    closing: bool = False
    shared: dict[str, SharedCall] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done = self.loop.create_future()

    @classmethod
    def of(cls, draw: Draw, on_end: OnEnd, *, run_id: str, size: int) -> RunningGroup:
        """A group none of whose members has started."""
        group = cls(draw, on_end, size)
        prefix = f"{run_id}-{draw.item_id}-{draw.draw}"
        group.members = [Member(group, index, f"{prefix}-{index}") for index in range(size)]
        return group

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What still runs for it: members, and calls that they share."""
        tasks = [m.task for m in self.members if m.task is not None]
        tasks += [call.task for call in self.shared.values()]
        return [task for task in tasks if not task.done()]

    def member_ended(self) -> None:
        """`on_end` has taken a member's record."""
        self.num_running -= 1
        if not self.num_running and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """The group cannot go on; the first error counts."""
        if not self.done.done():
            self.done.set_exception(error)
