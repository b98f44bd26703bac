"""format_failure: the first cause is last on the screen (FR-164)."""

from __future__ import annotations

import pytest

from nexrl.errors import (
    DeadlineError,
    FailureClass,
    RunStoppedError,
    ServiceError,
    UserCodeError,
    innermost_cause,
)
from nexrl.report.failure_text import failure_reason, format_failure


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_the_cause_inside_a_task_group_is_the_last_line() -> None:
    """FR-152: 'unhandled errors in a TaskGroup' hides the cause."""
    group = ExceptionGroup("unhandled errors in a TaskGroup", [raised(KeyError("answer"))])
    lines = format_failure(group).splitlines()
    assert lines[-1] == "KeyError: 'answer'"
    assert lines[-2] == "kind:      user_code"
    assert lines[-3].startswith("at:        ")
    assert "test_failure_text.py:" in lines[-3]


def test_our_own_words_are_kept_where_they_wrap_a_foreign_error() -> None:
    error = DeadlineError("inference did not answer within 120 s")
    error.__cause__ = TimeoutError()
    assert isinstance(innermost_cause(error), TimeoutError)
    assert format_failure(error).splitlines()[-1] == (
        "DeadlineError: inference did not answer within 120 s"
    )


def test_the_reason_is_the_first_line_of_the_cause() -> None:
    """FR-152: the name of what failed, not the last line of its log nor the group around it."""
    error = ServiceError("train ended by itself: exit code 1; the end of train.log:\n  | bye")
    reason = failure_reason(ExceptionGroup("g", [error]))
    assert reason == "ServiceError: train ended by itself: exit code 1; the end of train.log:"


def test_a_stopped_run_shows_the_traceback_of_the_user_code_that_failed() -> None:
    error = RunStoppedError("40 of the last 64 failed", failure_class=FailureClass.USER_CODE)
    error.add_note('File "reward.py", line 14, in score')
    text = format_failure(ExceptionGroup("g", [error]))
    assert "component:" not in text
    assert text.index("reward.py") < text.index("RunStoppedError: 40 of the last 64 failed")
    assert "kind:      user_code" in text


def test_user_code_that_raises_is_shown_with_its_own_traceback_before_our_words() -> None:
    error = UserCodeError("setup() of MyWorker raised KeyError")
    error.__cause__ = raised(KeyError("answer"))
    text = format_failure(error)
    assert text.index("KeyError: 'answer'") < text.index("UserCodeError: setup() of MyWorker")
    assert "test_failure_text.py:" in text.splitlines()[-3]


def test_secrets_do_not_reach_the_screen() -> None:
    text = format_failure(ServiceError("key qq77zz refused"), secrets=["qq77zz"])
    assert "qq77zz" not in text
