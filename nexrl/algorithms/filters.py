"""Group filters for dynamic sampling: a reason to drop a complete rollout group, or None.

The pool applies them to one group at a time before a batch closes, so that a dropped group is in
no denominator and has no KL gradient either (FR-037, FR-050).
"""

from __future__ import annotations

import numpy as np

from nexrl.algorithms.advantages import group_index, group_statistics
from nexrl.types import RolloutGroup

CONSTANT_REWARD = "constant_reward"


def constant_reward(group: RolloutGroup) -> str | None:
    """`constant_reward` when no baseline group inside has any spread of rewards, else None.

    Compared are trajectories with equal `group_id`; abstaining ones (reward None) do not count.
    A group in which every baseline group has one member carries no signal either.
    """
    scored = [t for t in group.trajectories if t.reward is not None]
    if not scored:
        return CONSTANT_REWARD
    rewards = np.array([t.reward for t in scored], np.float64)
    statistics = group_statistics(rewards, group_index(t.group_id for t in scored))
    return CONSTANT_REWARD if statistics.constant.all() else None
