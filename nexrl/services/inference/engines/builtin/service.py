"""The builtin engine as an `InferenceService`: in process, and inside the HTTP server.

Asks on the event loop, draws in the engine's thread, answers on the loop again: finished requests
of one engine step come back in one wake-up.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
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
from nexrl.services.inference.engines.builtin.decoder import BatchedDecoder, BlockDecoder
from nexrl.services.inference.engines.builtin.engine import Engine
from nexrl.services.inference.engines.builtin.request import (
    Choice,
    EndEvent,
    Event,
    Request,
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
        self.engine = Engine(
            self._runner,
            version=PolicyVersion(policy=policy),
            deliver=self._deliver,
            decode=self.renderer.decode,
            eos_token_ids=self.renderer.eos_token_ids,
            max_batch=settings.max_batch,
            num_threads=settings.num_threads or self._runner.sensible_threads,
            make_decoder=BlockDecoder if deterministic else BatchedDecoder,
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
        with self.draw(calls) as drawing:
            while ended := await drawing.answers():
                for index, answer in ended:
                    if isinstance(answer, Exception):
                        raise answer
                    answers[index] = answer
        return [answers[i] for i in range(len(calls))]

    @contextmanager
    def draw(self, calls: Sequence[Call]) -> Iterator[Drawing]:
        """Start calls; those that are refused are among the answers. Leaving frees all slots."""
        requests: dict[Request, int] = {}
        refused: list[tuple[int, Answer]] = []
        for index, call in enumerate(calls):
            try:
                requests[self.new_request(call)] = index
            except NexRLError as error:
                refused.append((index, error))
        drawing = Drawing(self, requests, refused)
        try:
            yield drawing
        finally:
            self.cancel(requests)

    async def stream(self, call: Call) -> AsyncGenerator[Event, None]:
        """Every token when it is drawn, an end for each choice, then one for the request."""
        request = self.new_request(call, streamed=True)
        drawing = Drawing(self, {request: 0})
        try:
            while True:
                for event in await drawing.events():
                    if isinstance(event, EndEvent) and event.error is not None:
                        raise event.error
                    yield event
                    if isinstance(event, EndEvent) and event.choice is None:
                        return
        finally:
            self.cancel([request])

    def completions(self, request: Request) -> list[Completion]:
        """The choices of a finished request."""
        return [self.completion(choice) for choice in request.choices]

    def completion(self, choice: Choice) -> Completion:
        """A choice that has ended."""
        call, ids, reason = choice.request.call, choice.token_ids, choice.finish_reason
        assert reason is not None, f"choice {choice.index} has not ended"
        sampling = call.sampling
        text = self.renderer.decode(ids[:-1] if reason in ("eos", "stop_token") else ids)
        if reason == "stop_string" and (found := first_stop(text, sampling.stop)):
            text = text[: found[0]]
        return Completion(
            token_ids=ids,
            logprobs=choice.logprobs,
            versions=choice.spans(),
            text=text,
            finish_reason=reason,
            prompt_token_ids=call.prompt,
            temperature=sampling.temperature,
            # A greedy draw reports the model's own distribution.
            logprob_kind="raw" if sampling.temperature == 0.0 else sampling.logprob_kind,
            seed=call.seeds[choice.index],
            raw_finish_reason=reason,
        )

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
        prompt = np.ascontiguousarray(ids, np.int32)
        return Request(call=replace(call, prompt=prompt), streamed=streamed)

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
            versions={self._policy: self.engine.active_version},
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
                "decoder": self.engine.decoder.name,
                "dtype": self._settings.dtype,
            },
            max_context=self._runner.max_context,
            healthy=self.engine.failure is None,
        )

    async def pause(self, mode: PauseMode) -> None:
        """See `EngineControl.pause`."""
        if mode not in ("keep", "recompute", "abort"):
            raise ConfigError(f"pause mode must be keep, recompute or abort, got {mode!r}")
        await self.engine.call(lambda: self.engine.pause(mode))

    async def resume(self) -> None:
        """Draw tokens again; refused while weights are loaded that no version was activated for."""
        await self.engine.call(self.engine.resume)

    async def load_weights(self, manifest: WeightManifest) -> LoadAck:
        """Load a publication into the live model; refused unless paused."""
        return await self.engine.call(lambda: self.engine.load_weights(manifest))

    async def activate(self, version: PolicyVersion) -> None:
        """Stamp tokens with this version from now on.

        There is no cache beyond that of running requests, so no old one can leak (FR-106).
        """
        await self.engine.call(lambda: self.engine.activate(version))

    async def score(self, chunk: RowChunk, *, policy: str = DEFAULT_POLICY) -> FloatArray:
        """See `EngineControl.score`."""
        self._check_policy(policy)
        longest = int(chunk.lengths.max(initial=0))
        if longest > self._runner.max_context:
            raise ContextOverflowError(
                f"a row to score has {longest} tokens, the context {self._runner.max_context}"
            )
        self._check_ids(chunk.token_ids, "token ids to score")
        return await self.engine.call(lambda: self.engine.score(chunk))

    async def aclose(self) -> None:
        """End the engine's thread; running requests fail. Idempotent."""
        await asyncio.to_thread(self.engine.close)

    # --- between the two threads ------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        """Start requests, together with all others of this tick."""
        self._loop = asyncio.get_running_loop()
        if not self._new:
            self._loop.call_soon(self._submit_new)
        self._new.update(dict.fromkeys(requests))

    def _submit_new(self) -> None:
        requests, self._new = list(self._new), {}
        try:
            self.engine.submit(requests)
        except ServiceError as error:  # closed
            self._on_events([EndEvent(request, None, error) for request in requests])

    def cancel(self, requests: Iterable[Request]) -> None:
        """Drop requests, wherever they are; nothing more is heard of them."""
        begun = []
        for request in requests:
            if request in self._new:
                del self._new[request]
            elif not request.ended:
                begun.append(request)
        if begun:
            with suppress(ServiceError):  # closed: nothing runs any more
                self.engine.cancel(begun)

    def _deliver(self, events: Sequence[Event]) -> None:
        """Called in the engine's thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._on_events, events)

    @staticmethod
    def _on_events(events: Sequence[Event]) -> None:
        for event in events:
            event.request.inbox.put_nowait(event)


class Drawing:
    """Calls under way together, with one deadline.

    Invariant: each is answered exactly once, an aborted one with an error.
    """

    def __init__(
        self,
        inference: BuiltinInference,
        requests: Mapping[Request, int],
        refused: Sequence[tuple[int, Answer]] = (),
    ) -> None:
        """`requests` with the indices of their calls; `refused` are answers already."""
        self._inference = inference
        self._open = dict(requests)
        self._ended = list(refused)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._deadline = asyncio.get_running_loop().time() + inference.deadline_s
        for request in requests:
            request.inbox = self._events
        inference.submit(requests)

    async def answers(self) -> list[tuple[int, Answer]]:
        """(index of the call, its answer) of those that have ended, those of one engine step
        together; empty when all were answered before."""
        while self._open and not self._ended:
            try:
                events = await self.events()
            except DeadlineError as error:
                self._inference.cancel(self._open)
                events = [EndEvent(request, None, error) for request in self._open]
            for event in events:
                # One that ended and was aborted at once has two ends.
                if isinstance(event, EndEvent) and event.request in self._open:
                    answer = event.error or self._inference.completions(event.request)
                    self._ended.append((self._open.pop(event.request), answer))
        ended, self._ended = self._ended, []
        return ended

    async def events(self) -> list[Event]:
        """All that has happened since, at least one; DeadlineError when nothing comes in time."""
        try:
            async with asyncio.timeout_at(self._deadline):
                events = [await self._events.get()]
        except TimeoutError as error:
            engine = self._inference.engine
            raise DeadlineError(
                f"inference: a request did not finish within {self._inference.deadline_s:g} s "
                f"(engine {'paused' if engine.paused else 'running'}, {engine.num_running} choices "
                f"running, {engine.num_waiting} waiting)"
            ) from error
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def abort(self, indices: Collection[int]) -> None:
        """Free the slots of some calls."""
        wanted = set(indices)
        requests = [request for request, index in self._open.items() if index in wanted]
        self._inference.cancel(requests)
        error = ServiceError("inference: the call was aborted", retryable=False)
        for request in requests:
            self._events.put_nowait(EndEvent(request, None, error))


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
