"""Whether a group whose members have all ended is kept.

Asked by `TrajectoryPool` once for each group, before it is ready: enough members, equal starting
prompts where the worker promises them, then the filters of dynamic sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nexrl.errors import UserCodeError, user_frame
from nexrl.pool.open_group import OpenGroup
from nexrl.protocols import GroupFilter
from nexrl.types import RolloutGroup


class FilterFailedError(UserCodeError):
    """A group filter raised or answered with nonsense; `reason` is the ledger's word for it."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"group filter {name} {what}")
        self.reason = f"filter/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """The settings that decide over complete groups."""

    min_group_size: int | None
    """Members that must have ended well; None: all that were not excused."""
    allow_mixed_prompts: bool
    """Whether members may start from different prompts."""
    filters: Sequence[GroupFilter]
    """Asked in order; the first reason given counts."""

    def reason_to_drop(self, group: OpenGroup) -> str | None:
        """Ledger reason, or None to keep the group; FilterFailedError when a filter raises."""
        if not group.is_complete(None if group.is_pushed else self.min_group_size):
            return "group_incomplete"
        if group.has_mixed_prompts and not self.allow_mixed_prompts:
            return "mixed_prompts"
        if not self.filters:
            return None
        candidate = group.to_rollout_group()
        reasons = (_ask(group_filter, candidate) for group_filter in self.filters)
        return next((reason for reason in reasons if reason is not None), None)


def _ask(group_filter: GroupFilter, group: RolloutGroup) -> str | None:
    name = getattr(group_filter, "__name__", type(group_filter).__name__)
    try:
        reason = group_filter(group)
    except Exception as error:
        raise FilterFailedError(
            name,
            f"raised {type(error).__name__}: {error} for group {group.group_key} at "
            f"{user_frame(error)}",
        ) from error
    if reason is None or isinstance(reason, str):
        return reason
    raise FilterFailedError(
        name,
        f"must return a reason to drop the group, or None to keep it; got {reason!r} for group "
        f"{group.group_key}",
    )
