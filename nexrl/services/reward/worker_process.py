"""The inside of a reward worker process: loads one function, answers one call after another.

Started by `process_pool.py` with the descriptor of a connection as its argument; messages on it are
msgpack. The function runs in the main thread, where signals work.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nexrl import wire
from nexrl.config.user_code import load_user_object
from nexrl.errors import FailureClass, classify, innermost_cause
from nexrl.services.reward.result import to_result
from nexrl.services.reward.user_call import raised


def _receive(requests: Connection, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Consumes messages; ends the process with its parent, even while user code hangs."""
    while True:
        try:
            inbox.put(wire.unpack(requests.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)


def _error(error: BaseException) -> dict[str, Any]:
    cause = innermost_cause(error)
    return {
        "message": str(error),
        "is_infrastructure": classify(error) is FailureClass.INFRASTRUCTURE,
        "type": type(cause).__name__,
        "cause": str(cause),
        "traceback": "".join(traceback.format_exception(cause)),
    }


def _answer(function: Callable[..., Any], message: dict[str, Any], name: str) -> dict[str, Any]:
    try:
        try:
            returned = function(message["text"], **message["keywords"])
            if inspect.isawaitable(returned):
                returned = asyncio.run(_awaited(returned))
        except (Exception, SystemExit) as error:
            raise raised(f"reward function {name}", error) from error
        result = to_result(returned, name)
    except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
        return {"error": _error(error)}
    return {"value": result.value, "parts": dict(result.parts)}


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _memory_mib() -> float:
    """Peak resident memory of this process."""
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def main() -> None:
    """Serve until the parent closes its end."""
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    first = inbox.get()
    try:
        function = load_user_object(
            first["reference"], recipe_dir=Path(first["recipe_dir"]), key="rollout_worker.reward"
        )
    except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
        connection.send_bytes(wire.pack({"error": _error(error)}))
        return
    connection.send_bytes(wire.pack({"memory_mib": _memory_mib()}))
    while True:
        answer = _answer(function, inbox.get(), first["name"])
        sys.stdout.flush()
        connection.send_bytes(wire.pack({**answer, "memory_mib": _memory_mib()}))


if __name__ == "__main__":
    main()
