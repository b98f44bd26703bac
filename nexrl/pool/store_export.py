"""A trajectory store as JSONL or Parquet, one line per trajectory.

A rollout that left no trajectory is one line, too, so that failures are in the export. Columns are
the same in both formats; see docs/store.md.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from nexrl.errors import ConfigError
from nexrl.pool.store_reader import StoredRecord, StoreReader, annotated
from nexrl.types import TokenRow, Trajectory

PARQUET_BATCH: Final = 1024
"""Lines in one Parquet row group."""


def export_jsonl(reader: StoreReader, output: Path, *, status: str | None = None) -> int:
    """Write one JSON object per line; returns the number of lines."""
    count = 0
    with output.open("w", encoding="utf-8") as file:
        for line in export_lines(reader, status=status):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    return count


def export_parquet(reader: StoreReader, output: Path, *, status: str | None = None) -> int:
    """Write a Parquet file; returns the number of lines. ConfigError without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "--format parquet needs pyarrow: pip install 'nexrl[parquet]' (or use --format jsonl)"
        ) from error
    schema = _parquet_schema(pyarrow)
    lines = export_lines(reader, status=status)
    count = 0
    with pyarrow.parquet.ParquetWriter(output, schema) as writer:
        while group := [_for_parquet(line) for line in islice(lines, PARQUET_BATCH)]:
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
            count += len(group)
    return count


def export_lines(reader: StoreReader, *, status: str | None = None) -> Iterator[dict[str, Any]]:
    """The lines of both formats, as plain values."""
    for stored in reader.read(status=status):
        rollout = {name: value_of(stored) for name, value_of in _ROLLOUT_COLUMNS.items()}
        trajectories = annotated(stored)
        if not trajectories:
            yield rollout | dict.fromkeys(_TRAJECTORY_COLUMNS)
        for trajectory in trajectories:
            yield rollout | _trajectory_line(trajectory)


def _failure(stored: StoredRecord) -> str | None:
    failure = stored.record.failure
    return f"{failure.failure_class.value}: {failure.message}" if failure else None


_ROLLOUT_COLUMNS: Final[Mapping[str, Callable[[StoredRecord], Any]]] = {
    "rollout_id": attrgetter("record.rollout_id"),
    "group_key": attrgetter("record.group_key"),
    "item_id": attrgetter("item_id"),
    "draw": attrgetter("draw"),
    "source": attrgetter("source"),
    "member": attrgetter("record.member"),
    "policy": attrgetter("policy"),
    "incarnation": attrgetter("incarnation"),
    "admitted_version": attrgetter("admitted_version"),
    "status": attrgetter("record.status.value"),
    "reason": attrgetter("record.reason"),
    "failure": _failure,
    "attempts": attrgetter("record.attempts"),
    "duration_s": attrgetter("record.duration_s"),
    "outcome": attrgetter("outcome"),
    "outcome_reason": attrgetter("outcome_reason"),
    "outcome_version": attrgetter("outcome_version"),
}
_TRAJECTORY_COLUMNS: Final = (
    "trajectory_id",
    "group_id",
    "role",
    "prompt",
    "response",
    "reward",
    "reward_parts",
    "truncation_cause",
    "rows",
    "metrics",
    "provenance",
    "extra",
)
_MAPPINGS: Final = ("reward_parts", "metrics", "provenance", "extra")
"""Columns that Parquet holds as JSON text: their keys differ from run to run."""


def _trajectory_line(trajectory: Trajectory) -> dict[str, Any]:
    line = {name: to_jsonable(getattr(trajectory, name)) for name in _TRAJECTORY_COLUMNS}
    return line | {"rows": [_row_line(row) for row in trajectory.rows]}


def _row_line(row: TokenRow) -> dict[str, Any]:
    versions = [{"start": s.start, "end": s.end, "version": str(s.version)} for s in row.versions]
    return {
        "token_ids": row.token_ids.tolist(),
        "loss_mask": row.loss_mask.tolist(),
        "sampled": to_jsonable(row.sampled),
        "behavior_logprobs": to_jsonable(row.behavior_logprobs),
        "versions": versions,
        "turns": to_jsonable(row.turns),
        "temperature": row.temperature,
    }


def to_jsonable(value: Any) -> Any:
    """Dataclasses, arrays and mappings as JSON values."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(v) for v in value]
    return repr(value)


def _for_parquet(line: dict[str, Any]) -> dict[str, Any]:
    packed = {
        name: json.dumps(line[name], ensure_ascii=False)
        for name in _MAPPINGS
        if line[name] is not None
    }
    return line | packed


def _parquet_schema(pyarrow: Any) -> Any:
    text, number, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    span = pyarrow.struct({"start": number, "end": number, "version": text})
    turn = pyarrow.struct(
        {"start": number, "end": number, "finish_reason": text, "reward": real, "anchor": text}
    )
    row = pyarrow.struct(
        {
            "token_ids": pyarrow.list_(pyarrow.int32()),
            "loss_mask": pyarrow.list_(pyarrow.bool_()),
            "sampled": pyarrow.list_(pyarrow.bool_()),
            "behavior_logprobs": pyarrow.list_(pyarrow.float32()),
            "versions": pyarrow.list_(span),
            "turns": pyarrow.list_(turn),
            "temperature": real,
        }
    )
    numbers = ("draw", "member", "incarnation", "admitted_version", "attempts", "outcome_version")
    kinds = dict.fromkeys((*_ROLLOUT_COLUMNS, *_TRAJECTORY_COLUMNS), text)
    kinds |= dict.fromkeys(numbers, number) | dict.fromkeys(("duration_s", "reward"), real)
    return pyarrow.schema(kinds | {"rows": pyarrow.list_(row)})
