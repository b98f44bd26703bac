"""The HTTP shell that every service shares: a server skeleton and a client base on aiohttp.

Server: loopback by default, a bearer token beyond it, errors as JSON with class and retryability,
a ready line on standard output so that a launcher learns the port (port 0: the system chooses).
Client: one pooled session, no environment proxies, separate connect and request deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import aiohttp
from aiohttp import web

from nexrl import errors
from nexrl.errors import (
    ConfigError,
    ContextOverflowError,
    DeadlineError,
    InfrastructureError,
    InvariantError,
    NexRLError,
    ServiceError,
    innermost_cause,
)

MAX_BODY_BYTES = 1 << 30
_MANY_FILES = 65_536
_ANSWERS_GRACE_S = 0.2
"""Seconds that requests in progress have to answer once a server is told to stop."""
PARENT_PIPE_VARIABLE = "NEXRL_PARENT_PIPE"
"""Set to 1 by a launcher that holds our standard input: when it goes away, so do we."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS_BY_ERROR: tuple[tuple[type[BaseException], int], ...] = (
    (ContextOverflowError, 400),
    (ConfigError, 400),
    (InvariantError, 422),
    (DeadlineError, 504),
    (NexRLError, 500),
)


def error_body(error: BaseException) -> dict[str, Any]:
    """The JSON that stands for an error; OpenAI clients read `error.message`."""
    cause = error if isinstance(error, NexRLError) else innermost_cause(error)
    return {
        "error": {
            "message": str(cause) or type(cause).__name__,
            "type": type(cause).__name__,
            "retryable": bool(getattr(cause, "retryable", False)),
        }
    }


def status_of(error: BaseException) -> int:
    """The HTTP status that stands for an error."""
    return next((s for kind, s in _STATUS_BY_ERROR if isinstance(error, kind)), 500)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        body = {"error": {"message": error.reason, "type": "HTTPError", "retryable": False}}
        return web.json_response(body, status=error.status)
    except Exception as error:  # noqa: BLE001 - the border of the process: every error becomes an answer
        return web.json_response(error_body(error), status=status_of(error))


def _require_token(token: str) -> Any:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path != "/health" and not hmac.compare_digest(sent.encode(), token.encode()):
            raise web.HTTPUnauthorized(reason="missing or wrong bearer token")
        return await handler(request)

    return middleware


def make_app(*, token: str | None = None) -> web.Application:
    """An empty application with the error and token rules in place."""
    middlewares = [_errors_as_json]
    if token:
        middlewares.append(_require_token(token))
    return web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)


def bind(host: str, port: int, *, token: str | None, setting: str) -> socket.socket:
    """A listening socket; refuses to leave loopback without a token, names the setting on conflict."""
    if host not in LOOPBACK and not token:
        raise ConfigError(
            f"{setting}: listening on {host!r} needs a token (accepted without one: {LOOPBACK})"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"{setting}: cannot listen on {host}:{port}: {error.strerror} (0 lets the system choose a port)"
        ) from error
    sock.listen(1024)
    allow_many_connections()
    return sock


def allow_many_connections() -> None:
    """Raise this process's limit of open files to what the system permits.

    The usual default of 1,024 is below the connections of 1,024 concurrent rollouts (FR-148).
    """
    try:
        import resource
    except ImportError:
        return  # not a Unix: there is no such limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else _MANY_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a container may forbid it: keep what is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve(app: web.Application, sock: socket.socket, *, name: str) -> None:
    """Serve until SIGTERM, SIGINT or the launcher's end; prints one JSON ready line with the port.

    The handler's task is cancelled when its client goes away, so an abandoned request stops work.
    """
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=_ANSWERS_GRACE_S
    )
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    if os.environ.get(PARENT_PIPE_VARIABLE) == "1":
        await _stop_with_parent(stop)
    try:
        await web.SockSite(runner, sock).start()
        port = sock.getsockname()[1]
        print(json.dumps({"ready": name, "port": port}), flush=True)  # noqa: T201 - read by the launcher
        await stop.wait()
    finally:
        await runner.cleanup()


