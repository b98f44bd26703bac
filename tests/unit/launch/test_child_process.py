"""Children are supervised, quoted when they fail, and never orphaned."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nexrl.errors import DeadlineError, ServiceError
from nexrl.launch.process import ChildProcess, describe_exit
from nexrl.launch.services import _close_all

SERVER = textwrap.dedent(
    """
    import asyncio
    from nexrl.services.http import bind, make_app, serve
    asyncio.run(serve(make_app(), bind("127.0.0.1", 0, token=None, setting="port"), name="fake"))
    """
)


def make_child(tmp_path: Path) -> ChildProcess:
    return ChildProcess("fake", log=tmp_path / "fake.log", shutdown_deadline_s=5.0)


async def start(child: ChildProcess, code: str, deadline_s: float = 30.0) -> None:
    await child.start([sys.executable, "-c", code], start_deadline_s=deadline_s)


async def test_the_system_chooses_the_port_and_close_ends_the_process(tmp_path: Path) -> None:
    child = make_child(tmp_path)
    await start(child, SERVER)
    pid = child.pid
    assert child.port > 0
    assert pid is not None
    await child.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_two_jobs_on_one_host_never_ask_for_the_same_port(tmp_path: Path) -> None:
    """FR-154, FR-155: no port is fixed, drawn at random or counted up: the system gives each."""
    children = [make_child(tmp_path / str(i)) for i in range(3)]
    try:
        async with asyncio.TaskGroup() as starting:
            for child in children:
                starting.create_task(start(child, SERVER))
        assert len({child.port for child in children}) == 3
    finally:
        await asyncio.gather(*(child.aclose() for child in children))


async def test_a_child_that_ends_before_it_is_ready_is_quoted(tmp_path: Path) -> None:
    """FR-164: the last lines of the failing component are on the screen."""
    child = make_child(tmp_path)
    with pytest.raises(ServiceError, match=r"(?s)exit code 3.*no such model"):
        await start(child, "import sys; print('no such model', file=sys.stderr); sys.exit(3)")


LEAVES_A_GRANDCHILD = "import subprocess; subprocess.Popen(['sleep', '30'], start_new_session=True)"
"""It inherits standard input and output, and outlives the child."""


async def test_closing_does_not_wait_for_a_grandchild_that_keeps_the_output_open(
    tmp_path: Path,
) -> None:
    child = make_child(tmp_path)
    await start(child, f"{LEAVES_A_GRANDCHILD}\n{SERVER}")
    async with asyncio.timeout(20):
        await child.aclose()


async def test_a_grandchild_does_not_hide_that_the_child_was_killed(tmp_path: Path) -> None:
    child = make_child(tmp_path)
    await start(child, f"{LEAVES_A_GRANDCHILD}\n{SERVER}")
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ServiceError, match=r"killed by SIGKILL"):
        async with asyncio.timeout(10):
            await child.supervise()
    await child.aclose()


async def test_a_grandchild_does_not_hide_that_the_child_never_got_ready(tmp_path: Path) -> None:
    child = make_child(tmp_path)
    with pytest.raises(ServiceError, match=r"exit code 3"):
        await start(child, f"{LEAVES_A_GRANDCHILD}\nimport sys; sys.exit(3)", deadline_s=20)


READY = """
import json, sys
print(json.dumps({"ready": True, "port": 1}), flush=True)
"""
"""What a service says of itself, without the service."""


async def test_a_line_longer_than_any_buffer_does_not_stop_the_child(tmp_path: Path) -> None:
    """Else its pipe fills up and it hangs in `print`, in the middle of a run."""
    child = make_child(tmp_path)
    await start(child, f"{READY}\nprint('x' * 1_000_000, flush=True); sys.exit(7)")
    with pytest.raises(ServiceError, match=r"exit code 7"):
        async with asyncio.timeout(20):
            await child.supervise()
    await child.aclose()
    assert child.log.stat().st_size == 1_000_001


async def test_closing_says_that_output_could_not_be_kept(tmp_path: Path) -> None:
    child = make_child(tmp_path)
    last_words = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye')))"
    await start(child, f"import sys; {last_words}\n{READY}\nsys.stdin.read()")
    child.log = tmp_path  # a folder cannot be written, as a file on a full disk
    with pytest.raises(IsADirectoryError):
        await child.aclose()
    await child.aclose()


async def test_one_that_fails_to_close_does_not_keep_the_other_running(tmp_path: Path) -> None:
    class FailsToClose(ChildProcess):
        async def aclose(self) -> None:
            raise OSError("no space left")

    child = make_child(tmp_path)
    await start(child, f"{READY}\nsys.stdin.read()")
    assert child.pid is not None
    failing = FailsToClose("failing", log=tmp_path / "failing.log", shutdown_deadline_s=5.0)
    with pytest.raises(OSError, match="no space left"):
        await _close_all([failing, child])
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_a_command_that_cannot_be_started_leaves_no_pipe_open(tmp_path: Path) -> None:
    before = os.listdir("/dev/fd")
    with pytest.raises(FileNotFoundError):
        await make_child(tmp_path).start([str(tmp_path / "absent")], start_deadline_s=5)
    await asyncio.sleep(0)
    assert os.listdir("/dev/fd") == before


async def test_fifty_lines_of_a_long_log_are_quoted(tmp_path: Path) -> None:
    """FR-164: enough to see the cause, and not so much that it scrolls away."""
    child = make_child(tmp_path)
    with pytest.raises(ServiceError) as caught:
        await start(child, "for n in range(200): print('line', n)")
    assert "  | line 150\n" in str(caught.value)
    assert "  | line 149\n" not in str(caught.value)


async def test_a_child_that_never_gets_ready_meets_its_deadline(tmp_path: Path) -> None:
    child = make_child(tmp_path)
    with pytest.raises(DeadlineError, match=r"not ready within 0\.5 s"):
        await start(child, "import sys; sys.stdin.read()", deadline_s=0.5)


async def test_a_child_that_is_killed_ends_supervision_with_its_signal(tmp_path: Path) -> None:
    """FR-167: component, exit signal and log are named."""
    child = make_child(tmp_path)
    await start(child, SERVER)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ServiceError, match=r"fake.*killed by SIGKILL"):
        async with asyncio.timeout(10):
            await child.supervise()
    await child.aclose()


async def test_a_child_we_close_does_not_count_as_a_failure(tmp_path: Path) -> None:
    child = make_child(tmp_path)
    await start(child, SERVER)
    supervision = asyncio.create_task(child.supervise())
    await asyncio.sleep(0)
    await child.aclose()
    async with asyncio.timeout(10):
        await supervision


def test_a_child_does_not_outlive_a_launcher_that_was_killed(tmp_path: Path) -> None:
    launcher = textwrap.dedent(
        f"""
        import asyncio, os, signal, sys
        from pathlib import Path
        from nexrl.launch.process import ChildProcess
        async def main():
            child = ChildProcess("fake", log=Path({str(tmp_path / "x.log")!r}), shutdown_deadline_s=5)
            await child.start([sys.executable, "-c", {SERVER!r}], start_deadline_s=30)
            print(child.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", launcher], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    wait_for_end(int(done.stdout))


def wait_for_end(pid: int) -> None:
    """Blocks until a process that is not our child has ended; TimeoutExpired after ten seconds."""
    subprocess.run(["tail", "--pid", str(pid), "-f", "/dev/null"], timeout=10, check=True)


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit code 0"), (-11, "killed by SIGSEGV"), (-9, "out of memory"), (-250, "signal 250")],
)
def test_exit_codes_are_put_in_words(code: int, text: str) -> None:
    assert text in describe_exit(code)
