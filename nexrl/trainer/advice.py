"""Lines for people about what the metrics of a batch mean and is often taken for a fault."""

from __future__ import annotations

from collections.abc import Mapping

from nexrl.protocols import Tracker

MANY_CONSTANT_GROUPS = 0.6
"""Share of groups without signal beyond which most rollouts are wasted (FR-055)."""
ADVICE_AFTER_BATCHES = 10
"""Batches in a row before advice is given, so that one unlucky batch does not."""
MANY_MASKED = 0.5
"""Share of tokens that a correction zeroes beyond which a batch hardly trains (FR-088)."""


class Advice:
    """Says each thing when it has held long enough. Invariant: metrics are not changed."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._constant_streak = 0
        self._zero_loss_explained = False

    def about(self, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of one batch."""
        if (masked := metrics.get("correction/masked_share", 0.0)) > MANY_MASKED:
            self._tracker.warn(
                f"the off-policy correction masks {masked:.0%} of the batch's trained tokens "
                "(correction/masked_share): little is learned from it. Engine and trainer differ "
                "(look at mismatch/*), or the level is `sequence`, whose ratio is a product over "
                "all tokens of a row: use `geometric` or `token`, or wider bounds"
            )
        many_constant = metrics.get("group/constant_share", 0.0) > MANY_CONSTANT_GROUPS
        self._constant_streak = self._constant_streak + 1 if many_constant else 0
        if self._constant_streak >= ADVICE_AFTER_BATCHES:
            self._tracker.warn(
                f"group/constant_share has been above {MANY_CONSTANT_GROUPS:.0%} for "
                f"{self._constant_streak} batches: most groups carry no signal. Raise "
                "data.rollout_repeat_n, choose other data, or filter with "
                "trajectory_pool.dynamic_sampling"
            )
            self._constant_streak = 0
        # FR-056: a loss of 0 beside a gradient is how centred advantages look on policy.
        loss, norm = metrics.get("loss/policy", 1.0), metrics.get("grad_norm", 0.0)
        if abs(loss) < 1e-6 < norm and not self._zero_loss_explained:
            self._zero_loss_explained = True
            self._tracker.warn(
                f"loss/policy is 0 while grad_norm is {norm:.3g}: expected. On policy the ratio is "
                "1 and advantages sum to 0 within a group; only the gradient carries the signal"
            )
