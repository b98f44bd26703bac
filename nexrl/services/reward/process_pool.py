"""ProcessPool: calls a reward function in worker processes that can be killed.

Used by `local.py` for `reward_isolation: process`. One thread waits for each process; a call that
passes its deadline or crashes costs its process, which the next call replaces (FR-068).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nexrl import wire
from nexrl.blocking_pool import BlockingPool
from nexrl.errors import (
    ConfigError,
    DeadlineError,
    InvariantError,
    RewardError,
    ServiceError,
)
from nexrl.services.reward.protocol import RewardResult

_START_DEADLINE_S = 60.0
_END_DEADLINE_S = 2.0
_MAX_OUTPUT_BYTES = 256 * 1024
_TAIL_BYTES = 2000


class WorkerDiedError(Exception):
    """The process ended before it answered; the message says how, and what it printed last."""


class WorkerProcess:
    """One child process that holds the function. Every method blocks; one thread at a time.

    Invariant: between calls the process is idle and nothing is on its connection; after any error
    it must be killed, because it may still be busy.
    """

    def __init__(self, reference: str, name: str, recipe_dir: Path) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        ours, theirs = socket.socketpair()
        with theirs:
            module = "nexrl.services.reward.worker_process"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        self._connection = Connection(ours.detach())
        self._first = {"reference": reference, "name": name, "recipe_dir": str(recipe_dir)}
        self._first_mib = 0.0
        self._last_mib = 0.0

    def load(self) -> None:
        """Make the process load the function; ConfigError with its text when that fails."""
        try:
            answer = self.call(self._first, _START_DEADLINE_S)
        except TimeoutError as late:
            raise DeadlineError(
                f"reward function {self._first['name']} did not load within {_START_DEADLINE_S:g} s; "
                "its process was killed"
            ) from late
        if (error := answer.get("error")) is not None:
            raise ConfigError(error["message"])
        self._first_mib = self._last_mib

    def call(self, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """One request and its answer. Raises TimeoutError past the deadline, WorkerDiedError when
        the process ends first."""
        data = wire.pack(message)
        try:
            self._connection.send_bytes(data)
            if not self._connection.poll(deadline_s):
                raise TimeoutError
            answer: dict[str, Any] = wire.unpack(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise WorkerDiedError(self._describe_end()) from error
        self._last_mib = float(answer.get("memory_mib", self._last_mib))
        if os.fstat(self._output.fileno()).st_size > _MAX_OUTPUT_BYTES:
            os.ftruncate(self._output.fileno(), 0)
            os.lseek(self._output.fileno(), 0, os.SEEK_SET)
        return answer

    def kill(self) -> None:
        """End the process at once, whatever it does; wakes a thread that waits for it."""
        self._process.kill()

    def close(self) -> None:
        """Kill, collect, and release the connection."""
        self._process.kill()
        self._process.wait(timeout=_END_DEADLINE_S)
        self._connection.close()
        self._output.close()

    def _describe_end(self) -> str:
        """How the process ended, its memory, and the last it printed (FR-167)."""
        try:
            code = self._process.wait(timeout=_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            how = "closed its output without ending"
        else:
            how = f"ended with exit code {code}" if code >= 0 else f"was killed by {_signal(-code)}"
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        text = tail.decode(errors="replace").strip()
        return (
            f"process {self._process.pid} {how}; its memory peaked at {self._first_mib:.0f} MiB "
            f"after loading and {self._last_mib:.0f} MiB at its last answer; the host has "
            f"{_free_memory()} free" + (f"; it printed last:\n{text}" if text else "")
        )


class ProcessPool:
    """At most `num_workers` worker processes, started when needed.

    Invariant: a process is idle (in `_idle`) or serves exactly one call; one whose call did not end
    well is closed, never reused.
    """

    def __init__(
        self,
        reference: str,
        *,
        name: str,
        recipe_dir: Path,
        num_workers: int,
        deadline_s: float,
    ) -> None:
        self._reference = reference
        self._name = name
        self._recipe_dir = recipe_dir
        self._deadline_s = deadline_s
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._turns = asyncio.Semaphore(num_workers)
        self._threads = BlockingPool(num_workers, name=f"reward function {name}")
        self._closed = False

    async def call(self, text: str, keywords: dict[str, Any]) -> RewardResult:
        """Score one completion; see `RewardService.score`."""
        async with self._turns:
            message = {"text": text, "keywords": keywords}
            used: list[WorkerProcess] = []
            try:
                answer = await self._threads.run(lambda: self._call(message, used))
            except asyncio.CancelledError:
                for process in used:  # nobody wants its answer, and it may hang
                    process.kill()
                raise
        return _to_result(answer)

    async def aclose(self) -> None:
        """Kill all processes; idempotent."""
        self._closed = True
        for process in tuple(self._busy):
            process.kill()
        while self._idle:
            self._idle.pop().close()
        await self._threads.aclose()

    def _call(self, message: dict[str, Any], used: list[WorkerProcess]) -> dict[str, Any]:
        """In a thread: one call, on an idle process or a new one, told through `used`."""
        try:
            process, is_new = self._idle.pop(), False
        except IndexError:
            process, is_new = WorkerProcess(self._reference, self._name, self._recipe_dir), True
        self._busy.add(process)
        used.append(process)
        try:
            if is_new:
                process.load()
            answer = process.call(message, self._deadline_s)
        except Exception as error:  # noqa: BLE001 - explained and raised again
            process.close()
            raise self._explained(error) from None
        finally:
            self._busy.discard(process)
        if self._closed:
            process.close()
        else:
            self._idle.append(process)
        return answer

    def _explained(self, error: Exception) -> Exception:
        what = f"reward function {self._name}"
        if isinstance(error, TimeoutError):
            return DeadlineError(
                f"{what} took longer than {self._deadline_s:g} s "
                "(rollout_worker.reward_deadline_s); its process was killed"
            )
        if isinstance(error, WorkerDiedError):
            return RewardError(f"{what}: {error}")
        if isinstance(error, InvariantError):
            return RewardError(
                f"{what}: a column cannot be sent to its process: {error}; use "
                "rollout_worker.reward_isolation: thread"
            )
        return error


def _to_result(answer: dict[str, Any]) -> RewardResult:
    if (error := answer.get("error")) is None:
        return RewardResult(value=answer["value"], parts=answer["parts"])
    # The class itself stays in the other process; its name is what the ledger counts.
    cause = type(error["type"], (Exception,), {})(error["cause"])
    cause.add_note(error["traceback"])
    if error["is_infrastructure"]:
        raise ServiceError(error["message"]) from cause
    raise RewardError(error["message"]) from cause


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _free_memory() -> str:
    try:
        pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return "an unknown amount of memory"
    return f"{pages * size / 2**20:.0f} MiB"
