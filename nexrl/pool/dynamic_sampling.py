"""Refilling a batch whose groups were dropped: within a budget, then by a named action.

Owned by `TrajectoryPool`, which asks at each dropped group whether another may take its place, and
at each hand-out of a short batch what to do with it. With no budget every short batch is acted on.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

from nexrl.algorithms.filters import CONSTANT_REWARD
from nexrl.errors import InvariantError
from nexrl.protocols import Tracker

OnExhausted = Literal["train_short", "skip", "stop"]

MANY_CONSTANT_GROUPS: Final = 0.6
"""Share of groups without signal beyond which most rollouts are wasted."""
ADVICE_AFTER_BATCHES: Final = 10
"""Batches in a row before advice is given, so that one unlucky batch does not."""


class DynamicSampling:
    """Invariant: between two hand-outs at most `budget` dropped groups are replaced."""

    def __init__(
        self, *, batch_size: int, refill_factor: float, on_exhausted: OnExhausted, tracker: Tracker
    ) -> None:
        self._batch_size = batch_size
        self._budget = int(round(refill_factor * batch_size, 6))  # 0.29 x 100 is 29
        self._on_exhausted = on_exhausted
        self._tracker = tracker
        self._used = 0
        self._num_closed = 0
        self._num_constant = 0
        self._streak = 0
        self._counts = Counter({"refills": 0})

    def may_replace(self) -> bool:
        """A group was dropped: whether another one takes its place, paid from the budget."""
        if self._used >= self._budget:
            return False
        self._used += 1
        self._counts["refills"] += 1
        return True

    def group_closed(self, reason: str | None) -> None:
        """A group has ended, kept (None) or dropped for a reason."""
        self._num_closed += 1
        self._num_constant += reason == CONSTANT_REWARD

    def act_on_short(self, num_kept: int, *, batch_id: int) -> OnExhausted:
        """The batch about to be handed out has dropped groups that nothing replaced: the action to
        take, counted and said by its name. InvariantError when it is `stop`."""
        action = self._on_exhausted
        said = (
            f"batch {batch_id} is short: {num_kept} of {self._batch_size} groups are left after "
            f"{self._used} replacements (budget {self._budget}); "
            f"trajectory_pool.dynamic_sampling.on_exhausted is `{action}`"
        )
        if action == "stop":
            raise InvariantError(said)
        self._counts[f"short_batches/{action}"] += 1
        if self._budget or action == "skip":
            self._tracker.warn(said)
        return action

    def handed_out(self) -> int:
        """A batch left: the budget is whole again. Returns what was spent on it."""
        self._advise()
        return self.start_over()

    def start_over(self) -> int:
        """The next batch has the whole budget; returns what this one has spent."""
        used, self._used = self._used, 0
        return used

    def put_back(self, used: int) -> None:
        """A batch came back untrained, and with it what was spent on it."""
        self._used += used

    def counts(self) -> dict[str, float]:
        """pool/refills and pool/short_batches/<action>, since the stage began."""
        return {f"pool/{name}": float(count) for name, count in self._counts.items()}

    def _advise(self) -> None:
        """The filter hides groups without signal from the trainer, so what they cost is said here
        (FR-055)."""
        wasted = self._num_constant > MANY_CONSTANT_GROUPS * self._num_closed
        self._streak = self._streak + 1 if wasted else 0
        self._num_closed = self._num_constant = 0
        if self._streak == ADVICE_AFTER_BATCHES:
            self._streak = 0
            self._tracker.warn(
                f"more than {MANY_CONSTANT_GROUPS:.0%} of the groups of each of the last "
                f"{ADVICE_AFTER_BATCHES} batches had equal rewards and were filtered: raise "
                "data.rollout_repeat_n, or use data that the policy solves sometimes"
            )
