"""MetricSink: the one owner of the step clock (FR-166); everything that is logged goes through it.

Consumes metrics of the controller, trainer, validator and tracker; writes `metrics.jsonl` and fans
out to loggers (TensorBoard, wandb). Each family of metrics has its own x axis, so a validation at
version 2 and a training step 8073 never meet in one counter. A line of metrics.jsonl is

    {"segment", "axis", "step", "at_step", "version", "stage", "wall_s", "policy", "metrics"}

A resume opens a new segment; what earlier segments logged beyond the resumed step stays in the
file, and readers (`read_metrics`) leave it out as superseded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nexrl.atomic import finite
from nexrl.errors import StoreError
from nexrl.types import DEFAULT_POLICY

log = logging.getLogger("nexrl")

TRAIN_AXIS = "step"
VALIDATION_AXIS = "validation"
_RESUME_AXIS = "resume"


class MetricLogger(Protocol):
    """A place that shows metrics beside metrics.jsonl."""

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics at one position of one axis; must not block on a network."""
        ...

    def close(self) -> None:
        """Write out what is buffered; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRecord:
    """One line of metrics.jsonl."""

    segment: int
    """Counts starts of the run: 0, then one more with each resume."""
    axis: str
    """Family: step (training), validation ..."""
    step: int
    """Position on that axis; on axis `step` counted over all stages of the run."""
    at_step: int
    """Training step that was current when this was logged."""
    version: str
    """Policy version the metrics speak of; empty when they speak of none."""
    stage: str
    """Stage that ran."""
    wall_s: float
    """Seconds since the start of the segment's process."""
    policy: str
    """Model the metrics speak of."""
    metrics: Mapping[str, float]
    """Values by name (docs/metrics.md)."""


class MetricSink:
    """Writes one file and any number of loggers.

    Invariant: `at_step` never decreases within a segment, and a record that `log` returned from
    is in the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float],
        loggers: Sequence[MetricLogger] = (),
        resumed_step: int | None = None,
    ) -> None:
        """`clock` is the loop's time; `resumed_step` opens a new segment after that step."""
        self._path = path
        self._clock = clock
        self._start = clock()
        self._loggers = list(loggers)
        self.segment = _prepare(path)
        self.at_step = resumed_step or 0
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise StoreError(f"{path}: cannot write metrics: {error.strerror}") from error
        if resumed_step is not None:
            self._write({"segment": self.segment, "axis": _RESUME_AXIS, "step": resumed_step})

    def log(
        self,
        axis: str,
        step: int,
        metrics: Mapping[str, float],
        *,
        policy: str = DEFAULT_POLICY,
        version: str = "",
        stage: str = "",
    ) -> None:
        """Record metrics at a position of an axis; StoreError when the file cannot be written."""
        if axis == TRAIN_AXIS:
            self.at_step = max(self.at_step, step)
        record = {
            "segment": self.segment,
            "axis": axis,
            "step": step,
            "at_step": self.at_step,
            "version": version,
            "stage": stage,
            "wall_s": round(self._clock() - self._start, 4),
            "policy": policy,
            "metrics": finite({name: float(value) for name, value in metrics.items()}),
        }
        self._write(record)
        prefix = "" if policy == DEFAULT_POLICY else f"{policy}/"
        named = {prefix + name: float(value) for name, value in metrics.items()}
        for logger in list(self._loggers):
            self._pass_on(logger, axis, step, named)

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise StoreError(f"{self._path}: cannot write metrics: {error.strerror}") from error

    def _pass_on(
        self, logger: MetricLogger, axis: str, step: int, metrics: Mapping[str, float]
    ) -> None:
        try:
            logger.log(axis, step, metrics)
        except Exception as error:  # noqa: BLE001 - a tracker's own failure must not end a run whose metrics are safe on disk
            self._loggers.remove(logger)
            _warn(logger, "failed and gets no further metrics", error)

    def close(self) -> None:
        """Close the file and the loggers, each whatever becomes of the others; idempotent."""
        self._file.close()
        loggers, self._loggers = self._loggers, []
        for logger in loggers:
            try:
                logger.close()
            except Exception as error:  # noqa: BLE001 - as in _pass_on
                _warn(logger, "could not be closed", error)


def _warn(logger: MetricLogger, what: str, error: Exception) -> None:
    name = type(logger).__name__
    log.warning(
        "%s %s (metrics.jsonl has them all): %s: %s", name, what, type(error).__name__, error
    )


def read_metrics(path: Path) -> list[MetricRecord]:
    """Records in file order, without those that a resume made void.

    A last line cut short by a crash is left out: its `log` never returned.
    """
    if not path.exists():
        return []
    resumed: dict[int, int] = {}
    records: list[MetricRecord] = []
    for fields in _lines(path):
        if fields["axis"] == _RESUME_AXIS:
            resumed[fields["segment"]] = fields["step"]
        else:
            metrics = {name: float(value) for name, value in fields.pop("metrics").items()}
            records.append(MetricRecord(**fields, metrics=metrics))
    return [r for r in records if not _is_superseded(r, resumed)]


def _is_superseded(record: MetricRecord, resumed: Mapping[int, int]) -> bool:
    """Whether a later segment resumed from before this record."""
    return any(
        segment > record.segment and record.at_step > step for segment, step in resumed.items()
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            return
        try:
            yield json.loads(line)
        except ValueError as error:
            raise StoreError(f"{path}:{number}: not a line of JSON: {error}") from error


def _prepare(path: Path) -> int:
    """Cut a torn last line off an existing file; the segment number to write now."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    return max((fields["segment"] for fields in _lines(path)), default=-1) + 1
