"""Group filters for dynamic sampling: a reason to drop a complete rollout group, or None.

The pool applies them to one group at a time before a batch closes, so that a dropped group is in
no denominator and has no KL gradient either (FR-037, FR-050).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np

from nexrl.algorithms.groups import group_index, group_statistics
from nexrl.types import RolloutGroup, TrajectoryStatus

CONSTANT_REWARD: Final = "constant_reward"
ALL_TRUNCATED: Final = "all_truncated"


def constant_reward(group: RolloutGroup) -> str | None:
    """`constant_reward` when no baseline group inside has any spread of rewards, else None.

    Dynamic sampling of DAPO (Yu et al. 2025, constraint 0 < |correct| < G of eq. 11), for rewards of
    any kind. It looks at rewards as they were given, before any shaping: answers that are all wrong
    but of different lengths are dropped, as by the paper. Compared are trajectories with equal `group_id`; abstaining ones (reward None) do not count.
    A group in which every baseline group has one member carries no signal either.
    """
    scored = [t for t in group.trajectories if t.reward is not None]
    if not scored:
        return CONSTANT_REWARD
    rewards = np.array([t.reward for t in scored], np.float64)
    statistics = group_statistics(rewards, group_index(t.group_id for t in scored))
    return CONSTANT_REWARD if statistics.constant.all() else None


def all_truncated(group: RolloutGroup) -> str | None:
    """`all_truncated` when every trajectory was cut by a limit, else None.

    With `shaping.mask_truncated` such a group takes a place in the batch and trains nothing.
    """
    trajectories = group.trajectories
    cut = all(t.status is TrajectoryStatus.TRUNCATED for t in trajectories)
    return ALL_TRUNCATED if cut else None


GROUP_FILTERS: Final = MappingProxyType(
    {CONSTANT_REWARD: constant_reward, ALL_TRUNCATED: all_truncated}
)
"""Names for `trajectory_pool.dynamic_sampling.filters`."""
