"""StoreReader: what a trajectory store holds, in the order it was written.

For `nexrl store`, for export and for replay with another reward, teacher or algorithm. Reads while
a run writes, and stores of older schemas.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from nexrl.errors import StoreError
from nexrl.pool.store_codec import decode_failure, decode_trajectory
from nexrl.pool.store_schema import TABLES, columns_of, layouts_of, open_for_reading, store_error
from nexrl.types import Annotation, RolloutRecord, Trajectory, TrajectoryStatus
from nexrl.wire import unpack

STORE_NAME: Final = "store.sqlite"
"""File of the store inside a run folder."""
OPEN: Final = "open"
"""Outcome of a rollout that was neither trained nor dropped when the store was last written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """One rollout of the store: its facts, what became of it, and later judgements."""

    record: RolloutRecord
    """Facts as the rollout left them."""
    item_id: str
    """Data item."""
    draw: int
    """Which visit to the item."""
    source: str
    """Data source."""
    policy: str
    """Policy whose pool admitted it."""
    incarnation: int
    """Start of the run that wrote it."""
    admitted_version: int
    """Lowest version active when its group was admitted."""
    outcome: str
    """trained, filtered, failed, stale, cancelled, rolled_back, or open."""
    outcome_reason: str
    """Ledger reason."""
    outcome_version: int | None
    """Version that consumed or dropped it."""
    annotations: tuple[Annotation, ...]
    """In the order they were made."""


