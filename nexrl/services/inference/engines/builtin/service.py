"""The builtin engine as an `InferenceService`: in process, and inside the HTTP server.

Asks on the event loop, draws in the engine's thread, answers on the loop again: finished requests
of one engine step come back in one wake-up.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import numpy as np
import torch
import transformers

import nexrl
from nexrl.config.schema import InferenceServiceConfig
from nexrl.errors import (
    ConfigError,
    ContextOverflowError,
    DeadlineError,
    NexRLError,
    ServiceError,
)
from nexrl.rendering.renderer import HfRenderer, load_renderer
from nexrl.services.inference.engines.builtin.decoder import (
    BatchedDecoder,
    make_deterministic_decoder,
)
from nexrl.services.inference.engines.builtin.engine import Engine, EngineCounts
from nexrl.services.inference.engines.builtin.request import (
    Drawn,
    EndEvent,
    Event,
    Request,
    TokenEvent,
)
from nexrl.services.inference.engines.builtin.runner import ModelRunner
from nexrl.services.inference.engines.builtin.stop_text import first_stop
from nexrl.services.inference.messages import Answer, Call
from nexrl.services.inference.seeds import choice_seeds
from nexrl.types import (
    DEFAULT_POLICY,
    Completion,
    EngineInfo,
    FloatArray,
    IntArray,
    LoadAck,
    LogprobKind,
    PauseMode,
    PolicyVersion,
    Prompt,
    RowChunk,
    Sampling,
    WeightManifest,
)


class BuiltinInference:
    """One model, one engine thread.

    Invariants: a request that is refused never reaches the engine; an abandoned one leaves it; those
    of one tick reach it together, so that one prefill starts them. All calls come from one event loop.
    """

    def __init__(
        self,
        model_folder: Path | str,
        settings: InferenceServiceConfig | None = None,
        *,
        deterministic: bool = False,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        """Loads the model, which takes seconds: call it off the event loop."""
        settings = settings or InferenceServiceConfig()
        self._settings = settings
        self.deadline_s = settings.request_deadline_s
        self._policy = policy
        self._deterministic = deterministic
        self.renderer: HfRenderer = load_renderer(model_folder)
        self._runner = ModelRunner(
            Path(model_folder),
            dtype=settings.dtype,
            device=settings.device,
            max_context=settings.max_context,
            row_attention=deterministic,
        )
        if deterministic and self._runner.device.type != "cpu":
            raise ConfigError(
                f"deterministic: promised on cpu only, this engine runs on {self._runner.device}"
            )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._new: dict[Request, None] = {}
        self._queues: dict[Request, asyncio.Queue[Event]] = {}
        self._engine = Engine(
            self._runner,
            version=PolicyVersion(policy=policy),
            deliver=self._deliver,
            decode=self.renderer.decode,
            eos_token_ids=self.renderer.eos_token_ids,
            max_batch=settings.max_batch,
            num_threads=settings.num_threads or self._runner.sensible_threads,
            make_decoder=make_deterministic_decoder if deterministic else BatchedDecoder,
        )

    # --- drawing ----------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = DEFAULT_POLICY
    ) -> list[Completion]:
        """Draw n completions of one prompt, in choice order; see `InferenceClient.generate`."""
        call = Call(prompt.token_ids, sampling, choice_seeds(sampling, n), policy)
        return (await self.generate_all([call]))[0]

    async def generate_all(self, calls: Sequence[Call]) -> list[list[Completion]]:
        """Answers in the order of the calls; the first error ends them all."""
        answers: dict[int, list[Completion]] = {}
        async with aclosing(self.draw(calls).answers()) as ended:
            async for some in ended:
                for index, answer in some:
                    if isinstance(answer, Exception):
                        raise answer
                    answers[index] = answer
        return [answers[i] for i in range(len(calls))]

    def draw(self, calls: Sequence[Call]) -> Drawing:
        """Start calls; those that are refused are among the answers."""
        return Drawing(self, calls)

    async def stream(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = DEFAULT_POLICY
    ) -> AsyncGenerator[TokenEvent | EndEvent, None]:
        """Every token when it is drawn, an end for each choice, then one for the request."""
        call = Call(prompt.token_ids, sampling, choice_seeds(sampling, n), policy)
        request = self.new_request(call, streamed=True)
        events = Inbox(self, [request])
        try:
            while True:
                for event in await events.next():
                    if isinstance(event, EndEvent) and event.error is not None:
                        raise event.error
                    yield event
                    if isinstance(event, EndEvent) and event.choice is None:
                        return
        finally:
            self.cancel([request])

    def check(
        self, prompt: IntArray, sampling: Sampling, n: int, policy: str = DEFAULT_POLICY
    ) -> None:
        """Raise what `generate` would raise before anything runs."""
        self.new_request(Call(prompt, sampling, choice_seeds(sampling, n), policy))

    def completions(self, request: Request) -> list[Completion]:
        """The choices of a finished request."""
        return [self.completion(request, i) for i in range(len(request.seeds))]

    def completion(self, request: Request, choice: int) -> Completion:
        """A finished choice of a request."""
        drawn = request.results[choice]
        if drawn is None:
            raise ServiceError(f"choice {choice} has not ended", retryable=False)
        sampling = request.sampling
        return Completion(
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            versions=drawn.versions,
            text=self._text(drawn, sampling),
            finish_reason=drawn.finish_reason,
            prompt_token_ids=request.prompt,
            temperature=sampling.temperature,
            logprob_kind=logprob_kind(sampling),
            seed=request.seeds[choice],
            raw_finish_reason=drawn.finish_reason,
        )

    def _text(self, drawn: Drawn, sampling: Sampling) -> str:
        ids = drawn.token_ids
        text = self.renderer.decode(
            ids[:-1] if drawn.finish_reason in ("eos", "stop_token") else ids
        )
        if drawn.finish_reason == "stop_string" and (found := first_stop(text, sampling.stop)):
            return text[: found[0]]
        return text

    def new_request(self, call: Call, *, streamed: bool = False) -> Request:
        """A call as the engine takes it; an error says why it cannot run."""
        self._check_policy(call.policy)
        check_sampling(call.sampling)
        ids = np.asarray(call.prompt)
        if not len(ids):
            raise ConfigError("the prompt is empty: at least one token is needed")
        self._check_ids(ids, "prompt token ids")
        if len(ids) >= self._runner.max_context:
            raise ContextOverflowError(
                f"the prompt has {len(ids)} tokens, the context {self._runner.max_context}: no room to draw"
            )
        return Request(
            prompt=np.ascontiguousarray(ids, np.int32),
            sampling=call.sampling,
            seeds=call.seeds,
            streamed=streamed,
        )

    def _check_ids(self, ids: IntArray, what: str) -> None:
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._runner.vocab_size):
            raise ConfigError(
                f"{what} must lie in [0, {self._runner.vocab_size}), got {ids.min()} to {ids.max()}"
            )

    def _check_policy(self, policy: str) -> None:
        if policy != self._policy:
            raise ConfigError(f"policy {policy!r} is not hosted here (hosted: {self._policy!r})")

    # --- steering ---------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        """What this engine is and can do."""
        return EngineInfo(
            name="builtin",
            build=f"nexrl {nexrl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
            model=self._settings.model,
            versions={self._policy: self._engine.active_version},
            capabilities={
                "token_ids": True,
                "logprobs": True,
                "version_stamps": True,
                "stop_tokens_returned": True,
                # A bfloat16 engine holds other bytes than a float32 publication.
                "checksum_echo": self._settings.dtype == "float32",
                "pause": ["keep", "recompute", "abort"],
                "score": True,
                "deterministic": self._deterministic,
                "decoder": self._engine.decoder_name,
                "dtype": self._settings.dtype,
            },
            max_context=self._runner.max_context,
            healthy=self._engine.failure is None,
        )

    async def pause(self, mode: PauseMode) -> None:
        """See `EngineControl.pause`."""
        if mode not in ("keep", "recompute", "abort"):
            raise ConfigError(f"pause mode must be keep, recompute or abort, got {mode!r}")
        await asyncio.wrap_future(self._engine.call(self._engine.pause, mode))

    async def resume(self) -> None:
        """Draw tokens again; refused while weights are loaded that no version was activated for."""
        await asyncio.wrap_future(self._engine.call(self._engine.resume))

    async def load_weights(self, manifest: WeightManifest) -> LoadAck:
        """Load a publication into the live model; refused unless paused."""
        return await asyncio.wrap_future(self._engine.call(self._engine.load_weights, manifest))

    async def activate(self, version: PolicyVersion) -> None:
        """Stamp tokens with this version from now on.

        There is no cache beyond that of running requests, so no old one can leak (FR-106).
        """
        await asyncio.wrap_future(self._engine.call(self._engine.activate, version))

    async def score(self, chunk: RowChunk, *, policy: str = DEFAULT_POLICY) -> FloatArray:
        """See `EngineControl.score`."""
        self._check_policy(policy)
        longest = int(chunk.lengths.max(initial=0))
        if longest > self._runner.max_context:
            raise ContextOverflowError(
                f"a row to score has {longest} tokens, the context {self._runner.max_context}"
            )
        self._check_ids(chunk.token_ids, "token ids to score")
        return await asyncio.wrap_future(self._engine.call(self._engine.score, chunk))

    async def aclose(self) -> None:
        """End the engine's thread; running requests fail. Idempotent."""
        await asyncio.to_thread(self._engine.close)

    # --- for the server's metrics -----------------------------------------------------------

    @property
    def counts(self) -> EngineCounts:
        """Running totals."""
        return self._engine.counts

    @property
    def num_running(self) -> int:
        """Choices being drawn."""
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        """Choices without a slot."""
        return self._engine.num_waiting

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped for good."""
        return self._engine.failure

    @property
    def active_version(self) -> PolicyVersion:
        """Version that tokens are stamped with."""
        return self._engine.active_version

    # --- between the two threads ------------------------------------------------------------

    def submit(self, requests: Sequence[Request], events: asyncio.Queue[Event]) -> None:
        """Start requests, together with all others of this tick, and deliver their events."""
        self._loop = asyncio.get_running_loop()
        if not self._new:
            self._loop.call_soon(self._submit_new)
        self._new.update(dict.fromkeys(requests))
        self._queues.update(dict.fromkeys(requests, events))

    def _submit_new(self) -> None:
        requests, self._new = list(self._new), {}
        try:
            self._engine.submit(requests)
        except ServiceError as error:  # closed
            self._on_events([EndEvent(request, None, error) for request in requests])

    def cancel(self, requests: Iterable[Request]) -> None:
        """Drop requests, wherever they are; nothing more is heard of them."""
        open_ = [r for r in requests if self._queues.pop(r, None) is not None]
        begun = [r for r in open_ if r not in self._new]
        for request in open_:
            self._new.pop(request, None)
        if begun:
            with suppress(ServiceError):  # closed: nothing runs any more
                self._engine.cancel(begun)

    def late(self) -> DeadlineError:
        """What a request fails with that took too long."""
        state = "paused" if self._engine.paused else "running"
        return DeadlineError(
            f"inference: a request did not finish within {self.deadline_s:g} s (engine {state}, "
            f"{self._engine.num_running} choices running, {self._engine.num_waiting} waiting)"
        )

    def _deliver(self, events: Sequence[Event]) -> None:
        """Called in the engine's thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._on_events, events)

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            is_last = isinstance(event, EndEvent) and event.choice is None
            find = self._queues.pop if is_last else self._queues.get
            if (queue := find(event.request, None)) is not None:
                queue.put_nowait(event)


