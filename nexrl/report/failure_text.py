"""A failed run in words: the first cause, last on the screen (FR-164).

Python prints the wrapper first and its own frames last; a person needs the opposite. The cause is
the innermost exception, with the component that failed and the line to look at. Where a service
ended by itself, the end of its log is part of the exception's words (`launch/process.py`).
"""

from __future__ import annotations

import traceback
from collections.abc import Collection

from nexrl.config.redact import redact_text
from nexrl.errors import (
    FailureClass,
    NexRLError,
    RunStoppedError,
    classify,
    innermost_cause,
    user_frame,
)


def format_failure(error: BaseException, *, secrets: Collection[str] = ()) -> str:
    """Traceback of user code, where to look, and on the last lines the cause."""
    cause = _cause(error)
    lines = list(getattr(cause, "__notes__", ()))
    inner = innermost_cause(cause)
    if classify(cause) is FailureClass.USER_CODE and not isinstance(inner, NexRLError):
        lines += traceback.format_exception(type(inner), inner, inner.__traceback__, chain=False)
    if not isinstance(cause, RunStoppedError):  # raised by the rule; its message has the place
        lines.append(f"component: {_component(cause)}")
        lines.append(f"at:        {user_frame(cause)}")
    lines.append(f"kind:      {classify(cause).value}")
    lines.append(f"{type(cause).__name__}: {cause}")
    return redact_text("\n".join(line.rstrip() for line in lines), secrets=secrets)


def failure_reason(error: BaseException, *, secrets: Collection[str] = ()) -> str:
    """The cause in one line; what follows it (the end of a log) is left to `format_failure`."""
    cause = _cause(error)
    lines = f"{type(cause).__name__}: {cause}".splitlines()
    return redact_text(lines[0].rstrip(), secrets=secrets)


def _cause(error: BaseException) -> BaseException:
    """The innermost cause, except that our own words are kept where they wrap a foreign error.

    `DeadlineError("inference did not answer within 120 s") from TimeoutError()` says more than
    `TimeoutError`.
    """
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, RunStoppedError):
        return error
    inner = innermost_cause(error)
    if isinstance(inner, NexRLError) or not isinstance(error, NexRLError):
        return inner
    deepest: BaseException = error
    while isinstance(deepest.__cause__, NexRLError):
        deepest = deepest.__cause__
    return deepest


def _component(cause: BaseException) -> str:
    """The part of NexRL that the innermost frame of ours belongs to, for example rollout/runner."""
    frames = traceback.extract_tb(cause.__traceback__)
    ours = [f.filename.replace("\\", "/") for f in frames]
    inside = [name.rpartition("/nexrl/")[2] for name in ours if "/nexrl/" in name]
    return inside[-1].removesuffix(".py") if inside else "user code"
