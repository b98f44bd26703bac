"""The inside of a reward worker process: loads one function, answers one call after another.

Started by `process_pool.py` as `python -m nexrl.services.reward.worker_process`. Messages are
msgpack with a four-byte length before each, on what was standard input and output; whatever user
code prints goes to standard error. The function runs in the main thread, where signals work.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import resource
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nexrl import wire
from nexrl.config.user_code import load_user_object
from nexrl.errors import classify, innermost_cause, user_frame
from nexrl.services.reward.result import to_result

_HEADER = struct.Struct("<I")


def write_message(descriptor: int, message: dict[str, Any]) -> None:
    """Send one message; raises InvariantError when a value cannot cross, OSError when nobody reads."""
    data = wire.pack(message)
    view = memoryview(_HEADER.pack(len(data)) + data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_message(read: Callable[[int], bytes]) -> dict[str, Any] | None:
    """The next message from `read(count)`, which answers with fewer bytes only at the end."""
    header = read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    data = read(size)
    if len(data) < size:
        return None
    message: dict[str, Any] = wire.unpack(data)
    return message


def _read_exactly(descriptor: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count and (part := os.read(descriptor, count - len(parts))):
        parts += part
    return bytes(parts)


def _receive(descriptor: int, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Consumes messages; ends the process with its parent, even while user code hangs."""
    while (message := read_message(lambda n: _read_exactly(descriptor, n))) is not None:
        inbox.put(message)
    os._exit(0)


def _error(error: BaseException) -> dict[str, Any]:
    cause = innermost_cause(error)
    return {
        "type": type(cause).__name__,
        "message": str(cause),
        "at": user_frame(error),
        "failure_class": classify(error).value,
        "traceback": "".join(traceback.format_exception(cause)),
        "checked": False,
    }


def _answer(function: Callable[..., Any], message: dict[str, Any], name: str) -> dict[str, Any]:
    try:
        returned = function(message["text"], **message["keywords"])
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        return {"error": _error(error)}
    try:
        result = to_result(returned, name)
    except Exception as error:  # noqa: BLE001 - told to the parent as it is
        return {"error": {**_error(error), "checked": True}}
    return {"value": result.value, "parts": dict(result.parts)}


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _memory_mib() -> float:
    """Peak resident memory of this process."""
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def main() -> None:
    """Serve until the parent closes its end."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, inbox), daemon=True).start()
    first = inbox.get()
    try:
        function = load_user_object(
            first["reference"], recipe_dir=Path(first["recipe_dir"]), key="rollout_worker.reward"
        )
    except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
        write_message(answers, {"error": _error(error)})
        return
    write_message(answers, {"ready": True, "memory_mib": _memory_mib()})
    while True:
        answer = _answer(function, inbox.get(), first["name"])
        sys.stdout.flush()
        write_message(answers, {**answer, "memory_mib": _memory_mib()})


if __name__ == "__main__":
    main()