class StoreReader:
    """Iterates over a store; a context manager. Damage is named as StoreError when it is met."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._connection = open_for_reading(self.path)
        try:
            self._layouts = layouts_of(self._connection)
            self._rollout_columns = self._columns("rollouts", "r")
            self._trajectory_columns = self._columns("trajectories", "t")
        except sqlite3.Error as error:
            self._connection.close()
            raise store_error(self.path, error) from error

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def read(
        self,
        *,
        status: str | None = None,
        outcome: str | None = None,
        version: int | None = None,
        item_id: str | None = None,
        policy: str | None = None,
        trajectory_id: str | None = None,
    ) -> Iterator[StoredRecord]:
        """Rollouts that match all given filters, oldest first; `version` is the consuming one.

        `trajectory_id` also accepts a rollout id.
        """
        filters = {
            "r.status = ?": status,
            f"coalesce(o.outcome, '{OPEN}') = ?": outcome,
            "o.version = ?": version,
            "r.item_id = ?": item_id,
            "r.policy = ?": policy,
        }
        clauses = [clause for clause, value in filters.items() if value is not None]
        values = [value for value in filters.values() if value is not None]
        if trajectory_id is not None:
            clauses.append(
                "(r.rollout_id = ? OR r.row IN "
                "(SELECT rollout FROM trajectories WHERE trajectory_id = ?))"
            )
            values += [trajectory_id, trajectory_id]
        where = " AND ".join(clauses) or "1"
        try:
            yield from self._read(where, values)
        except sqlite3.Error as error:
            raise store_error(self.path, error) from error

    def newest(self, limit: int) -> list[StoredRecord]:
        """The last rollouts written, oldest of them first."""
        where = "r.row > (SELECT coalesce(max(row), 0) FROM rollouts) - ?"
        try:
            return list(self._read(where, [limit]))
        except sqlite3.Error as error:
            raise store_error(self.path, error) from error

    def counts(self) -> dict[str, int]:
        """Rollouts by `status`, by `outcome` and by `outcome/reason`."""
        return dict(self._query(_COUNTS))

    def reward_statistics(self) -> dict[str, float]:
        """Count, mean, minimum and maximum of the rewards that rollouts left; empty without any."""
        query = "SELECT count(reward), avg(reward), min(reward), max(reward) FROM trajectories"
        count, *values = self._query(query)[0]
        if not count:
            return {}
        return dict(zip(("count", "mean", "min", "max"), (float(count), *values), strict=True))

    def ledger_lines(self, *, policy: str | None = None) -> list[dict[str, Any]]:
        """The ledger after each batch, as it was printed."""
        query = "SELECT policy, incarnation, version, counts FROM ledger ORDER BY row"
        names = ("policy", "incarnation", "version")
        lines = [
            {**dict(zip(names, values, strict=True)), **json.loads(counts)}
            for *values, counts in self._query(query)
        ]
        return [line for line in lines if policy in (None, line["policy"])]

    def _read(self, where: str, values: list[Any]) -> Iterator[StoredRecord]:
        source = f"FROM rollouts r LEFT JOIN ({_LATEST}) o ON o.rollout = r.row"
        rollouts = self._connection.execute(
            f"SELECT {self._rollout_columns}, coalesce(o.outcome, '{OPEN}'), coalesce(o.reason, ''), o.version "
            f"{source} WHERE {where} ORDER BY r.row",
            values,
        )
        names = list(TABLES["rollouts"])
        for found in rollouts:
            *own, outcome, reason, version = found
            fields = dict(zip(names, own, strict=True))
            trajectories = self._trajectories(fields)
            yield StoredRecord(
                record=self._record(fields, trajectories),
                item_id=fields["item_id"],
                draw=fields["draw"],
                source=fields["source"],
                policy=fields["policy"],
                incarnation=fields["incarnation"],
                admitted_version=fields["admitted_version"],
                outcome=outcome,
                outcome_reason=reason,
                outcome_version=version,
                annotations=tuple(self._annotations(fields, trajectories)),
            )

    def _record(
        self, fields: dict[str, Any], trajectories: tuple[Trajectory, ...]
    ) -> RolloutRecord:
        failure = fields["failure"]
        return RolloutRecord(
            rollout_id=fields["rollout_id"],
            group_key=fields["group_key"],
            member=fields["member"],
            status=TrajectoryStatus(fields["status"]),
            reason=fields["reason"],
            trajectories=trajectories,
            failure=decode_failure(failure, self._layouts[fields["layout"]]) if failure else None,
            attempts=fields["attempts"],
            duration_s=fields["duration_s"],
        )

    def _trajectories(self, fields: dict[str, Any]) -> tuple[Trajectory, ...]:
        first = fields["first_trajectory"]
        found = self._connection.execute(
            f"SELECT {self._trajectory_columns} FROM trajectories t WHERE t.row >= ? AND t.row < ? ORDER BY t.row",  # noqa: S608
            (first, first + fields["num_trajectories"]),
        )
        names = list(TABLES["trajectories"])
        rows = (dict(zip(names, values, strict=True)) for values in found)
        return tuple(decode_trajectory(r["facts"], self._layouts[r["layout"]]) for r in rows)

    def _annotations(
        self, fields: dict[str, Any], trajectories: tuple[Trajectory, ...]
    ) -> Iterator[Annotation]:
        first = fields["first_trajectory"]
        for trajectory, kind, producer, version, value in self._connection.execute(
            "SELECT trajectory, kind, producer, version, value FROM annotations "
            "WHERE trajectory >= ? AND trajectory < ? ORDER BY row",
            (first, first + len(trajectories)),
        ):
            yield Annotation(
                trajectory_id=trajectories[trajectory - first].trajectory_id,
                kind=kind,
                producer=producer,
                version=version,
                value=unpack(value),
            )

    def _columns(self, table: str, alias: str) -> str:
        """Every column of this version; one that an older file lacks reads as its default."""
        present = columns_of(self._connection, table)
        return ", ".join(
            f"{alias}.{name}" if name in present else _default(kind)
            for name, kind in TABLES[table].items()
        )

    def _query(self, query: str) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query).fetchall()
        except sqlite3.Error as error:
            raise store_error(self.path, error) from error


_LATEST: Final = "SELECT rollout, outcome, reason, version, max(row) FROM outcomes GROUP BY rollout"
_COUNTS: Final = """
SELECT 'status/' || status, count(*) FROM rollouts GROUP BY 1
UNION ALL
SELECT 'outcome/' || coalesce(o.outcome, 'open')
    || CASE coalesce(o.reason, '') WHEN '' THEN '' ELSE '/' || o.reason END, count(*)
FROM rollouts r LEFT JOIN
    (SELECT rollout, outcome, reason, max(row) FROM outcomes GROUP BY rollout) o
    ON o.rollout = r.row
GROUP BY 1 ORDER BY 1
"""


def _default(declaration: str) -> str:
    _, separator, default = declaration.partition("DEFAULT ")
    return default if separator else "NULL"


def annotated(stored: StoredRecord) -> tuple[Trajectory, ...]:
    """The trajectories with the newest reward annotation of each in place of the reward that the
    rollout left: what the trainer saw."""
    rewards = {
        a.trajectory_id: a.value
        for a in stored.annotations
        if isinstance(a.value, dict) and "reward" in a.value
    }
    return tuple(
        replace(
            t,
            reward=rewards[t.trajectory_id]["reward"],
            reward_parts=rewards[t.trajectory_id]["reward_parts"],
        )
        if t.trajectory_id in rewards
        else t
        for t in stored.record.trajectories
    )


def find_store(run_or_store: str | Path) -> Path:
    """The store file of a run folder, or the file itself."""
    path = Path(run_or_store)
    if path.is_dir():
        path = path / STORE_NAME
    if not path.is_file():
        raise StoreError(f"there is no trajectory store at {path}")
    return path
