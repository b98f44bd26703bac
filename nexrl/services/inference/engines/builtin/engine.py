"""The engine, in a thread of its own.

Consumes requests and commands; produces events (tokens, ends) for `deliver`; waits for requests
and commands when there is nothing to draw or it is paused. Each turn starts waiting choices in free
slots (one prefill), then draws one token for every running choice; a finished one leaves at once.
A turn queues the next one behind what has been asked meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from nexrl.errors import ServiceError, WeightSyncError
from nexrl.services.inference.engines.builtin.batch import ActiveBatch
from nexrl.services.inference.engines.builtin.decoder import (
    BatchedDecoder,
    Draws,
    next_prefill,
)
from nexrl.services.inference.engines.builtin.request import (
    Choice,
    EndEvent,
    Event,
    Request,
    TokenEvent,
)
from nexrl.services.inference.engines.builtin.runner import ModelRunner
from nexrl.services.inference.engines.builtin.stop_text import Decode, StopText
from nexrl.services.inference.engines.builtin.weights import held_checksum, load, plan_load
from nexrl.types import (
    FinishReason,
    FloatArray,
    LoadAck,
    PauseMode,
    PolicyVersion,
    RowChunk,
    WeightManifest,
)

_PATIENCE_TURNS = 3
_FEW = 4

T = TypeVar("T")


@dataclass(slots=True)
class EngineCounts:
    """Running totals; written by the engine's thread, read by anyone."""

    prompt_tokens: int = 0
    """Tokens fed in prefills; a prompt shared by several choices counts once."""
    drawn_tokens: int = 0
    """Tokens drawn."""
    steps: int = 0
    """Decode steps."""


