"""Advantages from ranks: only the order of rewards within a group counts, not their size.

    A = 2 (rank - (n - 1) / 2) / n, rank 0 the worst of n; equal rewards share their mean rank

A reward function that is right about better and worse, and wrong about how much, is good enough.
"""

import numpy as np


def ranks(inputs, settings):
    """[T] a number for each trajectory; [M], one for each trained token, is accepted too."""
    advantages = np.zeros(len(inputs.rewards))
    for group in np.unique(inputs.groups):
        members = np.flatnonzero(inputs.groups == group)
        rewards = inputs.rewards[members]
        below = (rewards[None, :] < rewards[:, None]).sum(1)
        equal = (rewards[None, :] == rewards[:, None]).sum(1)
        rank = below + (equal - 1) / 2
        advantages[members] = 2 * (rank - (len(members) - 1) / 2) / len(members)
    return advantages
