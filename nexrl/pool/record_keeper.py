"""What the pool writes to the trajectory store, and what a store that cannot write does to the run.

Stands between `TrajectoryPool` and `TrajectoryStore`; with no store it does nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, TypeVar

from nexrl.errors import StoreError
from nexrl.pool.ledger import Outcome
from nexrl.pool.open_group import Member, OpenGroup
from nexrl.pool.trajectory_store import StoredRollout, TrajectoryStore
from nexrl.protocols import Annotator, Tracker
from nexrl.types import LedgerSnapshot, RolloutRecord

T = TypeVar("T")


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
        await self._wait(lambda store: store.room())

    async def flush(self) -> None:
        """Return once everything handed over is committed."""
        await self._wait(lambda store: store.flush())

    def keep(self, record: RolloutRecord, group: OpenGroup) -> StoredRollout | None:
        """Hand a record to the writer."""
        return self._write(
            lambda store: store.append(
                record,
                draw=group.draw,
                policy=self._policy,
                admitted_version=group.admitted_version,
            )
        )

    def annotate(
        self,
        stored: StoredRollout | None,
        before: RolloutRecord,
        after: RolloutRecord,
        annotator: Annotator,
    ) -> None:
        """Append what an annotator added to the trajectories of a kept record."""
        if stored is None:
            return
        kind, producer = annotator.provides, type(annotator).__qualname__

        def append(store: TrajectoryStore) -> None:
            pairs = zip(before.trajectories, after.trajectories, strict=True)
            for index, (old, new) in enumerate(pairs):
                if new is not old:
                    store.append_annotation(stored, index, old, new, kind=kind, producer=producer)

        self._write(append)

    def outcome(
        self, members: Iterable[Member], outcome: Outcome, reason: str, *, version: int
    ) -> None:
        """Append what became of rollouts; `version` is the one that consumed or dropped them."""
        rows = [m.store_row for m in members if m.store_row is not None]
        if rows:  # none without a store
            self._write(lambda store: store.append_outcomes(rows, outcome, reason, version=version))

    def ledger(self, snapshot: LedgerSnapshot, *, version: int) -> None:
        """Append the ledger as it stands after a batch."""
        self._write(
            lambda store: store.append_ledger(snapshot, policy=self._policy, version=version)
        )

    def roll_back(self, *, version: int) -> None:
        """A resume at `version` undoes what later versions trained."""
        self._write(lambda store: store.roll_back(policy=self._policy, version=version))

    def _write(self, write: Callable[[TrajectoryStore], T]) -> T | None:
        if self._store is None:
            return None
        try:
            return write(self._store)
        except StoreError as error:
            self._lose(error)
            return None

    async def _wait(self, wait: Callable[[TrajectoryStore], Awaitable[None]]) -> None:
        if self._store is None:
            return
        try:
            await wait(self._store)
        except StoreError as error:
            self._lose(error)

    def _lose(self, error: StoreError) -> None:
        if self._on_error == "stop":
            raise error
        self._store = None
        self._tracker.count("store/write_failures")
        self._tracker.warn(f"trajectories are no longer stored (store.on_error: continue): {error}")
