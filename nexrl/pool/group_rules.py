"""Whether a group whose members have all ended is kept.

Asked by `TrajectoryPool` once for each group, before it is ready: enough members, equal starting
prompts where the worker promises them, then the filters of dynamic sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

from nexrl.errors import UserCodeError, user_frame
from nexrl.pool.open_group import GROUP_INCOMPLETE, OpenGroup
from nexrl.protocols import GroupFilter
from nexrl.types import RolloutGroup

MIXED_PROMPTS = "mixed_prompts"


class FilterFailedError(UserCodeError):
    """A group filter raised; `reason` is the ledger's word for it."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class GroupRules:
    """The settings that decide over complete groups."""

    def __init__(
        self,
        *,
        min_group_size: int | None,
        allow_mixed_prompts: bool,
        filters: Sequence[GroupFilter],
    ) -> None:
        self._min_group_size = min_group_size
        self._allow_mixed_prompts = allow_mixed_prompts
        self._filters = tuple(filters)

    def reason_to_drop(self, group: OpenGroup) -> str | None:
        """Ledger reason, or None to keep the group; FilterFailedError when a filter raises."""
        if not group.is_complete(None if group.is_pushed else self._min_group_size):
            return GROUP_INCOMPLETE
        if group.has_mixed_prompts and not self._allow_mixed_prompts:
            return MIXED_PROMPTS
        if not self._filters:
            return None
        candidate = group.to_rollout_group()
        reasons = (_ask(group_filter, candidate) for group_filter in self._filters)
        return next((reason for reason in reasons if reason is not None), None)


def _ask(group_filter: GroupFilter, group: RolloutGroup) -> str | None:
    name = getattr(group_filter, "__name__", type(group_filter).__name__)
    try:
        reason = group_filter(group)
    except Exception as error:
        raise FilterFailedError(
            f"group filter {name} raised {type(error).__name__}: {error} "
            f"for group {group.group_key} at {user_frame(error)}",
            f"filter/{name}",
        ) from error
    if reason is not None and not isinstance(reason, str):
        raise FilterFailedError(
            f"group filter {name} must return a reason to drop the group, or None to keep it; got "
            f"{reason!r} for group {group.group_key}",
            f"filter/{name}",
        )
    return reason
