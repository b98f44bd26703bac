"""`TrainService` over HTTP: thin, ordered, and safe to retry.

Consumes calls of the trainer, produces requests to `server.py`. Calls may overlap: each takes its
number when it starts, and the server makes them take effect in that order, once each.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

from nexrl.errors import DeadlineError, NexRLError, ServiceError
from nexrl.services.http import HttpClient
from nexrl.services.train.messages import CONTENT_TYPE
from nexrl.types import (
    BackwardOutput,
    FloatArray,
    ForwardOutput,
    LossSpec,
    ModelSpec,
    OptimParams,
    OptimResult,
    PolicyVersion,
    RowChunk,
    TrainInfo,
    WeightManifest,
)
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


class HttpTrainService:
    """A `TrainService` that lives behind a URL.

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
        connect_deadline_s: float = 30.0,
    ) -> None:
        self._request_deadline_s = request_deadline_s
        self._http = HttpClient(
            url,
            name="train service",
            token=token,
            connect_deadline_s=connect_deadline_s,
            request_deadline_s=request_deadline_s,
        )
        self._client_id = uuid.uuid4().hex
        self._sequences: dict[str, _Sequence] = {}
        self._gap_fillers: set[asyncio.Task[None]] = set()

    # --- verbs --------------------------------------------------------------------------------

    async def create(self, spec: ModelSpec) -> TrainInfo:
        """Load a model under a policy name."""
        return from_plain(TrainInfo, await self._call(spec.policy, "create", spec=spec))

    async def forward(
        self, policy: str, chunk: RowChunk, *, outputs: tuple[str, ...] = ("logprobs",)
    ) -> ForwardOutput:
        """Named per-token outputs without gradients."""
        result = await self._call(policy, "forward", chunk=chunk, outputs=outputs)
        return from_plain(ForwardOutput, result)

    async def forward_backward(
        self,
        policy: str,
        chunk: RowChunk,
        loss: LossSpec,
        *,
        outputs: tuple[str, ...] = ("logprobs",),
    ) -> BackwardOutput:
        """Add the gradient of a named loss."""
        result = await self._call(
            policy, "forward_backward", chunk=chunk, loss=loss, outputs=outputs
        )
        return from_plain(BackwardOutput, result)

    async def backward(
        self, policy: str, chunk: RowChunk, gradients: Mapping[str, FloatArray]
    ) -> BackwardOutput:
        """Add the gradient of sum over outputs o of <gradients[o], o>."""
        result = await self._call(policy, "backward", chunk=chunk, gradients=gradients)
        return from_plain(BackwardOutput, result)

    async def optim_step(self, policy: str, params: OptimParams) -> OptimResult:
        """Clip, step, and zero the gradient; applied once, whatever the connection does."""
        return from_plain(OptimResult, await self._call(policy, "optim_step", params=params))

    async def save_state(self, policy: str, path: str) -> None:
        """Write the whole state to a folder that the server can reach."""
        await self._call(policy, "save_state", path=path)

    async def load_state(self, policy: str, path: str, *, with_optimizer: bool = True) -> TrainInfo:
        """Read a folder of `save_state`."""
        result = await self._call(policy, "load_state", path=path, with_optimizer=with_optimizer)
        return from_plain(TrainInfo, result)

    async def publish_weights(
        self, policy: str, version: PolicyVersion, path: str, *, unchanged: bool = False
    ) -> WeightManifest:
        """Write a publication to a folder that the server can reach."""
        result = await self._call(
            policy, "publish_weights", version=version, path=path, unchanged=unchanged
        )
        return from_plain(WeightManifest, result)

    async def reset_optimizer(self, policy: str) -> None:
        """Forget optimizer moments and accumulated gradients."""
        await self._call(policy, "reset_optimizer")

    async def info(self, policy: str) -> TrainInfo:
        """Sizes, counters and time spent."""
        return from_plain(TrainInfo, await self._call(policy, "info"))

    async def aclose(self) -> None:
        """Close connections; the server and its models live on. Idempotent."""
        for task in list(self._gap_fillers):
            task.cancel()
        await asyncio.gather(*self._gap_fillers, return_exceptions=True)
        await self._http.aclose()

    # --- order and retries --------------------------------------------------------------------

    async def _call(self, policy: str, verb: str, **arguments: Any) -> Any:
        """One call. Its number is taken before anything is awaited: calls are ordered by start."""
        sequence = self._sequences.setdefault(policy, _Sequence())
        seq = sequence.start()
        deadline = asyncio.get_running_loop().time() + self._request_deadline_s
        plain = to_plain(arguments)
        try:
            answer = await self._send(policy, verb, seq, sequence, plain, deadline)
        except BaseException as error:
            if _may_not_have_arrived(error):
                self._fill_gap(policy, seq, sequence)
            else:
                sequence.open.discard(seq)
            raise
        sequence.open.discard(seq)
        return unpack(answer)["result"]

    async def _send(
        self,
        policy: str,
        verb: str,
        seq: int,
        sequence: _Sequence,
        arguments: Any,
        deadline: float,
    ) -> bytes:
        """Send until an answer comes; a repeated call has the same number, so it runs once."""
        loop = asyncio.get_running_loop()
        delay = FIRST_RETRY_DELAY_S
        while True:
            body = pack(
                {
                    "client": self._client_id,
                    "seq": seq,
                    "acknowledged": sequence.acknowledged,
                    "arguments": arguments,
                }
            )
            try:
                return await self._http.request(
                    "POST",
                    f"/v1/policies/{policy}/{verb}",
                    body=body,
                    content_type=CONTENT_TYPE,
                    deadline_s=max(0.001, deadline - loop.time()),
                )
            except ServiceError as error:
                # With a status the service has answered; without one the connection failed.
                if error.status is not None or loop.time() + delay >= deadline:
                    raise
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_DELAY_S)

    def _fill_gap(self, policy: str, seq: int, sequence: _Sequence) -> None:
        """Use up a number whose call may never have reached the server."""
        task = asyncio.create_task(self._send_filler(policy, seq, sequence))
        self._gap_fillers.add(task)
        task.add_done_callback(self._gap_fillers.discard)

    async def _send_filler(self, policy: str, seq: int, sequence: _Sequence) -> None:
        deadline = asyncio.get_running_loop().time() + GAP_DEADLINE_S
        try:
            await self._send(policy, "info", seq, sequence, {}, deadline)
        except NexRLError:
            pass  # the service is away: the calls that wait for this number say so themselves
        finally:
            sequence.open.discard(seq)


def _may_not_have_arrived(error: BaseException) -> bool:
    if isinstance(error, ServiceError):
        return error.status is None
    return isinstance(error, asyncio.CancelledError | DeadlineError)