def end_process(code: int) -> NoReturn:
    """Leave a service's process whose resources are closed.

    The interpreter's own teardown takes up to a second once torch is loaded, and a person who
    pressed Ctrl-C waits for it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _stop_with_parent(stop: asyncio.Event) -> None:
    """Set `stop` when standard input closes, so that a killed launcher leaves no orphan."""

    class _EndOfInput(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            stop.set()

    await asyncio.get_running_loop().connect_read_pipe(_EndOfInput, sys.stdin)


class HttpClient:
    """Thin pooled client; raises our errors, never aiohttp's.

    Invariant: after `aclose` no connection is open; every request ends within its deadline.
    """

    def __init__(
        self,
        base_url: str,
        *,
        name: str,
        token: str | None = None,
        connect_deadline_s: float = 30.0,
        request_deadline_s: float = 120.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._name = name
        self._token = token
        self._connect_s = connect_deadline_s
        self._request_s = request_deadline_s
        self._session: aiohttp.ClientSession | None = None

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            allow_many_connections()
            # limit=0: as many connections as rollouts run at once; a pool of 100 starves them (FR-148).
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
                headers=headers,
                trust_env=False,
            )
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        content_type: str = "application/json",
        deadline_s: float | None = None,
    ) -> bytes:
        """One request; the body of a 2xx answer, else the service's error as ours."""
        async with self.open(
            method, path, body=body, content_type=content_type, deadline_s=deadline_s
        ) as response:
            return await response.read()

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        content_type: str = "application/json",
        deadline_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request whose answer is read inside the block, under the same deadline and with the
        same errors; leaving the block before the answer's end closes the connection."""
        deadline = self._request_s if deadline_s is None else deadline_s
        timeout = aiohttp.ClientTimeout(total=deadline, sock_connect=self._connect_s)
        headers = {"Content-Type": content_type} if body is not None else {}
        url = self.base_url + path
        try:
            async with self._get_session().request(
                method, url, data=body, headers=headers, timeout=timeout
            ) as response:
                if response.status >= 300:
                    answer = await response.read()
                    raise error_from_answer(self._name, url, response.status, answer)
                yield response
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._name}: {method} {url} did not answer within {deadline:g} s"
            ) from error
        except aiohttp.ClientError as error:
            raise ServiceError(
                f"{self._name}: {method} {url}: {type(error).__name__}: {error}", retryable=True
            ) from error

    async def request_json(
        self, method: str, path: str, body: Any = None, *, deadline_s: float | None = None
    ) -> Any:
        """JSON in, JSON out."""
        data = None if body is None else json.dumps(body).encode()
        answer = await self.request(method, path, body=data, deadline_s=deadline_s)
        try:
            return json.loads(answer) if answer else None
        except ValueError as error:
            raise InfrastructureError(
                f"{self._name}: {self.base_url + path} answered something that is not JSON: {answer[:200]!r}"
            ) from error

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def error_from_answer(name: str, url: str, status: int, answer: bytes) -> NexRLError:
    """Our error for a non-2xx answer, with the service's own text in it."""
    kind, message = "", answer[:2000].decode(errors="replace")
    retryable = status >= 500 or status in (408, 429)
    try:
        error = json.loads(answer)["error"]
        kind, message = str(error.get("type", "")), str(error.get("message", message))
        retryable = bool(error.get("retryable", retryable))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # not our JSON: the raw text is the message
    text = f"{name}: {url} answered {status}: {message}"
    known = getattr(errors, kind, None)
    if known in (ContextOverflowError, ConfigError, InvariantError, DeadlineError):
        return known(text)  # type: ignore[no-any-return]
    return ServiceError(text, status=status, retryable=retryable)
