"""What the pool counts between two calls of `TrajectoryPool.metrics`.

Fed at each rollout's end, hand-out and training; emptied by `flush`. Rewards are averaged over
trajectories: one with three rows counts once (FR-079), and those that were filtered count in
`reward/all_mean` (FR-128). Other averages are over rollouts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from nexrl.pool.ledger import WITH_REASON, WITHOUT_REASON
from nexrl.pool.open_group import Member, OpenGroup
from nexrl.types import Batch, LedgerSnapshot, RolloutRecord

STALENESS: Final = "staleness/mean"


class PoolMetrics:
    """Accumulators; each is emptied by `flush` except shares by source, which are of the stage."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._admitted_by_source: Counter[str] = Counter()
        self._trained_by_source: Counter[str] = Counter()

    def mean(self, name: str, value: float) -> None:
        """One value of a metric logged as the mean since the last flush."""
        self._values[name].append(value)

    def admitted(self, source: str, num_rollouts: int) -> None:
        """Rollouts of a data source were admitted."""
        self._admitted_by_source[source] += num_rollouts

    def rollout_ended(self, record: RolloutRecord) -> None:
        """A rollout passed the door."""
        self._rewards("reward/all_mean", record)

    def handed_out(self, groups: Sequence[OpenGroup], version: int) -> None:
        """A batch left that `version` consumes; staleness is counted over rollouts, in versions."""
        self.mean("pool/effective_batch", len(groups))
        for kept in [group.kept for group in groups]:
            self.mean("pool/group_size", len(kept))
            self._values[STALENESS] += [version - member.oldest_version for member in kept]

    def trained(self, batch: Batch) -> None:
        """A batch was trained."""
        for group in batch.groups:
            self._trained_by_source[group.source] += len(group.records)
            for record in group.records:
                self._rewards("reward/trained_mean", record)
                self._selection(record, "trained")

    def dropped(self, members: Iterable[Member]) -> None:
        """Rollouts that ended well are not trained."""
        for record in [m.record for m in members if m.record is not None]:
            self._selection(record, "dropped")

    def flush(self, ledger: LedgerSnapshot) -> dict[str, float]:
        """All metrics by name; averages start over."""
        metrics = {name: sum(values) / len(values) for name, values in self._values.items()}
        if staleness := self._values.get(STALENESS):
            metrics["staleness/max"] = float(max(staleness))
            metrics["staleness/p95"] = float(np.percentile(staleness, 95))
        self._values.clear()
        for source, admitted in self._admitted_by_source.items():
            share = self._trained_by_source[source] / admitted
            metrics[f"pool/trained_share/{source or 'data'}"] = share
        return {**metrics, **ledger_metrics(ledger)}

    def _rewards(self, name: str, record: RolloutRecord) -> None:
        for trajectory in record.trajectories:
            if trajectory.reward is not None and trajectory.trainable:
                self.mean(name, trajectory.reward)

    def _selection(self, record: RolloutRecord, kind: str) -> None:
        """Length and duration of what is trained and what is not: shows selection bias."""
        length = sum(t.num_response_tokens for t in record.trajectories)
        self.mean(f"pool/response_tokens/{kind}", length)
        self.mean(f"pool/duration_s/{kind}", record.duration_s)


def ledger_metrics(ledger: LedgerSnapshot) -> dict[str, float]:
    """`ledger/<outcome>` and `ledger/<outcome>/<reason>`, in rollouts since the stage began."""
    metrics = {
        f"ledger/{name}": float(getattr(ledger, name)) for name in ("admitted", *WITHOUT_REASON)
    }
    for outcome in WITH_REASON:
        reasons = getattr(ledger, outcome)
        metrics[f"ledger/{outcome}"] = float(sum(reasons.values()))
        for reason, count in reasons.items():
            metrics[f"ledger/{outcome}/{reason}"] = float(count)
    return metrics
