"""A class that is a whole reward service: for judges with a model or a connection of their own.

`rollout_worker.reward: path.py:Judge` may name a class with an async `score` (the `RewardService`
protocol) in place of a function. It is constructed once as `Judge(recipe_dir=..., **arguments)` with
`rollout_worker.reward_arguments`, and its calls keep `rollout_worker.reward_deadline_s` here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from nexrl.errors import ConfigError, NexRLError, UserCodeError, user_frame
from nexrl.services.reward.protocol import RewardResult, RewardService
from nexrl.services.reward.result import to_result
from nexrl.services.reward.user_call import user_call
from nexrl.types import Completion


def is_service_class(loaded: Any) -> TypeGuard[type]:
    """Whether a reference names a reward service and not a function."""
    return isinstance(loaded, type) and inspect.iscoroutinefunction(getattr(loaded, "score", None))


def make_service(
    cls: type,
    *,
    reference: str,
    recipe_dir: Path,
    arguments: Mapping[str, Any],
    isolation: str,
    deadline_s: float,
) -> RewardService:
    """An instance behind the deadline; blocking. ConfigError when the arguments do not fit."""
    if isolation == "process":
        raise ConfigError(
            f"rollout_worker.reward_isolation: {reference} is a service with threads of its own, "
            "not a function (accepted for it: thread)"
        )
    given = {"recipe_dir": recipe_dir, **arguments}
    try:
        inspect.signature(cls).bind(**given)
    except TypeError as error:
        accepted = [n for n in inspect.signature(cls).parameters if n != "recipe_dir"]
        raise ConfigError(
            f"rollout_worker.reward_arguments: {reference}: {error} (accepted: "
            f"{', '.join(accepted) or 'none'}; recipe_dir is given by NexRL)"
        ) from error
    try:
        service = cls(**given)
    except NexRLError:
        raise
    except Exception as error:
        raise UserCodeError(
            f"rollout_worker.reward: {reference} raised {type(error).__name__}: {error} at "
            f"{user_frame(error)}"
        ) from error
    if missing := [name for name in ("contract", "aclose") if not hasattr(service, name)]:
        raise ConfigError(
            f"rollout_worker.reward: {reference} has an async `score` and no {missing} (needed: the "
            "text `contract`, who judges in which version, and `async def aclose`)"
        )
    return TimedReward(service, reference=reference, deadline_s=deadline_s)


class TimedReward:
    """RewardService over another one. Invariant: a call answers with a checked result within the
    deadline, or raises; never 0 instead."""

    def __init__(self, service: Any, *, reference: str, deadline_s: float) -> None:
        self._service = service
        self._reference = reference
        self._deadline_s = deadline_s

    @property
    def contract(self) -> str:
        """The service's own."""
        return str(self._service.contract)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """ConfigError when the service says that it needs more than the row has."""
        if (check := getattr(self._service, "check_row", None)) is not None:
            check(row)

    async def score(
        self, completion_text: str, row: Mapping[str, Any], completion: Completion | None = None
    ) -> RewardResult:
        """See `RewardService.score`."""
        what = f"reward service {self._reference}"
        async with user_call(what, self._deadline_s, passing=(NexRLError,)):
            returned = await self._service.score(completion_text, row, completion)
        return to_result(returned, self._reference)

    async def aclose(self) -> None:
        """See `RewardService.aclose`."""
        await self._service.aclose()
