"""LocalRewardService in process: arguments, threads, deadlines, errors."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from nexrl.errors import ConfigError, DeadlineError, RewardError, ServiceError
from nexrl.services.reward.local import load_reward_service, make_reward_service
from nexrl.services.reward.signature import instant
from nexrl.testing.makers import make_completion
from nexrl.testing.virtual_time import virtual_time

ROW = {"prompt": "2+2=", "answer": "4", "level": 3}


async def score(function: Any, text: str = "4", *, row: Any = ROW, **fields: Any) -> Any:
    arguments, drawn = fields.pop("arguments", {}), fields.pop("drawn", None)
    service = make_reward_service(function, contract="c", arguments=arguments, **fields)
    try:
        return await service.score(text, row, drawn)
    finally:
        await service.aclose()


async def test_function_gets_the_text_and_only_the_columns_it_names() -> None:
    def f(completion: str, answer: str) -> float:
        return float(completion == answer)

    assert (await score(f)).value == 1.0


async def test_var_keywords_get_every_column_but_one_named_like_the_text() -> None:
    def f(completion: str, **columns: Any) -> float:
        assert columns == ROW
        return 1.0

    assert (await score(f, row={**ROW, "completion": "a column"})).value == 1.0


async def test_configured_arguments_win_over_columns_and_defaults() -> None:
    def f(text: str, *, level: int = 0, bonus: float = 0.0) -> float:
        return level + bonus

    assert (await score(f, arguments={"level": 10, "bonus": 0.5})).value == 10.5


def cut(completion: str, finish_reason: str) -> float:
    """A reward that looks at how the draw ended."""
    return float(finish_reason != "length")


@pytest.mark.parametrize(("reason", "value"), [("eos", 1.0), ("length", 0.0)])
async def test_a_function_that_asks_for_the_finish_reason_gets_it(
    reason: Any, value: float
) -> None:
    """FR-077: a reward can tell an answer from a draw that a limit cut."""
    drawn = make_completion(finish_reason=reason)
    assert (await score(cut, drawn=drawn)).value == value


async def test_a_column_and_an_argument_named_like_a_fact_win_over_it() -> None:
    drawn = make_completion(finish_reason="eos")
    assert (await score(cut, drawn=drawn, row={"finish_reason": "length"})).value == 0.0
    assert (await score(cut, drawn=drawn, arguments={"finish_reason": "length"})).value == 0.0


async def test_a_fact_of_a_draw_is_missing_where_nothing_was_drawn() -> None:
    with pytest.raises(ConfigError, match="needs `finish_reason`"):
        await score(cut)
    make_reward_service(cut, contract="c", arguments={}).check_row(ROW)


async def test_a_missing_column_lists_what_the_row_has() -> None:
    """FR-073."""

    def f(completion: str, solution: str) -> float:
        return 1.0

    with pytest.raises(
        ConfigError, match=r"f needs `solution`.*the row has: answer, level, prompt"
    ):
        await score(f)


def test_rows_can_be_checked_before_anything_runs() -> None:
    """FR-073: start-up validation of the first rows."""

    def f(completion: str, solution: str) -> float:
        raise AssertionError

    service = make_reward_service(f, contract="c", arguments={})
    with pytest.raises(ConfigError, match="solution"):
        service.check_row(ROW)


def test_an_argument_that_the_function_does_not_take_is_refused() -> None:
    def f(completion: str, answer: str, tolerance: float = 0.0) -> float:
        return 1.0

    with pytest.raises(
        ConfigError,
        match=r"reward_arguments\.tolerence: f has no such keyword; accepted: answer, tol",
    ):
        make_reward_service(f, contract="c", arguments={"tolerence": 0.1})


def test_a_function_without_a_positional_parameter_is_refused() -> None:
    def f(*, answer: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="first positional parameter"):
        make_reward_service(f, contract="c", arguments={})


async def test_blocking_functions_run_in_threads_at_the_same_time() -> None:
    together = threading.Barrier(2, timeout=10.0)

    def f(completion: str) -> float:
        together.wait()
        return float(threading.current_thread() is not threading.main_thread())

    service = make_reward_service(f, contract="c", arguments={}, num_workers=2)
    results = await asyncio.gather(*(service.score("x", {}) for _ in range(2)))
    await service.aclose()
    assert [r.value for r in results] == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["async", "instant"])
async def test_async_and_instant_functions_run_on_the_loop(kind: str) -> None:
    def on_main_thread(completion: str) -> float:
        return float(threading.current_thread() is threading.main_thread())

    async def as_coroutine(completion: str) -> float:
        return on_main_thread(completion)

    function = as_coroutine if kind == "async" else instant(on_main_thread)
    assert (await score(function)).value == 1.0


@virtual_time
async def test_an_async_function_past_its_deadline_is_an_error_and_not_zero() -> None:
    async def f(completion: str) -> float:
        await asyncio.sleep(1e9)
        return 1.0

    with pytest.raises(DeadlineError, match=r"f took longer than 5 s \(rollout_worker.reward_dead"):
        await score(f, deadline_s=5.0)


async def test_a_hung_thread_costs_its_call_and_no_other() -> None:
    release = threading.Event()

    def f(completion: str) -> float:
        if completion == "hang":
            release.wait(30.0)
        return 1.0

    service = make_reward_service(f, contract="c", arguments={}, num_workers=1, deadline_s=0.1)
    with pytest.raises(DeadlineError, match=r"blocking code is at .*reward_isolation: process"):
        await service.score("hang", {})
    assert (await service.score("x", {})).value == 1.0
    release.set()
    await service.aclose()


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(2), StopIteration(), RewardError("x")]
)
@pytest.mark.parametrize("kind", ["async", "instant", "thread"])
async def test_what_a_function_raises_is_a_reward_error_with_its_place(
    error: BaseException, kind: str
) -> None:
    """FR-059: counted as an error, never 0."""

    def f(completion: str) -> float:
        raise error

    async def g(completion: str) -> float:
        raise error

    function = {"async": g, "instant": instant(f) if kind == "instant" else f, "thread": f}[kind]
    with pytest.raises(RewardError, match=r"raised .* at .*"):
        await score(function)


@pytest.mark.parametrize("error", [ConnectionError("gone"), TimeoutError("slow judge")])
async def test_a_lost_judge_is_infrastructure(error: Exception) -> None:
    """FR-140."""

    async def f(completion: str) -> float:
        raise error

    with pytest.raises(ServiceError) as caught:
        await score(f)
    assert caught.value.retryable


async def test_signals_do_not_work_in_a_thread_and_that_is_an_error() -> None:
    """FR-059: the scorer that sets an alarm fails loudly; `process` isolation is where it works."""

    def f(completion: str) -> float:
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0

    with pytest.raises(RewardError, match="ValueError: signal only works in main thread"):
        await score(f)


async def test_reference_is_loaded_and_hashed_into_the_contract(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def f(completion):\n    return 0.5\n")
    service = load_reward_service("reward.py:f", recipe_dir=tmp_path, arguments={})
    assert (await service.score("x", {})).value == 0.5
    await service.aclose()
    reference, _, digest = service.contract.partition("#")
    assert (reference, len(digest)) == ("reward.py:f", 16)


async def test_contract_changes_with_the_source(tmp_path: Path) -> None:
    contracts = set()
    for number, folder in ((1, tmp_path / "a"), (2, tmp_path / "b")):
        folder.mkdir()
        (folder / "reward.py").write_text(f"def f(completion):\n    return {number}\n")
        contracts.add(load_reward_service("reward.py:f", recipe_dir=folder, arguments={}).contract)
    assert len(contracts) == 2


def test_process_isolation_needs_a_reference() -> None:
    with pytest.raises(ConfigError, match="reward_isolation: process needs the reward as"):
        make_reward_service(lambda text: 1.0, contract="c", arguments={}, isolation="process")
