"""TrajectoryStore: the durable record of every trajectory, also failed and filtered ones.

Written by `TrajectoryPool` while a run goes on. One thread owns the SQLite connection and commits
in groups: what collects on the event loop while a commit is under way goes into the next one.
Reading is in `store_reader.py`.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sqlite3
import threading
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

from nexrl.errors import DeadlineError, StoreError
from nexrl.pool.store_codec import encode
from nexrl.pool.store_schema import TABLES, open_for_writing, store_error
from nexrl.types import Annotation, Draw, LedgerSnapshot, RolloutRecord, Trajectory
from nexrl.wire import pack

WRITE_DEADLINE_S: Final = 120.0
"""Seconds that a caller waits for a commit before the disk counts as hung."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A record on its way to disk; awaiting it returns once it is committed."""

    rollout: int
    """Row number in `rollouts`."""
    first_trajectory: int
    """Row number in `trajectories` of its first trajectory; the others follow."""
    _commit: asyncio.Future[None]

    def __await__(self) -> Generator[Any, None, None]:
        # Shielded: the commit is shared with other records, and one waiter's cancellation is not
        # theirs.
        return asyncio.shield(self._commit).__await__()


class _Pending:
    """What the next commit will contain."""

    def __init__(self, commit: asyncio.Future[None]) -> None:
        self.commit = commit
        self.rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in TABLES}
        """Values by table, in the order of its columns."""
        self.trajectories: list[tuple[int, int, Trajectory]] = []
        """Their rows, the rows of their rollouts, and what the writer's thread encodes."""
        self.statements: list[tuple[str, tuple[Any, ...]]] = []
        """Run after all rows are in."""

    @property
    def num_records(self) -> int:
        """Rollouts among the rows."""
        return len(self.rows["rollouts"])


