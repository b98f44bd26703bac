"""Failures keep their cause and their place."""

from __future__ import annotations

import pytest

from nexrl.errors import (
    ConfigError,
    FailureClass,
    ServiceError,
    classify,
    innermost_cause,
    user_frame,
)


def test_the_innermost_cause_is_found_through_groups_and_chains() -> None:
    """FR-152: a log that says only `unhandled errors in a TaskGroup` hides the cause."""
    try:
        try:
            raise ConnectionResetError("x")
        except ConnectionResetError as error:
            raise RuntimeError("wrapper") from error
    except RuntimeError as error:
        grouped = ExceptionGroup("unhandled errors in a TaskGroup", [error])
    assert isinstance(innermost_cause(grouped), ConnectionResetError)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError("x"), FailureClass.CONFIGURATION),
        (ServiceError("x", status=500), FailureClass.INFRASTRUCTURE),
        (ConnectionRefusedError("x"), FailureClass.INFRASTRUCTURE),
        (TimeoutError(), FailureClass.INFRASTRUCTURE),
        (ValueError("x"), FailureClass.USER_CODE),
        (ExceptionGroup("g", [ServiceError("x")]), FailureClass.INFRASTRUCTURE),
    ],
)
def test_every_error_has_a_class(error: BaseException, expected: FailureClass) -> None:
    assert classify(error) is expected


def test_the_place_of_an_error_is_a_line_of_the_users_file() -> None:
    with pytest.raises(ValueError) as caught:
        int("x")
    assert user_frame(caught.value).startswith(__file__)


def test_the_place_of_a_syntax_error_is_the_broken_line() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("a = 1\nb = (", "worker.py", "exec")
    assert user_frame(caught.value) == "worker.py:2"
