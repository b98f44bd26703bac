"""StoreReader: what a trajectory store holds, in the order it was written.

For `nexrl store`, for export and for replay with another reward, teacher or algorithm. Reads while
a run writes, and stores of older schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from nexrl.errors import StoreError
from nexrl.pool.store_codec import decode_failure, decode_trajectory
from nexrl.pool.store_schema import (
    TABLES,
    columns_of,
    layouts_of,
    naming_errors,
    open_for_reading,
)
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
            with naming_errors(self.path):
                self._layouts = layouts_of(self._connection)
                self._rollout_columns = self._columns("rollouts", "r")
                self._trajectory_columns = self._columns("trajectories", "t")
        except StoreError:
            self._connection.close()
            raise

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *exception: object) -> None:
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
            f"r.row IN (SELECT row FROM ({_IDS}) WHERE id = ?)": trajectory_id,  # noqa: S608
        }
        given = {clause: value for clause, value in filters.items() if value is not None}
        return self._read(" AND ".join(given) or "1", list(given.values()))

    def newest(self, limit: int) -> list[StoredRecord]:
        """The last rollouts written, oldest of them first."""
        where = "r.row > (SELECT coalesce(max(row), 0) FROM rollouts) - ?"
        return list(self._read(where, [limit]))

    def counts(self) -> dict[str, int]:
        """Rollouts by `status`, by `outcome` and by `outcome/reason`."""
        return dict(self._query(_COUNTS))

    def reward_statistics(self) -> dict[str, float]:
        """Count, mean, minimum and maximum of the rewards that rollouts left; empty without any."""
        query = "SELECT count(reward), avg(reward), min(reward), max(reward) FROM trajectories"
        ((count, *values),) = self._query(query)
        if not count:
            return {}
        return dict(zip(("count", "mean", "min", "max"), (float(count), *values), strict=True))

    def ledger_lines(self, *, policy: str | None = None) -> list[dict[str, Any]]:
        """The ledger after each batch, as it was printed."""
        query = "SELECT policy, incarnation, version, counts FROM ledger ORDER BY row"
        return [
            {"policy": name, "incarnation": incarnation, "version": version, **json.loads(counts)}
            for name, incarnation, version, counts in self._query(query)
            if policy in (None, name)
        ]

    def _read(self, where: str, values: list[Any]) -> Iterator[StoredRecord]:
        rollouts = self._query(
            f"SELECT o.outcome, o.reason, o.version, {self._rollout_columns} FROM rollouts r "  # noqa: S608
            f"LEFT JOIN ({_LATEST}) o ON o.rollout = r.row WHERE {where} ORDER BY r.row",
            values,
        )
        for outcome, reason, version, *own in rollouts:
            fields = dict(zip(TABLES["rollouts"], own, strict=True))
            trajectories = self._trajectories(fields)
            yield StoredRecord(
                record=self._record(fields, trajectories),
                outcome=outcome or OPEN,
                outcome_reason=reason or "",
                outcome_version=version,
                annotations=tuple(self._annotations(fields, trajectories)),
                **{name: fields[name] for name in _OF_THE_DRAW},
            )

    def _record(
        self, fields: dict[str, Any], trajectories: tuple[Trajectory, ...]
    ) -> RolloutRecord:
        failure = fields["failure"]
        return RolloutRecord(
            status=TrajectoryStatus(fields["status"]),
            trajectories=trajectories,
            failure=decode_failure(failure, self._layouts[fields["layout"]]) if failure else None,
            **{name: fields[name] for name in _OF_THE_RECORD},
        )

    def _trajectories(self, fields: dict[str, Any]) -> tuple[Trajectory, ...]:
        first = fields["first_trajectory"]
        found = self._query(
            f"SELECT {self._trajectory_columns} FROM trajectories t "  # noqa: S608
            "WHERE t.row >= ? AND t.row < ? ORDER BY t.row",
            (first, first + fields["num_trajectories"]),
        )
        rows = (dict(zip(TABLES["trajectories"], values, strict=True)) for values in found)
        return tuple(decode_trajectory(r["facts"], self._layouts[r["layout"]]) for r in rows)

    def _annotations(
        self, fields: dict[str, Any], trajectories: tuple[Trajectory, ...]
    ) -> Iterator[Annotation]:
        first = fields["first_trajectory"]
        for trajectory, kind, producer, version, value in self._query(
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
            f"{alias}.{name}" if name in present else kind.partition("DEFAULT ")[2] or "NULL"
            for name, kind in TABLES[table].items()
        )

    def _query(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Rows as they are read, so that a store larger than memory can be exported."""
        with naming_errors(self.path):
            cursor = self._connection.execute(query, values)
            # Not from the cursor itself: a reader left halfway would close it after its connection.
            yield from iter(cursor.fetchone, None)


_OF_THE_DRAW: Final = ("item_id", "draw", "source", "policy", "incarnation", "admitted_version")
_OF_THE_RECORD: Final = ("rollout_id", "group_key", "member", "reason", "attempts", "duration_s")
"""Fields that are columns of the same name."""
_IDS: Final = (
    "SELECT row, rollout_id AS id FROM rollouts "
    "UNION ALL SELECT rollout, trajectory_id FROM trajectories"
)
_LATEST: Final = "SELECT rollout, outcome, reason, version, max(row) FROM outcomes GROUP BY rollout"
_COUNTS: Final = f"""
SELECT 'status/' || status, count(*) FROM rollouts GROUP BY 1
UNION ALL
SELECT 'outcome/' || coalesce(o.outcome, '{OPEN}')
    || CASE coalesce(o.reason, '') WHEN '' THEN '' ELSE '/' || o.reason END, count(*)
FROM rollouts r LEFT JOIN ({_LATEST}) o ON o.rollout = r.row
GROUP BY 1 ORDER BY 1
"""  # noqa: S608


def annotated(stored: StoredRecord) -> tuple[Trajectory, ...]:
    """The trajectories with the newest reward annotation of each in place of the reward that the
    rollout left: what the trainer saw."""
    rewards = {
        a.trajectory_id: {name: a.value[name] for name in ("reward", "reward_parts")}
        for a in stored.annotations
        if isinstance(a.value, dict) and "reward" in a.value
    }
    return tuple(replace(t, **rewards.get(t.trajectory_id, {})) for t in stored.record.trajectories)


def find_store(run_or_store: str | Path) -> Path:
    """The store file of a run folder, or the file itself."""
    path = Path(run_or_store)
    if path.is_dir():
        path = path / STORE_NAME
    if not path.is_file():
        raise StoreError(f"there is no trajectory store at {path}")
    return path
