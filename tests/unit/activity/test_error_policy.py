"""ErrorPolicy: which failures stop a run, and what the verdict says."""

from __future__ import annotations

from typing import Any

import pytest

from nexrl.activity.error_policy import ErrorPolicy
from nexrl.config.schema import ExceptionHandlingConfig
from nexrl.errors import FailureClass, RunStoppedError
from nexrl.testing.makers import make_failure, make_record
from nexrl.types import RolloutRecord


def make_policy(policy: str = "stop_on_critical", **fields: object) -> ErrorPolicy:
    return ErrorPolicy(ExceptionHandlingConfig.model_validate({"policy": policy, **fields}))


def failed(kind: str = "user_code", message: str = "boom", **fields: Any) -> RolloutRecord:
    failure = make_failure(message, failure_class=FailureClass(kind), error_type="ValueError")
    return make_record(status="failed", failure=failure, **fields)


@pytest.mark.parametrize(
    ("policy", "stopping"),
    [
        ("stop_on_error", {"configuration", "infrastructure", "user_code", "invariant"}),
        ("stop_on_critical", {"configuration", "invariant"}),
        ("continue", {"invariant"}),
    ],
)
def test_each_policy_stops_at_once_for_its_kinds_of_failure(
    policy: str, stopping: set[str]
) -> None:
    stops = {
        k.value for k in FailureClass if make_policy(policy).judge(failed(k.value)) is not None
    }
    assert stops == stopping


def test_no_verdict_on_the_rate_before_the_window_is_full() -> None:
    policy = make_policy(failure_window=4, max_failure_rate=0.5)
    verdicts = [policy.judge(failed()) for _ in range(4)]
    assert verdicts[:3] == [None, None, None]
    assert isinstance(verdicts[3], RunStoppedError)


def test_a_rate_at_the_bound_goes_on_and_past_it_stops() -> None:
    policy = make_policy(failure_window=4, max_failure_rate=0.5)
    for record in (make_record(), failed(), make_record(), failed()):
        assert policy.judge(record) is None
    assert isinstance(policy.judge(failed()), RunStoppedError)


def test_only_the_last_rollouts_of_the_window_count() -> None:
    policy = make_policy(failure_window=10, max_failure_rate=0.5)
    for _ in range(5):
        assert policy.judge(failed()) is None
    for _ in range(50):
        assert policy.judge(make_record()) is None
    for _ in range(5):
        assert policy.judge(failed()) is None
    assert isinstance(policy.judge(failed()), RunStoppedError)


def test_cancelled_rollouts_are_no_evidence() -> None:
    policy = make_policy(failure_window=2, max_failure_rate=0.5)
    assert policy.judge(failed()) is None
    for _ in range(10):
        assert policy.judge(make_record(status="cancelled")) is None
    assert isinstance(policy.judge(failed()), RunStoppedError)


def test_the_verdict_names_the_setting_the_counts_and_the_most_frequent_cause_with_its_first() -> (
    None
):
    policy = make_policy(failure_window=3, max_failure_rate=0.5)
    policy.judge(failed(message="reward.py:14: not a number", rollout_id="i7/0/2"))
    policy.judge(make_record(status="failed"))
    error = policy.judge(failed(message="another", rollout_id="i9/0/0"))
    assert str(error) == (
        "3 of the last 3 rollouts failed, more than "
        "runtime_monitor.exception_handling.max_failure_rate 0.5 allows; 2 of the run's failures "
        "are ValueError in inference, first in rollout i7/0/2: reward.py:14: not a number"
    )


def test_the_traceback_of_user_code_travels_with_the_verdict() -> None:
    failure = make_failure(
        failure_class=FailureClass.USER_CODE, traceback="File reward.py, line 3\n"
    )
    error = make_policy("stop_on_error").judge(make_record(status="failed", failure=failure))
    assert error is not None
    assert error.__notes__ == ["File reward.py, line 3"]
