"""`debug.dump`: a record of every message that crosses a Protocol, as a baseline for comparison.

The controller wraps a service with `recording(service, kind, recorder)`; the recorder appends each
call to dumps/<kind>.msgpack. A file is a sequence of messages, each a 4-byte little-endian length
and that many bytes of msgpack (`nexrl.wire`); the first message of each process is a header with the
configuration and the code version. Secrets are redacted.
"""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from nexrl import wire
from nexrl.config.redact import redact
from nexrl.errors import InvariantError, innermost_cause

T = TypeVar("T")
_LENGTH = struct.Struct("<I")
_REPR_LENGTH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedMessage:
    """One call of one method."""

    sequence: int
    """Order in which calls were made, over all kinds."""
    kind: str
    """inference, train, reward, pool or weights."""
    method: str
    """Name of the method."""
    step: int
    """Batch number that was current when the call was made."""
    started_s: float
    """Loop time of the call."""
    finished_s: float
    """Loop time of the answer."""
    arguments: Any
    """[positional, by name] as plain values and arrays."""
    result: Any
    """As plain values and arrays; None when it failed."""
    error: str
    """`ErrorType: message` of the innermost cause; empty when it did not fail."""


class DumpRecorder:
    """Appends messages of chosen kinds, at chosen steps.

    Invariant: a message is written whole and flushed before its caller goes on, so what a crash
    leaves is a readable file, at worst with a cut last message.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kinds: Collection[str],
        header: Mapping[str, Any],
        every_steps: int = 1,
        secrets: Collection[str] = (),
    ) -> None:
        """`header` holds at least the configuration (or its hash) and the code version."""
        self._folder = folder
        self.kinds = frozenset(kinds)
        self._header = header
        self._every_steps = every_steps
        self._secrets = secrets
        self._files: dict[str, IO[bytes]] = {}
        self._sequence = 0
        self.step = 0

    def begin_step(self, step: int) -> None:
        """Messages belong to this batch from now on."""
        self.step = step

    def next_sequence(self) -> int | None:
        """The number of a call that is about to be made; None when it is not to be recorded."""
        if self.step % self._every_steps:
            return None
        self._sequence += 1
        return self._sequence

    def write(self, message: DumpedMessage) -> None:
        """Append a message."""
        file = self._files.get(message.kind)
        if file is None:
            file = self._files[message.kind] = self._open(message.kind)
        self._append(file, _plain(message))

    def _open(self, kind: str) -> IO[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{kind}.msgpack"
        _cut_torn_end(path)
        file = path.open("ab")
        self._append(file, {"header": {**_plain(self._header), "kind": kind}})
        return file

    def _append(self, file: IO[bytes], value: Any) -> None:
        data = wire.pack(redact(value, secrets=self._secrets))
        file.write(_LENGTH.pack(len(data)) + data)
        file.flush()

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def recording(service: T, kind: str, recorder: DumpRecorder) -> T:
    """The same service with its public methods recorded; the service itself when not wanted."""
    return cast(T, _Recording(service, kind, recorder)) if kind in recorder.kinds else service


class _Recording:
    """Stands in front of any object; public methods, sync or async, are recorded."""

    def __init__(self, service: object, kind: str, recorder: DumpRecorder) -> None:
        self._service = service
        self._kind = kind
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._service, name)
        if name.startswith("_") or not callable(method):
            return method

        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            with self._noted(name, arguments, named) as answer:
                answer.append(method(*arguments, **named))
                return answer[0]

        @wraps(method)
        async def call_async(*arguments: Any, **named: Any) -> Any:
            with self._noted(name, arguments, named) as answer:
                answer.append(await method(*arguments, **named))
                return answer[0]

        wrapped = call_async if inspect.iscoroutinefunction(method) else call
        setattr(self, name, wrapped)
        return wrapped

    @contextmanager
    def _noted(
        self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Iterator[list[Any]]:
        """Order, time and arguments are taken on entry, for the callee may change them; the message
        is written on exit, with the answer that was put into the list or the error that passed."""
        sequence, step = self._recorder.next_sequence(), self._recorder.step
        answer: list[Any] = []
        if sequence is None:
            yield answer
            return
        clock = asyncio.get_running_loop().time
        started, failure = clock(), ""
        sent = [[_plain(a) for a in arguments], {k: _plain(v) for k, v in named.items()}]
        try:
            yield answer
        except BaseException as error:
            cause = innermost_cause(error)
            failure = f"{type(cause).__name__}: {cause}"
            raise
        finally:
            self._recorder.write(
                DumpedMessage(
                    sequence=sequence,
                    kind=self._kind,
                    method=method,
                    step=step,
                    started_s=started,
                    finished_s=clock(),
                    arguments=sent,
                    result=_plain(answer[0]) if answer else None,
                    error=failure,
                )
            )


def read_dump(path: Path) -> Iterator[DumpedMessage]:
    """Messages in the order in which they were answered; a last one cut by a crash is left out."""
    for message in _messages(path):
        if "header" not in message:
            yield wire.from_plain(DumpedMessage, message)


def read_headers(path: Path) -> list[dict[str, Any]]:
    """One header for each process that wrote to the file."""
    return [message["header"] for message in _messages(path) if "header" in message]


def _messages(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        while (data := _next_message(file)) is not None:
            yield wire.unpack(data)


def _next_message(file: IO[bytes]) -> bytes | None:
    """The next whole message; None at the end, also where the end is torn."""
    prefix = file.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        return None
    length: int = _LENGTH.unpack(prefix)[0]
    data = file.read(length)
    return data if len(data) == length else None


def _cut_torn_end(path: Path) -> None:
    """Drop a last message that a crash cut, so that what is appended can be read."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole = 0
        while _next_message(file) is not None:
            whole = file.tell()
        file.truncate(whole)


def _plain(value: Any) -> Any:
    """What `wire` can write; anything else as the text of its repr, so that a dump never stops a run."""
    try:
        return wire.to_plain(value)
    except InvariantError:
        return {"unsendable": type(value).__name__, "repr": repr(value)[:_REPR_LENGTH]}
