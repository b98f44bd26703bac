"""Calls to the train service that are under way together.

The next call starts before the last returns, so the wire and the trainer's own work hide behind
the service's compute. Calls on one policy take effect in the order they were started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def in_flight(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Start all calls in order, then return their results in that order.

    The first failure is raised as it is; the other calls are cancelled and have ended by then.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
