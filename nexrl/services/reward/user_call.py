"""Around a call of a user's reward code: its deadline, and what becomes of the errors it raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nexrl.errors import (
    DeadlineError,
    FailureClass,
    NexRLError,
    RewardError,
    ServiceError,
    classify,
    innermost_cause,
    user_frame,
)


@asynccontextmanager
async def user_call(
    what: str, deadline_s: float, *, passing: tuple[type[BaseException], ...] = ()
) -> AsyncIterator[None]:
    """The block is the call of `what`, for example `reward function f`; errors of the types in
    `passing` are left as they are."""
    timer = asyncio.timeout(deadline_s)
    try:
        async with timer:
            yield
    except passing:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and timer.expired():
            raise _past_deadline(what, deadline_s, error) from None
        raise raised(what, error) from error


def raised(what: str, error: BaseException) -> NexRLError:
    """The error for what user code raised: a lost connection to a judge is infrastructure
    (retried), anything else is the code's own fault. Neither is a score (FR-059, FR-140)."""
    cause = innermost_cause(error)
    message = f"{what} raised {type(cause).__name__}: {cause} at {user_frame(error)}"
    if classify(error) is FailureClass.INFRASTRUCTURE:
        return ServiceError(message, retryable=getattr(error, "retryable", True))
    return RewardError(message)


def _past_deadline(what: str, deadline_s: float, error: TimeoutError) -> DeadlineError:
    message = f"{what} took longer than {deadline_s:g} s (rollout_worker.reward_deadline_s)"
    if notes := "; ".join(getattr(error.__cause__, "__notes__", ())):
        message += (
            f"; {notes}; its thread stays busy, rollout_worker.reward_isolation: process can end it"
        )
    return DeadlineError(message)