class TrajectoryStore:
    """Invariants: a record is acknowledged only after the commit that contains it, and what was
    acknowledged survives SIGKILL at any instant; facts are written once; the queue in front of the
    writer is bounded by `room`. After an error nothing more is written and every call raises it.

    A store may be shared by the pools of several policies.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        run_id: str = "",
        incarnation: int = 0,
        commit_every_s: float = 0.05,
        commit_max_records: int = 2048,
        max_queued_records: int = 16_384,
        write_deadline_s: float = WRITE_DEADLINE_S,
    ) -> None:
        self.path = Path(path)
        self._incarnation = incarnation
        self._commit_every_s = commit_every_s
        self._commit_max_records = commit_max_records
        self._max_queued_records = max_queued_records
        self._write_deadline_s = write_deadline_s
        store = open_for_writing(self.path, run_id)
        self._connection, self._layout = store.connection, store.layout
        self._next_rollout, self._next_trajectory = store.next_rollout, store.next_trajectory
        self._error: StoreError | None = None
        self._pending: _Pending | None = None
        self._writing: _Pending | None = None
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._jobs: queue.SimpleQueue[tuple[_Pending, asyncio.AbstractEventLoop] | None]
        self._jobs = queue.SimpleQueue()
        # A daemon, so that a process that dies without `aclose` can end: whatever it was writing is
        # then either committed or absent.
        self._thread = threading.Thread(target=self._write_loop, name="store-writer", daemon=True)
        self._thread.start()

    def append(
        self,
        record: RolloutRecord,
        *,
        draw: Draw | None = None,
        policy: str,
        admitted_version: int = 0,
    ) -> StoredRollout:
        """Queue a record; await the result for the acknowledgement. Call `room` when `is_full`."""
        pending = self._open_pending()
        row, first = self._next_rollout, self._next_trajectory
        self._next_rollout += 1
        self._next_trajectory += len(record.trajectories)
        pending.rows["rollouts"].append(
            (
                row,
                record.rollout_id,
                record.group_key,
                *((draw.item_id, draw.draw, draw.order, draw.source) if draw else ("", 0, 0, "")),
                record.member,
                policy,
                self._incarnation,
                admitted_version,
                record.status.value,
                record.reason,
                encode(record.failure) if record.failure else None,
                self._layout,
                first,
                len(record.trajectories),
                record.attempts,
                record.duration_s,
            )
        )
        for index, trajectory in enumerate(record.trajectories):
            pending.trajectories.append((first + index, row, trajectory))
        if pending.num_records >= self._commit_max_records:
            self._commit_soon()
        return StoredRollout(row, first, pending.commit)

    def append_outcomes(
        self, rollouts: Iterable[int], outcome: str, reason: str, *, version: int
    ) -> None:
        """Queue what became of rollouts (row numbers)."""
        rows = self._open_pending().rows["outcomes"]
        rows += [(None, row, outcome, reason, version) for row in rollouts]

    def append_annotation(
        self,
        stored: StoredRollout,
        index: int,
        before: Trajectory,
        after: Trajectory,
        *,
        kind: str,
        producer: str,
    ) -> None:
        """Queue what an annotator added to trajectory `index` of a stored record."""
        version = after.provenance.reward_contract if kind == "reward" else ""
        row = stored.first_trajectory + index
        value = pack(_annotation_value(before, after))
        self._open_pending().rows["annotations"].append((None, row, kind, producer, version, value))

    def append_ledger(self, snapshot: LedgerSnapshot, *, policy: str, version: int) -> None:
        """Queue a ledger line."""
        counts = json.dumps(asdict(snapshot))
        line = (None, policy, self._incarnation, version, counts)
        self._open_pending().rows["ledger"].append(line)

    async def annotate(self, annotations: Sequence[Annotation]) -> None:
        """Append judgements about stored trajectories, found by id (the newest of that id).

        Returns when they are committed. The same key again is refused: annotations are facts about
        a judgement, too. StoreError names an unknown trajectory or a repeated key.
        """
        await self.flush()
        for annotation in annotations:
            self._open_pending().statements.append(
                (
                    "INSERT INTO annotations (trajectory, kind, producer, version, value) VALUES "
                    "((SELECT max(row) FROM trajectories WHERE trajectory_id = ?), ?, ?, ?, ?)",
                    (
                        annotation.trajectory_id,
                        annotation.kind,
                        annotation.producer,
                        annotation.version,
                        pack(annotation.value),
                    ),
                )
            )
        await self.flush()

    def roll_back(self, *, policy: str, version: int) -> None:
        """Queue `rolled_back` outcomes for rollouts that versions from `version` on consumed: a
        resume redoes them."""
        self._open_pending().statements.append(
            (
                "INSERT INTO outcomes (rollout, outcome, reason, version) "
                "SELECT o.rollout, 'rolled_back', 'resume at version ' || ?, o.version "
                "FROM outcomes o JOIN rollouts r ON r.row = o.rollout "
                "WHERE r.policy = ? AND r.incarnation < ? AND o.outcome = 'trained' "
                "AND o.version >= ? AND o.row = "
                "(SELECT max(row) FROM outcomes WHERE rollout = o.rollout)",
                (version, policy, self._incarnation, version),
            )
        )

    @property
    def is_full(self) -> bool:
        """Whether callers of `append` shall wait for `room` first."""
        pending, writing = self._pending, self._writing
        queued = pending.num_records if pending else 0
        return queued + (writing.num_records if writing else 0) >= self._max_queued_records

    async def room(self) -> None:
        """Return when the queue is below its bound."""
        while self.is_full:
            self._commit_soon()
            assert self._writing is not None
            await self._committed(self._writing)

    async def flush(self) -> None:
        """Return when everything queued so far is committed; raises what prevents it."""
        self._raise_error()
        last = self._pending or self._writing
        if last is not None:
            self._commit_soon()
            await self._committed(last)

    async def aclose(self) -> None:
        """Commit what is queued, end the thread, close the file. A second call does nothing."""
        if self._is_closed:
            return
        try:
            if self._error is None:
                await self.flush()
        finally:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join, self._write_deadline_s)

    def _open_pending(self) -> _Pending:
        self._raise_error()
        if self._is_closed:
            raise StoreError(f"trajectory store {self.path} is closed")
        if self._pending is None:
            loop = asyncio.get_running_loop()
            self._pending = _Pending(loop.create_future())
            self._timer = loop.call_later(self._commit_every_s, self._commit_soon)
        return self._pending

    def _commit_soon(self) -> None:
        """Hand what is pending to the writer, now or as soon as it has finished the last commit."""
        if self._pending is None:
            return
        if self._writing is not None:
            self._is_due = True
            return
        self._is_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._writing, self._pending = self._pending, None
        self._jobs.put((self._writing, asyncio.get_running_loop()))

    def _on_written(self, pending: _Pending, error: StoreError | None) -> None:
        """Called on the loop when the writer has finished a commit."""
        self._writing = None
        if error is None:
            if not pending.commit.done():
                pending.commit.set_result(None)
        else:
            self._error = error
            for failed in (pending, self._pending):
                if failed is not None and not failed.commit.done():
                    failed.commit.set_exception(error)
                    failed.commit.exception()  # every later call raises it; none may be waiting
            self._pending = None
        if self._is_due:
            self._commit_soon()

    async def _committed(self, pending: _Pending) -> None:
        try:
            async with asyncio.timeout(self._write_deadline_s):
                await asyncio.shield(pending.commit)
        except TimeoutError:
            raise DeadlineError(
                f"trajectory store {self.path} has not committed for {self._write_deadline_s} s"
            ) from None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_loop(self) -> None:
        """Consumes pending commits; produces acknowledgements; woken by the queue; ends on None."""
        while (job := self._jobs.get()) is not None:
            pending, loop = job
            error: StoreError | None = None
            try:
                self._write(pending)
            except sqlite3.Error as cause:
                error = store_error(self.path, cause)
            except Exception as cause:  # noqa: BLE001 - the run must hear of it, not the thread
                error = StoreError(f"trajectory store {self.path}: {type(cause).__name__}: {cause}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._on_written, pending, error)
        self._connection.close()

    def _write(self, pending: _Pending) -> None:
        pending.rows["trajectories"] = [
            self._trajectory_values(*entry) for entry in pending.trajectories
        ]
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            for table, rows in pending.rows.items():
                self._insert(table, rows)
            for statement, values in pending.statements:
                execute(statement, values)
            execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise

    def _insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Many rows in one statement, because SQLite lets go of the interpreter lock for each
        statement and the event loop then keeps it for milliseconds."""
        first, size = 0, _MOST_ROWS
        while first < len(rows):
            while size > len(rows) - first:
                size //= 2
            values = list(chain.from_iterable(rows[first : first + size]))
            self._connection.execute(_insert_statement(table, size), values)
            first += size

    def _trajectory_values(self, row: int, rollout: int, trajectory: Trajectory) -> tuple[Any, ...]:
        num_tokens = sum(len(r.token_ids) for r in trajectory.rows)
        return (
            row,
            rollout,
            trajectory.trajectory_id,
            trajectory.reward,
            num_tokens,
            self._layout,
            encode(trajectory),
        )


_MOST_ROWS: Final = 32
"""In one statement; keeps the widest table below 999 values, which every SQLite accepts."""


@cache
def _insert_statement(table: str, num_rows: int) -> str:
    columns = TABLES[table]
    places = f"({', '.join('?' * len(columns))})"
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([places] * num_rows)}"  # noqa: S608


def _annotation_value(before: Trajectory, after: Trajectory) -> dict[str, Any]:
    """What changed between two records of one trajectory: reward and parts, new columns by row."""
    value: dict[str, Any] = {}
    if after.reward != before.reward or after.reward_parts != before.reward_parts:
        value["reward"] = after.reward
        value["reward_parts"] = dict(after.reward_parts)
    columns = [
        {name: c for name, c in new.columns.items() if name not in old.columns}
        for old, new in zip(before.rows, after.rows, strict=True)
    ]
    if any(columns):
        value["columns"] = columns
    return value
