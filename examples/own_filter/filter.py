"""Drops what the policy can do already: a group whose best quarter is no better than its average.

The pool calls it with each complete rollout group, before a batch closes. What it drops is in no
denominator; the ledger counts it under the reason returned.
"""

import numpy as np


def too_easy(group):
    """A short reason to drop the group, or None to keep it."""
    rewards = np.sort([t.reward for t in group.trajectories if t.reward is not None])
    if not len(rewards):
        return "not_scored"
    best = rewards[-max(1, len(rewards) // 4) :].mean()
    return "too_easy" if best - rewards.mean() < 0.05 else None
