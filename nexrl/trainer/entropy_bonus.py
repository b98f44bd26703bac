"""The entropy coefficient as it moves: fixed, or driven to hold a target entropy."""

from __future__ import annotations

from nexrl.config.schema_algorithm import EntropyConfig

MAX_COEFFICIENT = 0.1
"""Bound of the adaptive coefficient: a bonus ten times as large as any in use outweighs rewards."""


class EntropyBonus:
    """Coefficient of the entropy term.

    Invariant: without a target it is the one configured; with one it stays within
    [0, max(MAX_COEFFICIENT, the one configured)] and moves by `rate` after each batch, up when the
    batch's entropy is below the target and down when it is above (adaptive entropy
    control, Skywork-OR1 2025).
    """

    def __init__(self, config: EntropyConfig) -> None:
        self._config = config
        self._bound = max(MAX_COEFFICIENT, config.coefficient)
        self.coefficient = config.coefficient

    @property
    def adaptive(self) -> bool:
        """Whether it moves."""
        return self._config.target is not None

    def update(self, entropy: float) -> None:
        """Move the coefficient after a batch whose trained tokens had this mean entropy, in nats."""
        target = self._config.target
        if target is None or entropy == target:
            return
        move = self._config.rate if entropy < target else -self._config.rate
        self.coefficient = min(max(self.coefficient + move, 0.0), self._bound)