class Engine:
    """Continuous batching over one model.

    Invariants: only the engine's thread touches the model, the batch and the caches; every
    submitted request gets exactly one `EndEvent(choice=None)` unless it is cancelled; a token is
    stamped with the version that was active when it was drawn.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        version: PolicyVersion,
        deliver: Callable[[Sequence[Event]], None],
        decode: Decode,
        eos_token_ids: Iterable[int],
        max_batch: int,
        num_threads: int | None,
        make_decoder: Callable[[ModelRunner, int], BatchedDecoder],
    ) -> None:
        """`make_decoder` is called in the engine's thread, whose number of threads it depends on."""
        self._runner = runner
        self._deliver = deliver
        self._decode = decode
        self._is_eos = np.zeros(runner.vocab_size, np.bool_)
        self._is_eos[[i for i in eos_token_ids if i < runner.vocab_size]] = True
        self._batch = ActiveBatch(max_batch)
        self._waiting: deque[Choice] = deque()
        self._events: list[Event] = []
        self._loaded: PolicyVersion | None = version
        self._turns_waited = 0
        self.active_version = version
        """Version that tokens are stamped with."""
        self.paused = False
        """Whether no tokens are drawn."""
        self.failure: str | None = None
        """Why the engine has stopped for good; None while it is well."""
        self.counts = EngineCounts()
        self._turn_is_due = False
        # The number of threads is per thread in OpenMP, so it is set in the engine's own.
        set_threads = partial(torch.set_num_threads, num_threads) if num_threads else None
        self._thread = ThreadPoolExecutor(1, "nexrl-engine", set_threads)
        self.decoder = self._post(lambda: make_decoder(runner, max_batch)).result()

    # --- any thread -------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Choices in slots."""
        return self._batch.size

    @property
    def num_waiting(self) -> int:
        """Choices without a slot."""
        return len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Start requests; their events follow."""
        self._post_safely(lambda: self._accept(requests))

    def cancel(self, requests: Sequence[Request]) -> None:
        """Drop requests and free their slots; no event follows."""
        self._post_safely(lambda: self._drop(requests))

    async def call(self, command: Callable[[], T]) -> T:
        """One of the commands below, done in the engine's thread between two turns."""

        def run() -> T:
            if self.failure is not None:
                raise ServiceError(self.failure, retryable=True)
            return command()

        return await asyncio.wrap_future(self._post(run))

    def close(self) -> None:
        """End the thread, wait for it and fail what it had not finished; idempotent."""
        self._thread.shutdown()
        # Only now: what comes before the thread takes nothing any more would not be among it.
        self._fail_all("the inference engine was closed while the request ran")
        self._flush()

    def _post(self, work: Callable[[], T]) -> Future[T]:
        try:
            return self._thread.submit(self._run, work)
        except RuntimeError as error:
            raise ServiceError("the inference engine is closed", retryable=False) from error

    def _post_safely(self, work: Callable[[], None]) -> None:
        """Post what no caller waits for: a broken engine must answer its requests, not hang."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - told to every request, now and later
                self.failure = f"the inference engine failed: {type(error).__name__}: {error}"
                self._fail_all(self.failure)

        self._post(run)

    # --- the engine's thread ----------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, work: Callable[[], T]) -> T:
        """What was posted; then its events go out, and the next turn is due if there is work."""
        try:
            return work()
        finally:
            self._flush()
            if self._has_work() and not self._turn_is_due:
                self._turn_is_due = True
                with suppress(ServiceError):  # closed: what runs is about to fail
                    self._post_safely(self._turn)

    def _flush(self) -> None:
        events, self._events = self._events, []
        if events:
            self._deliver(events)

    def _has_work(self) -> bool:
        return not self.paused and bool(self._waiting or self._batch.size)

    def _turn(self) -> None:
        """Start waiting choices if there is room, then draw one token for every running one."""
        self._turn_is_due = False
        if not self._has_work():
            return
        batch = self._batch
        if self._is_time_to_start():
            self._turns_waited = 0
            prefill = next_prefill(self._waiting, batch.room)
            first = batch.size
            for choice in prefill.choices:
                choice.request.started = True
            batch.append(prefill.choices, self.active_version)
            self.counts.prompt_tokens += sum(len(c) for c in prefill.contexts)
            self._note(first, self.decoder.add(prefill, batch.draw_settings(first, batch.size)))
        if batch.size:
            draws = self.decoder.step(batch)
            batch.lengths[: batch.size] += 1
            self.counts.steps += 1
            self._note(0, draws)

    def _is_time_to_start(self) -> bool:
        """A few newcomers beside many running ones wait some turns for company: their prefill
        holds everybody up and costs hardly more for several prompts than for one."""
        if not self._waiting or not self._batch.room:
            return False
        self._turns_waited += 1
        few = _FEW * len(self._waiting) < self._batch.size
        return not few or self._turns_waited > _PATIENCE_TURNS

    def _note(self, first: int, draws: Draws) -> None:
        """Record the tokens drawn for rows from `first` on and let finished rows leave."""
        batch, (tokens, logprobs) = self._batch, draws
        last = batch.size
        self.counts.drawn_tokens += len(tokens)
        batch.record(first, last, tokens, logprobs)
        is_full = batch.drawn[first:last] >= batch.limits[first:last]
        endings: dict[int, FinishReason] = {}
        endings.update((first + int(i), "length") for i in np.flatnonzero(is_full))
        endings.update((first + int(i), "eos") for i in np.flatnonzero(self._is_eos[tokens]))
        for i in np.flatnonzero(batch.watched[first:last]):
            self._watch(first + int(i), endings)
        broken = {
            batch.choices[first + int(i)].request for i in np.flatnonzero(~np.isfinite(logprobs))
        }
        ended = [row for row in sorted(endings) if batch.choices[row].request not in broken]
        for row in ended:
            self._end(batch.save(row), endings[row])
        self._remove(ended)
        if broken:
            # A token made up from NaN helps nobody.
            message = "the model's logits are not finite (NaN or infinite weights or activations)"
            self._fail(broken, ServiceError(message, retryable=False))

    def _watch(self, row: int, endings: dict[int, FinishReason]) -> None:
        """The rows that need a look at each token: streaming, stop ids, stop strings."""
        choice, token = self._batch.choices[row], int(self._batch.last_tokens[row])
        request = choice.request
        if request.streamed:
            logprob = float(self._batch.logprobs[row, self._batch.drawn[row] - 1])
            self._events.append(TokenEvent(request, choice.index, token, logprob))
        stop = choice.stop_text.add(token) if choice.stop_text is not None else None
        if endings.get(row) == "eos":
            return
        if token in request.call.sampling.stop_token_ids:
            endings[row] = "stop_token"
        elif stop is not None:
            endings[row] = "stop_string"

    def _end(self, choice: Choice, reason: FinishReason) -> None:
        request = choice.request
        choice.finish_reason = reason
        request.num_open -= 1
        if request.streamed:
            self._events.append(EndEvent(request, choice.index))
        if request.num_open == 0:
            request.ended = True
            self._events.append(EndEvent(request, None))

    def _remove(self, rows: Sequence[int]) -> None:
        if rows:
            self.decoder.cache.keep(*self._batch.remove(rows))

    def _clear(self) -> None:
        self._batch = ActiveBatch(self._batch.max_size)
        self.decoder.cache.clear()

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        failing = [request for request in requests if not request.ended]
        self._events.extend(EndEvent(request, None, error) for request in failing)
        self._drop(failing)

    def _fail_all(self, reason: str) -> None:
        requests = dict.fromkeys(c.request for c in [*self._batch.choices, *self._waiting])
        for request in requests:
            request.ended = True
            self._events.append(EndEvent(request, None, ServiceError(reason, retryable=True)))
        self._waiting.clear()
        self._clear()

    def _accept(self, requests: Sequence[Request]) -> None:
        if self.failure is not None:
            self._fail(requests, ServiceError(self.failure, retryable=True))
            return
        for request in requests:
            sampling, room = (
                request.call.sampling,
                self._runner.max_context - len(request.call.prompt),
            )
            request.choices = [
                Choice(
                    request=request,
                    index=i,
                    limit=min(sampling.max_tokens, room),
                    stop_text=StopText(self._decode, sampling.stop) if sampling.stop else None,
                )
                for i in range(len(request.call.seeds))
            ]
            request.num_open = len(request.choices)
            self._waiting.extend(request.choices)

    def _drop(self, requests: Iterable[Request]) -> None:
        dropped = {request for request in requests if not request.ended}
        for request in dropped:
            request.ended = True
        self._waiting = deque(c for c in self._waiting if c.request not in dropped)
        self._remove([i for i, c in enumerate(self._batch.choices) if c.request in dropped])

    # --- commands, for `call` ---------------------------------------------------------------

    def score(self, chunk: RowChunk) -> FloatArray:
        """Log probabilities of given tokens; works while paused."""
        return self._runner.score(chunk, alone=self.decoder.is_deterministic)

    def pause(self, mode: PauseMode) -> None:
        """See `EngineControl.pause`."""
        self.paused = True
        if mode == "keep":
            return
        self._waiting.extendleft(self._batch.save(row) for row in reversed(range(self._batch.size)))
        self._clear()
        if mode == "abort":
            # Whole requests: one that kept some choices waiting would not return until resumed.
            ending = [c for c in self._waiting if c.request.started]
            self._waiting = deque(c for c in self._waiting if not c.request.started)
            for choice in ending:
                self._end(choice, "abort")

    def resume(self) -> None:
        """Draw again; refused while the loaded weights are not the active version's."""
        if self._loaded != self.active_version:
            raise WeightSyncError(
                f"resume refused: the engine holds weights of {self._loaded or 'a load that failed midway'}, "
                f"but {self.active_version} is active; load and activate a version first"
            )
        self.paused = False

    def load_weights(self, manifest: WeightManifest) -> LoadAck:
        """Load a publication; refused unless paused."""
        if not self.paused:
            raise WeightSyncError(f"load of {manifest.version} refused: pause the engine first")
        if manifest.version.policy != self.active_version.policy:
            raise WeightSyncError(
                f"load of {manifest.version} refused: this engine hosts policy {self.active_version.policy!r}"
            )
        files = plan_load(self._runner.model, manifest)
        self._loaded = None
        load(self._runner.model, files)
        self._loaded = manifest.version
        checksum = held_checksum(self._runner.model, manifest)
        return LoadAck(version=manifest.version, checksum=checksum)

    def activate(self, version: PolicyVersion) -> None:
        """Stamp tokens with the version loaded last."""
        if version != self._loaded:
            raise WeightSyncError(
                f"activation of {version} refused: {self._loaded or 'nothing whole'} was loaded last"
            )
        self.active_version = version
        self._batch.mark_all(version)
