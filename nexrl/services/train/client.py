"""`TrainService` over HTTP: thin, ordered, and safe to retry.

Consumes calls of the trainer, produces requests to `server.py`. Calls may overlap: each takes its
number when it starts, and the server makes them take effect in that order, once each.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, TypeVar

from nexrl.errors import DeadlineError, NexRLError, ServiceError
from nexrl.services.http import HttpClient
from nexrl.services.train.messages import CONTENT_TYPE
from nexrl.services.train.verbs import TrainVerbs
from nexrl.wire import from_plain, pack, to_plain, unpack

T = TypeVar("T")
FIRST_RETRY_DELAY_S = 0.2
MAX_RETRY_DELAY_S = 5.0
GAP_DEADLINE_S = 5.0


class _Sequence:
    """Numbers of one policy's calls. Invariant: `open` holds the numbers without an answer."""

    def __init__(self) -> None:
        self._next = 0
        self.open: set[int] = set()

    def start(self) -> int:
        seq = self._next
        self._next += 1
        self.open.add(seq)
        return seq

    @property
    def acknowledged(self) -> int:
        """Every call below this number is over."""
        return min(self.open, default=self._next)


class HttpTrainService(TrainVerbs):
    """A `TrainService` that lives behind a URL; paths are folders that the server can reach.

    Invariant: a call is repeated, with its number, only while no answer has come and its deadline
    has not passed; an answer, also an error, is final. A number that is given up is used for a
    harmless call, so that later calls are not kept waiting for it.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        request_deadline_s: float = 1800.0,
    ) -> None:
        self._request_deadline_s = request_deadline_s
        self._http = HttpClient(url, name="train service", token=token)
        self._client_id = uuid.uuid4().hex
        self._sequences: dict[str, _Sequence] = {}
        self._gap_fillers: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Close connections; the server and its models live on. Idempotent."""
        for task in list(self._gap_fillers):
            task.cancel()
        await asyncio.gather(*self._gap_fillers, return_exceptions=True)
        await self._http.aclose()

    async def _call(self, result: type[T], policy: str, verb: str, **arguments: Any) -> T:
        plain = to_plain(arguments)  # what cannot be sent takes no number
        sequence = self._sequences.setdefault(policy, _Sequence())
        seq = sequence.start()
        try:
            answer = await self._send(policy, verb, seq, plain, self._request_deadline_s)
        except BaseException as error:
            if _is_answer(error):
                sequence.open.discard(seq)
            else:  # it may never have reached the server
                task = asyncio.create_task(self._fill_gap(policy, seq))
                self._gap_fillers.add(task)
                task.add_done_callback(self._gap_fillers.discard)
            raise
        sequence.open.discard(seq)
        return from_plain(result, unpack(answer)["result"])

    async def _send(
        self, policy: str, verb: str, seq: int, arguments: Any, deadline_s: float
    ) -> bytes:
        """Send until an answer comes; a repeated call has the same number, so it runs once."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        delay = FIRST_RETRY_DELAY_S
        while True:
            envelope = {
                "client": self._client_id,
                "seq": seq,
                "acknowledged": self._sequences[policy].acknowledged,
                "arguments": arguments,
            }
            try:
                return await self._http.request(
                    "POST",
                    f"/v1/policies/{policy}/{verb}",
                    body=pack(envelope),
                    content_type=CONTENT_TYPE,
                    deadline_s=max(0.001, deadline - loop.time()),
                )
            except ServiceError as error:
                if _is_answer(error) or loop.time() + delay >= deadline:
                    raise
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_DELAY_S)

    async def _fill_gap(self, policy: str, seq: int) -> None:
        """Use up a number whose call may never have reached the server."""
        try:
            await self._send(policy, "info", seq, {}, GAP_DEADLINE_S)
        except NexRLError:
            pass  # the service is away: the calls that wait for this number say so themselves
        finally:
            self._sequences[policy].open.discard(seq)


def _is_answer(error: BaseException) -> bool:
    """Whether the service itself has said it: with a status, or as an error of ours."""
    if isinstance(error, ServiceError):
        return error.status is not None
    return isinstance(error, NexRLError) and not isinstance(error, DeadlineError)
