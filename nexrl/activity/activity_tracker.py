"""ActivityTracker: who is doing what, whether it moves, what fails, and the numbers of a step.

Every module is handed it as `protocols.Tracker`. The controller runs `watch()` beside its loops,
calls `flush()` once a step and hands the metrics to the `MetricSink`; the terminal view, the
summary and the report read the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from nexrl.activity.error_policy import ErrorPolicy, FailureKind
from nexrl.activity.means import Means
from nexrl.activity.memory import MemoryReading, read_memory
from nexrl.activity.rollout_statistics import RolloutStatistics
from nexrl.activity.spans import SHARES, WAIT_KINDS, Activity, Span, SpanTable
from nexrl.config.schema import RuntimeMonitorConfig
from nexrl.errors import DeadlineError, NexRLError
from nexrl.types import Batch, RolloutRecord, TrajectoryStatus

log = logging.getLogger("nexrl")

_WARNING_QUIET_S = 60.0
_MAX_REMEMBERED_WARNINGS = 256
_NUM_HOLDERS_NAMED = 5


class ActivityTracker:
    """Implements `protocols.Tracker` for one event loop; built and used inside it.

    Invariant: once a reason to stop is found it is the first and only one: `watch` raises it, and
    later failures never replace it.
    """

    def __init__(
        self,
        config: RuntimeMonitorConfig,
        *,
        read_memory: Callable[[], MemoryReading | None] = read_memory,
    ) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._read_memory = read_memory
        self._first_memory = read_memory()
        self.spans = SpanTable(self._clock)
        self.policy = ErrorPolicy(config.exception_handling)
        self.rollouts = RolloutStatistics(self._clock())
        self._ended_at = self._clock()
        self._means = Means()
        self._totals: dict[str, float] = {}
        self._stage_start = dict.fromkeys(SHARES, 0.0)
        self._flush_start = dict.fromkeys(SHARES, 0.0)
        self._flushed_at = self._clock()
        self._warned_at: dict[str, float] = {}
        self.on_warn: list[Callable[[str], None]] = []
        self._stop_reason: NexRLError | None = None
        self._stopped = asyncio.Event()

    # --- Tracker ------------------------------------------------------------------------------

    def activity(self, kind: str, name: str) -> Span:
        """A span of in-flight work, see `protocols.Tracker`."""
        return self.spans.span(kind, name)

    def observe(self, metric: str, value: float) -> None:
        """One observation, logged as the mean of those since the last flush."""
        self._means.add(metric, value)

    def count(self, metric: str, amount: float = 1.0) -> None:
        """Add to a running total, logged as such at every flush from then on."""
        self._totals[metric] = self._totals.get(metric, 0.0) + amount

    def rollout_ended(self, record: RolloutRecord) -> None:
        """A rollout ended, well or not."""
        self.rollouts.add(record)
        if record.status is TrajectoryStatus.FAILED:
            self._note_failure(record)
        elif record.status is not TrajectoryStatus.CANCELLED:
            self._ended_at = self._clock()
        error = self.policy.judge(record)
        if error is not None:
            self.stop(error)

    def warn(self, message: str) -> None:
        """A line for people; the same text is not repeated within a minute."""
        self._warn_once(message, key=message)

    # --- the controller's side ----------------------------------------------------------------

    def batch_trained(self, batch: Batch) -> None:
        """A batch was trained and published: what goodput counts."""
        self.rollouts.add_trained(batch)
        self._ended_at = self._clock()

    def begin_stage(self) -> None:
        """Time shares of a stage start here."""
        self._stage_start = self.spans.share_seconds()

    def stop(self, error: NexRLError) -> None:
        """Make `watch` raise; the first error wins."""
        if self._stop_reason is None:
            self._stop_reason = error
            self._stopped.set()

    async def watch(self) -> None:
        """Waits for a reason to stop the run and raises it; ends only by that or by cancellation.

        Woken by `stop`, or by a loop timer when nothing has ended well for `no_progress_s`.
        """
        while self._stop_reason is None:
            deadline = self._progressed_at() + self._config.no_progress_s
            try:
                async with asyncio.timeout_at(deadline):
                    await self._stopped.wait()
            except TimeoutError:
                if self._clock() >= self._progressed_at() + self._config.no_progress_s:
                    self.stop(DeadlineError(self._describe_standstill()))
        raise self._stop_reason

    def flush(self) -> dict[str, float]:
        """Metrics since the last flush (means, rates, times) and running totals."""
        now = self._clock()
        metrics = {**self._means.flush(), **self._totals, **self.rollouts.flush(now)}
        for error_type, kind in self.policy.kinds.items():
            metrics[f"error/{error_type}/count"] = float(kind.count)
        metrics["time/step"] = now - self._flushed_at
        shares = self.spans.share_seconds()
        for share, seconds in shares.items():
            metrics[f"time/{share}"] = seconds - self._flush_start[share]
        metrics.update(self._memory_metrics())
        self._flushed_at, self._flush_start = now, shares
        return metrics

    def stage_time_share(self) -> dict[str, float]:
        """Share of the stage's wall time by activity; they add up to 1."""
        return _normalised(self.spans.share_seconds(), self._stage_start)

    def time_share(self) -> dict[str, float]:
        """Share of the run's wall time by activity; they add up to 1."""
        return _normalised(self.spans.share_seconds(), dict.fromkeys(SHARES, 0.0))

    @property
    def wall_s(self) -> float:
        """Seconds since construction."""
        return self._clock() - self.spans.started

    @property
    def failures(self) -> list[FailureKind]:
        """Kinds of rollout failures, most frequent first."""
        return sorted(self.policy.kinds.values(), key=lambda kind: -kind.count)

    # --- inside -------------------------------------------------------------------------------

    def _progressed_at(self) -> float:
        return max(self.spans.progressed, self._ended_at)

    def _note_failure(self, record: RolloutRecord) -> None:
        failure = record.failure
        if failure is None:
            return
        error_type = failure.error_type or failure.failure_class.value
        # The rollout id makes every text unique: quieten by kind, or a burst floods the terminal.
        self._warn_once(
            f"rollout {record.rollout_id} failed ({failure.failure_class.value}"
            f"{', ' + failure.where if failure.where else ''}): {error_type}: {failure.message}",
            key=f"rollout failed: {error_type}",
        )

    def _warn_once(self, message: str, *, key: str) -> None:
        now = self._clock()
        if now - self._warned_at.get(key, -_WARNING_QUIET_S) < _WARNING_QUIET_S:
            return
        if len(self._warned_at) >= _MAX_REMEMBERED_WARNINGS:
            recent = ((k, at) for k, at in self._warned_at.items() if now - at < _WARNING_QUIET_S)
            self._warned_at = dict(list(recent)[-_MAX_REMEMBERED_WARNINGS // 2 :])
        self._warned_at[key] = now
        log.warning("%s", message)
        for listener in self.on_warn:
            listener(message)

    def _memory_metrics(self) -> dict[str, float]:
        reading = self._read_memory()
        if reading is None:
            return {}
        if reading.low:
            self._warn_once(
                f"memory is running out: {reading.describe(self._first_memory or reading)}",
                key="memory",
            )
        return {
            "memory/resident_gb": reading.resident / 1e9,
            "memory/available_gb": reading.available / 1e9,
        }

    def _describe_standstill(self) -> str:
        seconds = self._config.no_progress_s
        waits = self.spans.waits()
        working = [a for a in self.spans.open_activities() if a.kind not in WAIT_KINDS]
        lines = [
            f"nothing has ended well for {seconds:g} s (runtime_monitor.no_progress_s)",
            "held by " + (_list_some(working) or "nothing: no activity is open"),
        ]
        if waits:
            lines.append("waiting: " + _list_some(waits))
        return "; ".join(lines)


def _list_some(activities: list[Activity]) -> str:
    """The oldest few, and how many more there are."""
    text = ", ".join(str(a) for a in activities[:_NUM_HOLDERS_NAMED])
    more = len(activities) - _NUM_HOLDERS_NAMED
    return f"{text} and {more} more" if more > 0 else text


def _normalised(shares: dict[str, float], start: dict[str, float]) -> dict[str, float]:
    """Differences as shares of their sum; all zero while no time has passed."""
    spent = {name: seconds - start[name] for name, seconds in shares.items()}
    total = sum(spent.values())
    return {name: seconds / total if total else 0.0 for name, seconds in spent.items()}
