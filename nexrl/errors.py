"""The exception tree and the failure taxonomy.

Five kinds of failure exist, and each has one treatment (docs/design.md, "Failures"):
configuration stops before anything starts; policy is the trajectory's own business;
infrastructure is retried and then `failed`; user code is recorded with its traceback;
an invariant stops the run. A failure never becomes reward 0.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from enum import StrEnum

_NOT_THE_USERS = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<",
)


class FailureClass(StrEnum):
    """Who is to blame, which decides what happens next."""

    CONFIGURATION = "configuration"
    POLICY = "policy"
    INFRASTRUCTURE = "infrastructure"
    USER_CODE = "user_code"
    INVARIANT = "invariant"


class NexRLError(Exception):
    """Root of every error that NexRL raises on purpose."""

    failure_class: FailureClass = FailureClass.INVARIANT
    retryable: bool = False


class ConfigError(NexRLError):
    """The configuration cannot work: names the key, the value, what is accepted and its origin."""

    failure_class = FailureClass.CONFIGURATION


class PolicyError(NexRLError):
    """The policy did something that ends its own trajectory (context overflow, bad tool call)."""

    failure_class = FailureClass.POLICY


class ContextOverflowError(PolicyError):
    """The prompt leaves no room to generate: names both numbers of tokens."""


class InfrastructureError(NexRLError):
    """A service failed, timed out or could not be reached; retried within the budget."""

    failure_class = FailureClass.INFRASTRUCTURE
    retryable = True


class ServiceError(InfrastructureError):
    """A service answered with an error: `status` is its HTTP status (None when in process)."""

    def __init__(
        self, message: str, *, status: int | None = None, retryable: bool | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        if retryable is not None:
            self.retryable = retryable


class DeadlineError(InfrastructureError):
    """A wait reached its deadline: the message says who waited for what and for how long."""


class UserCodeError(NexRLError):
    """An exception in a recipe's own code; the message names file and line."""

    failure_class = FailureClass.USER_CODE


class RewardError(UserCodeError):
    """A reward function raised, or returned something that is not a finite number, None or parts."""


class DataError(UserCodeError):
    """A data file or row cannot be used; names file and line."""


class InvariantError(NexRLError):
    """Something that must always hold does not (ledger, lengths, versions, checksums)."""

    failure_class = FailureClass.INVARIANT


class WeightSyncError(InfrastructureError):
    """Publishing, loading, verifying or activating weights failed; carries the engine's own text."""

    retryable = False


class RunStoppedError(NexRLError):
    """The error policy ended the run; the message holds the rule, the counts and the first cause."""

    def __init__(self, message: str, *, failure_class: FailureClass) -> None:
        super().__init__(message)
        self.failure_class = failure_class


class PoolClosedError(NexRLError):
    """The trajectory pool admits or hands out nothing more: its source or the pool itself is closed."""

    failure_class = FailureClass.INFRASTRUCTURE


class StoreError(NexRLError):
    """The trajectory store cannot write or is damaged; names the file."""

    failure_class = FailureClass.INFRASTRUCTURE


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence on a misspelt name: `; did you mean ppo?`, or nothing.

    Capitals and `-` for `_` are no difference.
    """
    import difflib

    known = {other.lower(): other for other in names}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, 1)
    return f"; did you mean {known[near[0]]}?" if near else ""


def innermost_cause(error: BaseException) -> BaseException:
    """The exception that started it: unwraps exception groups and `raise ... from` chains.

    A log that shows only "unhandled errors in a TaskGroup" hides the cause (FR-152).
    """
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, BaseExceptionGroup) and error.exceptions:
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            break
    return error


def classify(error: BaseException) -> FailureClass:
    """The failure class of any exception; what NexRL did not raise counts as user code,
    except lost connections and timeouts, which are infrastructure."""
    if isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, NexRLError):
        return error.failure_class
    if isinstance(error, ConnectionError | TimeoutError):
        return FailureClass.INFRASTRUCTURE
    return FailureClass.USER_CODE


def user_frame(error: BaseException) -> str:
    """`file:line` of the last frame outside NexRL itself, which is where a user looks first."""
    error = innermost_cause(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return user_place(traceback.extract_tb(error.__traceback__))


def user_place(frames: Sequence[traceback.FrameSummary]) -> str:
    """`file:line` of the last of some frames outside NexRL and libraries, or of the last at all."""
    outside = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)]
    found = outside or frames
    return f"{found[-1].filename}:{found[-1].lineno}" if found else "unknown"
