"""What the pool writes to the trajectory store, and what a store that cannot write does to the run.

Stands between `TrajectoryPool` and `TrajectoryStore`; with no store it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from nexrl.errors import StoreError
from nexrl.pool.ledger import Outcome
from nexrl.pool.open_group import Member, OpenGroup
from nexrl.pool.trajectory_store import StoredRollout, TrajectoryStore
from nexrl.protocols import Tracker
from nexrl.types import LedgerSnapshot, RolloutRecord


class RecordKeeper:
    """Invariant: after the first StoreError nothing more is written; with `on_error: stop` each
    further call raises it, with `continue` the loss is counted and said once."""

    def __init__(
        self,
        store: TrajectoryStore | None,
        *,
        policy: str,
        on_error: Literal["stop", "continue"],
        tracker: Tracker,
    ) -> None:
        self._store = store
        self._policy = policy
        self._on_error = on_error
        self._tracker = tracker

    @property
    def is_full(self) -> bool:
        """Whether `room` must be awaited before the next `keep`."""
        return self._store is not None and self._store.is_full

    async def room(self) -> None:
        """Return when the writer's queue is below its bound."""
        if self._store is not None:
            try:
                await self._store.room()
            except StoreError as error:
                self._lose(error)

    def keep(self, record: RolloutRecord, group: OpenGroup) -> StoredRollout | None:
        """Hand a record to the writer."""
        if self._store is None:
            return None
        try:
            return self._store.append(
                record,
                draw=group.draw,
                policy=self._policy,
                admitted_version=group.admitted_version,
            )
        except StoreError as error:
            self._lose(error)
            return None

    def annotate(
        self,
        stored: StoredRollout | None,
        before: RolloutRecord,
        after: RolloutRecord,
        *,
        kind: str,
        producer: str,
    ) -> None:
        """Append what an annotator added to the trajectories of a kept record."""
        if self._store is None or stored is None:
            return
        try:
            pairs = zip(before.trajectories, after.trajectories, strict=True)
            for index, (old, new) in enumerate(pairs):
                if new is not old:
                    self._store.append_annotation(
                        stored, index, old, new, kind=kind, producer=producer
                    )
        except StoreError as error:
            self._lose(error)

    def outcome(
        self, members: Iterable[Member], outcome: Outcome, reason: str, *, version: int
    ) -> None:
        """Append what became of rollouts; `version` is the one that consumed or dropped them."""
        if self._store is None:
            return
        rows = [m.store_row for m in members if m.store_row is not None]
        if rows:
            try:
                self._store.append_outcomes(rows, outcome, reason, version=version)
            except StoreError as error:
                self._lose(error)

    def ledger(self, snapshot: LedgerSnapshot, *, version: int) -> None:
        """Append the ledger as it stands after a batch."""
        if self._store is None:
            return
        try:
            self._store.append_ledger(snapshot, policy=self._policy, version=version)
        except StoreError as error:
            self._lose(error)

    def roll_back(self, *, version: int) -> None:
        """A resume at `version` undoes what later versions trained."""
        if self._store is None:
            return
        try:
            self._store.roll_back(policy=self._policy, version=version)
        except StoreError as error:
            self._lose(error)

    async def flush(self) -> None:
        """Return once everything handed over is committed."""
        if self._store is None:
            return
        try:
            await self._store.flush()
        except StoreError as error:
            self._lose(error)

    def _lose(self, error: StoreError) -> None:
        if self._on_error == "stop":
            raise error
        self._store = None
        self._tracker.count("store/write_failures")
        self._tracker.warn(f"trajectories are no longer stored (store.on_error: continue): {error}")
