"""The engine's loop, in a thread of its own.

Consumes requests and commands from its inbox; produces events (tokens, ends) for `deliver`; waits
for the inbox when there is nothing to draw or it is paused; woken by `submit`, `cancel`, `call` and
`close`. Each turn starts waiting choices in free slots (one prefill), then draws one token for every
running choice; a finished one leaves at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from nexrl.errors import ServiceError, WeightSyncError
from nexrl.services.inference.engines.builtin.batch import ActiveBatch
from nexrl.services.inference.engines.builtin.decoder import (
    Decoder,
    Draws,
    next_prefill,
)
from nexrl.services.inference.engines.builtin.request import (
    Choice,
    Drawn,
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

P = ParamSpec("P")
T = TypeVar("T")
Ending = tuple[FinishReason, int | str | None]


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
        make_decoder: Callable[[ModelRunner, int], Decoder],
    ) -> None:
        """`make_decoder` is called in the engine's thread, whose number of threads it depends on."""
        self._runner = runner
        self._deliver = deliver
        self._decode = decode
        self._num_threads = num_threads
        self._is_eos = np.zeros(runner.vocab_size, np.bool_)
        self._is_eos[[i for i in eos_token_ids if i < runner.vocab_size]] = True
        self._batch = ActiveBatch(max_batch)
        self._waiting: deque[Choice] = deque()
        self._events: list[Event] = []
        self._paused = False
        self._active: PolicyVersion = version
        self._loaded: PolicyVersion | None = version
        self._failure: str | None = None
        self._turns_waited = 0
        self.counts = EngineCounts()
        self._inbox: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._closing = False
        made: Future[Decoder] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make_decoder, made), name="nexrl-engine", daemon=True
        )
        self._thread.start()
        self._decoder: Decoder = made.result()

    # --- any thread -------------------------------------------------------------------------

    @property
    def active_version(self) -> PolicyVersion:
        """Version that tokens are stamped with."""
        return self._active

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped for good; None while it is well."""
        return self._failure

    @property
    def decoder_name(self) -> str:
        """How sequences are decoded."""
        return self._decoder.name

    @property
    def num_running(self) -> int:
        """Choices in slots."""
        return self._batch.size

    @property
    def num_waiting(self) -> int:
        """Choices without a slot."""
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        """Whether no tokens are drawn."""
        return self._paused

    def submit(self, requests: Sequence[Request]) -> None:
        """Start requests; their events follow."""
        self._post(lambda: self._accept(requests))

    def cancel(self, requests: Sequence[Request]) -> None:
        """Drop requests and free their slots; no event follows."""
        self._post(lambda: self._drop(requests))

    def call(self, command: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """One of the commands below, done in the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._failure is not None:
                    raise ServiceError(self._failure, retryable=True)
                result = command(*arguments, **named)
            except Exception as error:  # noqa: BLE001 - the caller's error, raised where it waits
                future.set_exception(error)
            else:
                future.set_result(result)

        self._post(run)
        return future

    def close(self) -> None:
        """Fail what is running, end the thread and wait for it; idempotent."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()

    def _post(self, item: Callable[[], None]) -> None:
        with self._condition:
            if self._closing:
                raise ServiceError("the inference engine is closed", retryable=False)
            self._inbox.append(item)
            self._condition.notify()

    # --- the engine's thread ----------------------------------------------------------------

    @torch.inference_mode()
    def _run(
        self, make_decoder: Callable[[ModelRunner, int], Decoder], made: Future[Decoder]
    ) -> None:
        if self._num_threads is not None:
            # Per thread in OpenMP, so set here and not where the engine is made.
            torch.set_num_threads(self._num_threads)
        try:
            made.set_result(make_decoder(self._runner, self._batch.max_size))
        except Exception as error:  # noqa: BLE001 - raised in the constructor, which waits for it
            made.set_exception(error)
            return
        closing = False
        while not closing:
            with self._condition:
                while not (self._inbox or self._closing or self._has_work()):
                    self._condition.wait()
                inbox, self._inbox, closing = self._inbox, deque(), self._closing
            try:
                for item in inbox:
                    item()
                if not closing and self._has_work():
                    self._turn()
            except Exception as error:  # noqa: BLE001 - a broken engine must answer, not hang
                self._failure = f"the inference engine failed: {type(error).__name__}: {error}"
                self._fail_all(self._failure)
            if closing:
                self._fail_all("the inference engine was closed while the request ran")
            self._flush()

    def _has_work(self) -> bool:
        return not self._paused and bool(self._waiting or self._batch.size)

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _turn(self) -> None:
        """Start waiting choices if there is room, then draw one token for every running one."""
        batch = self._batch
        if self._is_time_to_start():
            self._turns_waited = 0
            prefill = next_prefill(self._waiting, batch.room)
            first = batch.size
            for choice in prefill.choices:
                choice.request.started = True
            batch.append(prefill.choices, self._active)
            self.counts.prompt_tokens += sum(len(c) for c in prefill.contexts)
            self._note(first, self._decoder.add(prefill, batch.draw_settings(first, batch.size)))
        if batch.size:
            draws = self._decoder.step(batch)
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
        is_eos = self._is_eos[tokens]
        is_full = batch.drawn[first:last] >= batch.limits[first:last]
        endings: dict[int, Ending] = {
            int(i) + first: ("length", None) for i in np.flatnonzero(is_full)
        }
        endings.update({int(i) + first: ("eos", None) for i in np.flatnonzero(is_eos)})
        for i in np.flatnonzero(batch.watched[first:last]):
            self._watch(int(i) + first, endings)
        broken = {
            batch.choices[first + int(i)].request for i in np.flatnonzero(~np.isfinite(logprobs))
        }
        ended = [row for row in sorted(endings) if batch.choices[row].request not in broken]
        for row in ended:
            self._end(row, *endings[row])
        if ended:
            self._remove(np.array(ended, np.int64))
        if broken:
            # A token made up from NaN helps nobody.
            message = "the model's logits are not finite (NaN or infinite weights or activations)"
            self._fail(broken, ServiceError(message, retryable=False))

    def _watch(self, row: int, endings: dict[int, Ending]) -> None:
        """The rows that need a look at each token: streaming, stop ids, stop strings."""
        choice, token = self._batch.choices[row], int(self._batch.last_tokens[row])
        request = choice.request
        if request.streamed:
            logprob = float(self._batch.logprobs[row, self._batch.drawn[row] - 1])
            self._events.append(TokenEvent(request, choice.index, token, logprob))
        stop = choice.stop_text.add(token) if choice.stop_text is not None else None
        if endings.get(row, ("", None))[0] == "eos":
            return
        if token in request.sampling.stop_token_ids:
            endings[row] = ("stop_token", token)
        elif stop is not None:
            endings[row] = ("stop_string", stop)

    def _end(self, row: int, reason: FinishReason, stop: int | str | None) -> None:
        num_drawn, choice = int(self._batch.drawn[row]), self._batch.choices[row]
        choice.token_ids = self._batch.tokens[row, :num_drawn].copy()
        choice.logprobs = self._batch.logprobs[row, :num_drawn].copy()
        self._end_choice(choice, reason, stop)

    def _end_choice(
        self, choice: Choice, reason: FinishReason, stop: int | str | None = None
    ) -> None:
        request = choice.request
        request.results[choice.index] = Drawn(
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            versions=choice.spans(len(choice.token_ids)),
            finish_reason=reason,
            stop=stop,
        )
        request.num_open -= 1
        if request.streamed:
            self._events.append(EndEvent(request, choice.index))
        if request.num_open == 0:
            request.ended = True
            self._events.append(EndEvent(request, None))

    def _remove(self, rows: npt.NDArray[np.int64]) -> None:
        self._decoder.keep(*self._batch.remove(rows))

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
        self._batch = ActiveBatch(self._batch.max_size)
        self._decoder.clear()

    def _accept(self, requests: Sequence[Request]) -> None:
        if self._failure is not None:
            self._fail(requests, ServiceError(self._failure, retryable=True))
            return
        for request in requests:
            limit = min(request.sampling.max_tokens, self._runner.max_context - len(request.prompt))
            stops = request.sampling.stop
            for i in range(len(request.seeds)):
                stop_text = StopText(self._decode, stops) if stops else None
                self._waiting.append(
                    Choice(request=request, index=i, limit=limit, stop_text=stop_text)
                )

    def _drop(self, requests: Iterable[Request]) -> None:
        dropped = {request for request in requests if not request.ended}
        for request in dropped:
            request.ended = True
        self._waiting = deque(c for c in self._waiting if c.request not in dropped)
        rows = [i for i, c in enumerate(self._batch.choices) if c.request in dropped]
        if rows:
            self._remove(np.array(rows, np.int64))

    # --- commands, for `call` ---------------------------------------------------------------

    def score(self, chunk: RowChunk) -> FloatArray:
        """Log probabilities of given tokens; works while paused."""
        return self._runner.score(chunk, alone=not self._decoder.batched)

    def pause(self, mode: PauseMode) -> None:
        """See `EngineControl.pause`."""
        self._paused = True
        if mode == "keep":
            return
        batch = self._batch
        put_back = batch.choices
        for row, choice in enumerate(put_back):
            num_drawn = int(batch.drawn[row])
            choice.token_ids = batch.tokens[row, :num_drawn].copy()
            choice.logprobs = batch.logprobs[row, :num_drawn].copy()
        self._waiting.extendleft(reversed(put_back))
        self._batch = ActiveBatch(batch.max_size)
        self._decoder.clear()
        if mode == "abort":
            # Whole requests: one that kept some choices waiting would not return until resumed.
            ending = [c for c in self._waiting if c.request.started]
            self._waiting = deque(c for c in self._waiting if not c.request.started)
            for choice in ending:
                self._end_choice(choice, "abort")

    def resume(self) -> None:
        """Draw again; refused while the loaded weights are not the active version's."""
        if self._loaded != self._active:
            raise WeightSyncError(
                f"resume refused: the engine holds weights of {self._loaded or 'a load that failed midway'}, "
                f"but {self._active} is active; load and activate a version first"
            )
        self._paused = False

    def load_weights(self, manifest: WeightManifest) -> LoadAck:
        """Load a publication; refused unless paused."""
        if not self._paused:
            raise WeightSyncError(f"load of {manifest.version} refused: pause the engine first")
        if manifest.version.policy != self._active.policy:
            raise WeightSyncError(
                f"load of {manifest.version} refused: this engine hosts policy {self._active.policy!r}"
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
        self._active = version
        self._batch.mark_all(version)
