"""Reward functions in worker processes: hangs, crashes, signals, and no orphans."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from nexrl.errors import ConfigError, DeadlineError, RewardError, ServiceError, innermost_cause
from nexrl.services.reward.local import load_reward_service
from nexrl.services.reward.protocol import RewardService

SOURCE = """
import os, signal, sys

def f(completion, answer="", values=None):
    if completion == "hang":
        while True:
            pass
    if completion == "exit":
        print("last words", flush=True)
        os._exit(3)
    if completion == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "raise":
        raise ValueError("not today")
    if completion == "judge":
        raise ConnectionError("judge is gone")
    if completion == "nan":
        return float("nan")
    if completion == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(1)
        signal.pause()
    if completion == "print":
        print("x" * 100_000)
    if completion == "pid":
        return os.getpid()
    return {"right": 1.0, "skipped": None}

async def g(completion):
    return 0.25
"""


@pytest.fixture
async def make_service(tmp_path: Path) -> AsyncIterator[Callable[..., RewardService]]:
    (tmp_path / "reward.py").write_text(SOURCE)
    made: list[RewardService] = []

    def make(name: str = "f", **fields: Any) -> RewardService:
        service = load_reward_service(
            f"reward.py:{name}",
            recipe_dir=tmp_path,
            arguments=fields.pop("arguments", {}),
            isolation="process",
            **{"deadline_s": 20.0, "num_workers": 1, **fields},
        )
        made.append(service)
        return service

    yield make
    for service in made:
        await service.aclose()


async def test_result_comes_back_whole(make_service: Any) -> None:
    service = make_service(arguments={"values": [1, 2.5, "x"]})
    result = await service.score("x", {"answer": "4"})
    assert (result.value, result.parts) == (1.0, {"right": 1.0})


async def test_a_hung_call_is_killed_and_the_others_are_scored(make_service: Any) -> None:
    """FR-068: pool of 2, one sample hangs, nineteen are scored."""
    service = make_service(num_workers=2)
    await asyncio.gather(*(service.score("x", {}) for _ in range(2)))  # both processes are up
    service._caller._deadline_s = 1.0
    texts = ["hang", *["x"] * 19]
    results = await asyncio.gather(*(service.score(t, {}) for t in texts), return_exceptions=True)
    assert isinstance(results[0], DeadlineError)
    assert [getattr(r, "value", r) for r in results[1:]] == [1.0] * 19


@pytest.mark.parametrize(
    ("text", "how"), [("segfault", "was killed by SIGSEGV"), ("exit", "ended with exit code 3")]
)
async def test_a_crash_names_signal_or_code_memory_and_last_output(
    make_service: Any, text: str, how: str
) -> None:
    """FR-167."""
    service = make_service()
    with pytest.raises(RewardError) as caught:
        await service.score(text, {})
    message = str(caught.value)
    assert "reward function f: process" in message
    assert how in message
    assert "MiB at its last answer" in message
    assert text != "exit" or message.endswith("last words")
    assert (await service.score("x", {})).value == 1.0


async def test_an_exception_keeps_its_type_place_and_traceback(make_service: Any) -> None:
    with pytest.raises(
        RewardError, match=r"f raised ValueError: not today at .*reward\.py:14"
    ) as e:
        await make_service().score("raise", {})
    cause = innermost_cause(e.value)
    assert type(cause).__name__ == "ValueError"
    assert "raise ValueError" in cause.__notes__[0]


async def test_a_lost_judge_is_infrastructure(make_service: Any) -> None:
    with pytest.raises(ServiceError, match="judge is gone"):
        await make_service().score("judge", {})


async def test_nonsense_is_refused_as_in_process(make_service: Any) -> None:
    with pytest.raises(RewardError, match="reward function f returned nan"):
        await make_service().score("nan", {})


async def test_signals_work(make_service: Any) -> None:
    """FR-059."""
    assert (await make_service().score("alarm", {})).value == 1.0


async def test_async_functions_and_printing_work(make_service: Any) -> None:
    assert (await make_service("g").score("x", {})).value == 0.25
    assert (await make_service().score("print", {})).value == 1.0


async def test_one_process_serves_many_calls(make_service: Any) -> None:
    service = make_service()
    pids = {(await service.score("pid", {})).value for _ in range(5)}
    assert len(pids) == 1
    assert os.getpid() not in pids


async def test_a_column_that_cannot_be_sent_says_what_to_do(make_service: Any) -> None:
    with pytest.raises(RewardError, match=r"cannot be sent.*reward_isolation: thread"):
        await make_service().score("x", {"answer": object()})


async def test_a_file_that_fails_only_in_the_process_is_a_configuration_error(
    make_service: Any, tmp_path: Path
) -> None:
    service = make_service()
    (tmp_path / "reward.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"reward\.py"):
        await service.score("x", {})


async def test_a_cancelled_call_frees_its_worker(make_service: Any) -> None:
    service = make_service()
    before = (await service.score("pid", {})).value
    task = asyncio.create_task(service.score("hang", {}))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await service.score("pid", {})).value != before


async def test_closing_ends_the_processes(make_service: Any) -> None:
    service = make_service()
    pid = int((await service.score("pid", {})).value)
    await service.aclose()
    await service.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_parent_leaves_no_orphan_even_when_the_function_hangs(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "import os, sys\n"
        "def f(completion):\n"
        "    os.write(2, b'')\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    os.kill(os.getppid(), 9)\n"
        "    while True: pass\n"
    )
    parent = subprocess.run(
        [
            sys.executable,
            "-c",
            "import asyncio, pathlib\n"
            "from nexrl.services.reward.local import load_reward_service\n"
            "async def main():\n"
            f"    s = load_reward_service('reward.py:f', recipe_dir=pathlib.Path({str(tmp_path)!r}),"
            " arguments={}, isolation='process')\n"
            "    await s.score('x', {})\n"
            "asyncio.run(main())\n",
        ],
        check=False,
        timeout=60,
    )
    assert parent.returncode == -9
    child = int((tmp_path / "pid").read_text())
    assert not _still_runs_after(child, seconds=10.0)


def _still_runs_after(pid: int, *, seconds: float) -> bool:
    """Wait for a process that is not our child, by its pidfd."""
    import select

    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([descriptor], [], [], seconds)[0]
    finally:
        os.close(descriptor)
