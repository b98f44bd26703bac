"""Means: observations by name, logged as the mean of those since the last flush."""

from __future__ import annotations


class Means:
    """Invariant: a name is there exactly when it was observed since the last flush."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """One observation."""
        sums = self._sums.get(name)
        if sums is None:
            self._sums[name] = [value, 1.0]
        else:
            sums[0] += value
            sums[1] += 1.0

    def flush(self) -> dict[str, float]:
        """Means by name; begins anew."""
        means = {name: total / number for name, (total, number) in self._sums.items()}
        self._sums.clear()
        return means
