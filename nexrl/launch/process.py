"""A service as a supervised child process on loopback.

Consumes a command; produces a port once the child prints its ready line. The child's standard
input is held open: when this process dies, however it dies, the child sees the end of its input
and stops, so no orphan is left. Its output goes to a log file whose end is quoted when it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path

from nexrl.errors import DeadlineError, ServiceError
from nexrl.services.http import PARENT_PIPE_VARIABLE

TOKEN_VARIABLE = "NEXRL_SERVICE_TOKEN"  # noqa: S105 - the variable's name, not a secret
_LOG_LINES_QUOTED = 50
_DRAIN_DEADLINE_S = 1.0
"""Seconds in which the last output of a process that has ended must have arrived."""
_DRAIN_BYTES = 65_536
"""Read at once."""
THREAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""Threads of one service that spin at a barrier take the core that another service needs."""


class ChildProcess:
    """One supervised child. Invariant: after `aclose` the process has ended and was reaped."""

    def __init__(self, name: str, *, log: Path, shutdown_deadline_s: float) -> None:
        self.name = name
        self.log = log
        self.token = secrets.token_urlsafe(24)
        self.port = 0
        self._shutdown_deadline_s = shutdown_deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._input = -1  # its other end is the child's standard input; -1 is none
        self._output = asyncio.StreamReader()
        self._output_transport: asyncio.ReadTransport | None = None
        self._drain: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def url(self) -> str:
        """Base URL on loopback."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id; None before it starts."""
        return self._process.pid if self._process else None

    async def start(self, command: Sequence[str], *, start_deadline_s: float) -> None:
        """Start and wait for the ready line; ServiceError with the log's end when it exits first."""
        try:
            process = await self._spawn(command)
            async with asyncio.timeout(start_deadline_s):
                self.port = await self._ready_port(process)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name} was not ready within {start_deadline_s:g} s; {self._log_end()}"
            ) from error
        finally:
            if not self.port:
                await self.aclose()
        self._drain = asyncio.create_task(self._drain_output(), name=f"drain {self.name}")

    async def _spawn(self, command: Sequence[str]) -> asyncio.subprocess.Process:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # Pipes of our own: asyncio's `wait` also waits for its pipes to close, and what the child has
        # started may outlive it and hold them open.
        stdin, self._input = os.pipe()
        output, stdout = os.pipe()
        try:
            self._output_transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(self._output), os.fdopen(output, "rb")
            )
            with self.log.open("ab") as log_file:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=log_file,
                    env={
                        **THREAD_ENVIRONMENT,
                        **os.environ,
                        TOKEN_VARIABLE: self.token,
                        PARENT_PIPE_VARIABLE: "1",
                    },
                    # Ctrl-C in a terminal reaches the whole foreground group: only the controller
                    # decides when a service stops.
                    start_new_session=True,
                )
        finally:
            os.close(stdin)
            os.close(stdout)
        return self._process

    async def _ready_port(self, process: asyncio.subprocess.Process) -> int:
        reading = asyncio.create_task(self._read_port())
        ending = asyncio.create_task(process.wait())
        try:
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([reading], timeout=_DRAIN_DEADLINE_S)
            if reading.done() and (port := reading.result()):
                return port
            code = await ending
        finally:
            reading.cancel()
            ending.cancel()
        raise ServiceError(
            f"{self.name} ended before it was ready ({describe_exit(code)}); {self._log_end()}",
            retryable=False,
        )

    async def _read_port(self) -> int:
        """The port of the ready line; 0 when the output ends without one."""
        async for line in self._output:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict) and "ready" in message:
                    return int(message["port"])
            self._append_log(line)
        return 0

    async def _drain_output(self) -> None:
        # Not by lines: one beyond the reader's limit would end this, and the child, whose pipe is full
        # then, would hang in `print`.
        while output := await self._output.read(_DRAIN_BYTES):
            self._append_log(output)

    def _append_log(self, output: bytes) -> None:
        with self.log.open("ab") as log_file:
            log_file.write(output)

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES_QUOTED:]
        quoted = "\n".join(f"  | {line}" for line in lines) or "  | (empty)"
        return f"the end of {self.log}:\n{quoted}"

    async def supervise(self) -> None:
        """Wait for the end; raise ServiceError with exit status and log when nobody asked for it."""
        assert self._process is not None
        code = await self._process.wait()
        if not self._closing:
            raise ServiceError(
                f"{self.name} (pid {self._process.pid}) ended by itself: {describe_exit(code)}; "
                f"{self._log_end()}",
                retryable=False,
            )

    async def aclose(self) -> None:
        """Ask to stop, wait, kill; idempotent. Raises what kept output from the log."""
        self._closing = True
        if self._process is not None:
            await self._end(self._process)
        if self._drain is not None:
            # What the child has started may live on and hold its output open.
            await asyncio.wait([self._drain], timeout=_DRAIN_DEADLINE_S)
        if self._output_transport is not None:
            self._output_transport.close()
            self._output_transport = None
        if self._input >= 0:
            os.close(self._input)
            self._input = -1
        drain, self._drain = self._drain, None
        if drain is not None and not drain.cancel() and not drain.cancelled():
            drain.result()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(self._shutdown_deadline_s):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        await process.wait()


def describe_exit(code: int) -> str:
    """`exit code 3` or `killed by SIGKILL (the system may have been out of memory)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system may have been out of memory)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