class Inbox:
    """The events of requests that were submitted together, with one deadline."""

    def __init__(self, inference: BuiltinInference, requests: Sequence[Request]) -> None:
        self._inference = inference
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._deadline = asyncio.get_running_loop().time() + inference.deadline_s
        inference.submit(requests, self._events)

    async def next(self) -> list[Event]:
        """All that has arrived, at least one; DeadlineError when nothing comes in time."""
        try:
            async with asyncio.timeout_at(self._deadline):
                events = [await self._events.get()]
        except TimeoutError as error:
            raise self._inference.late() from error
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def cancel(self, requests: Sequence[Request]) -> None:
        """Free their slots; each ends with an error."""
        self._inference.cancel(requests)
        error = ServiceError("inference: the call was aborted", retryable=False)
        for request in requests:
            self._events.put_nowait(EndEvent(request, None, error))


class Drawing:
    """Calls under way together.

    Invariant: each is answered exactly once, an aborted one with an error; leaving `answers` frees
    the slots of the rest.
    """

    def __init__(self, inference: BuiltinInference, calls: Sequence[Call]) -> None:
        self._inference = inference
        self._refused: list[tuple[int, Answer]] = []
        self._open: dict[Request, int] = {}
        for index, call in enumerate(calls):
            try:
                self._open[inference.new_request(call)] = index
            except NexRLError as error:
                self._refused.append((index, error))
        self._inbox = Inbox(inference, list(self._open))

    async def answers(self) -> AsyncGenerator[list[tuple[int, Answer]], None]:
        """(index of the call, its answer) as calls end, those of one engine step together."""
        try:
            if self._refused:
                yield self._refused
            while self._open:
                if answers := await self._next():
                    yield answers
        finally:
            self._inference.cancel(self._open)

    async def _next(self) -> list[tuple[int, Answer]]:
        try:
            events = await self._inbox.next()
        except DeadlineError as error:
            self._inference.cancel(self._open)
            late, self._open = self._open, {}
            return [(index, error) for index in late.values()]
        answers: list[tuple[int, Answer]] = []
        for event in events:
            index = self._open.pop(event.request, None)
            if index is None or not isinstance(event, EndEvent):
                continue  # ended and aborted at once
            answers.append((index, event.error or self._inference.completions(event.request)))
        return answers

    def abort(self, indices: Collection[int]) -> None:
        """Free the slots of some calls."""
        wanted = set(indices)
        self._inbox.cancel([r for r, index in self._open.items() if index in wanted])


def logprob_kind(sampling: Sampling) -> LogprobKind:
    """What the builtin engine's logprobs are of; a greedy draw reports the model's own."""
    if sampling.temperature == 0.0:
        return "raw"
    return sampling.logprob_kind


def check_sampling(sampling: Sampling) -> None:
    """ConfigError for values outside their range."""
    wrong = {
        "max_tokens must be at least 1": sampling.max_tokens < 1,
        "temperature must be finite and at least 0": not 0.0 <= sampling.temperature < math.inf,
        "top_p must lie in (0, 1]": not 0.0 < sampling.top_p <= 1.0,
        "top_k must be at least 1, or None for off": sampling.top_k is not None
        and sampling.top_k < 1,
        "stop strings must not be empty": any(not s for s in sampling.stop),
    }
    found = [text for text, is_wrong in wrong.items() if is_wrong]
    if found:
        raise ConfigError(f"sampling: {'; '.join(found)}; got {sampling}")
