"""How much failure a run bears: `runtime_monitor.exception_handling` as a rule over rollouts.

Fed by the ActivityTracker with every ended rollout; answers with the error that stops the run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from nexrl.config.schema import ExceptionHandlingConfig
from nexrl.errors import FailureClass, RunStoppedError
from nexrl.types import Failure, RolloutRecord, TrajectoryStatus

_STOPS_AT_ONCE = {
    "stop_on_error": frozenset(
        {
            FailureClass.USER_CODE,
            FailureClass.INFRASTRUCTURE,
            FailureClass.CONFIGURATION,
            FailureClass.INVARIANT,
        }
    ),
    "stop_on_critical": frozenset({FailureClass.CONFIGURATION, FailureClass.INVARIANT}),
    "continue": frozenset({FailureClass.INVARIANT}),
}


@dataclass(slots=True)
class FailureKind:
    """Failures that share an innermost error class."""

    error_type: str
    """Name of the innermost exception class (FR-152)."""
    count: int
    """Rollouts of the run that failed with it."""
    first: Failure
    """The first of them."""
    first_rollout_id: str
    """Where the first happened."""

    def __str__(self) -> str:
        where = f" in {self.first.where}" if self.first.where else ""
        return (
            f"{self.error_type}{where}, first in rollout {self.first_rollout_id}: "
            f"{self.first.message}"
        )


class ErrorPolicy:
    """Counts failures and gives the verdict.

    Invariant: the window says of the last `failure_window` rollouts that ended whether they failed;
    cancelled ones are no evidence either way and are left out.
    """

    def __init__(self, config: ExceptionHandlingConfig) -> None:
        self._config = config
        self._window: deque[bool] = deque(maxlen=config.failure_window)
        self.kinds: dict[str, FailureKind] = {}

    def judge(self, record: RolloutRecord) -> RunStoppedError | None:
        """Take note of an ended rollout; the error that stops the run, or None to go on."""
        if record.status is TrajectoryStatus.CANCELLED:
            return None
        failed = record.status is TrajectoryStatus.FAILED
        self._window.append(failed)
        if not failed or record.failure is None:
            return None
        kind = self._note(record.failure, record.rollout_id)
        if record.failure.failure_class in _STOPS_AT_ONCE[self._config.policy]:
            return self._stop(
                f"a {record.failure.failure_class.value} failure stops a run under policy "
                f"{self._config.policy}: rollout {record.rollout_id}: {kind.error_type}: "
                f"{record.failure.message}",
                record.failure,
            )
        return self._judge_rate()

    def _note(self, failure: Failure, rollout_id: str) -> FailureKind:
        error_type = failure.error_type or failure.failure_class.value
        kind = self.kinds.get(error_type)
        if kind is None:
            kind = self.kinds[error_type] = FailureKind(error_type, 0, failure, rollout_id)
        kind.count += 1
        return kind

    def _judge_rate(self) -> RunStoppedError | None:
        window = len(self._window)
        if self._config.policy != "stop_on_critical" or window < self._config.failure_window:
            return None
        num_failed = sum(self._window)
        if num_failed <= self._config.max_failure_rate * window:
            return None
        worst = max(self.kinds.values(), key=lambda kind: kind.count)
        return self._stop(
            f"{num_failed} of the last {window} rollouts failed, more than "
            f"runtime_monitor.exception_handling.max_failure_rate "
            f"{self._config.max_failure_rate:g} allows; {worst.count} of the run's failures are "
            f"{worst}",
            worst.first,
        )

    def _stop(self, message: str, failure: Failure) -> RunStoppedError:
        error = RunStoppedError(message, failure_class=failure.failure_class)
        if failure.traceback:
            error.add_note(failure.traceback.rstrip())
        return error
