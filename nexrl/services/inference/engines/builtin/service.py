"""The builtin engine as an `InferenceService`: in process, and inside the HTTP server.

Asks on the event loop, draws in the engine's thread, answers on the loop again: finished requests
of one engine step come back in one wake-up.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

import nexrl
from nexrl.config.schema import InferenceServiceConfig
from nexrl.errors import ConfigError, ContextOverflowError, DeadlineError, ServiceError
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

    Invariants: a request that is refused never reaches the engine; an abandoned one leaves it.
    All calls come from one event loop.
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
        self._open: dict[Request, asyncio.Future[None]] = {}
        self._streams: dict[Request, asyncio.Queue[Event]] = {}
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
        request = self._new_request(prompt.token_ids, sampling, n, policy)
        future: asyncio.Future[None] = self._running_loop().create_future()
        self._open[request] = future
        deadline_s = self._settings.request_deadline_s
        try:
            self._engine.submit(request)
            async with asyncio.timeout(deadline_s):
                await future
        except TimeoutError as error:
            state = "paused" if self._engine.paused else "running"
            raise DeadlineError(
                f"inference: a request did not finish within {deadline_s:g} s (engine {state}, "
                f"{self._engine.num_running} choices running, {self._engine.num_waiting} waiting)"
            ) from error
        finally:
            del self._open[request]
            if not future.done() or future.cancelled():
                self._cancel(request)
        return [self.completion(request, i) for i in range(n)]

    async def stream(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = DEFAULT_POLICY
    ) -> AsyncGenerator[TokenEvent | EndEvent, None]:
        """Every token when it is drawn, an end for each choice, then one for the request."""
        request = self._new_request(prompt.token_ids, sampling, n, policy, streamed=True)
        self._running_loop()
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._streams[request] = queue
        try:
            self._engine.submit(request)
            async with asyncio.timeout(self._settings.request_deadline_s):
                while True:
                    event = await queue.get()
                    if isinstance(event, EndEvent) and event.error is not None:
                        raise event.error
                    yield event
                    if isinstance(event, EndEvent) and event.choice is None:
                        return
        except TimeoutError as error:
            raise DeadlineError(
                f"inference: a stream did not finish within {self._settings.request_deadline_s:g} s"
            ) from error
        finally:
            del self._streams[request]
            self._cancel(request)

    def check(
        self, prompt: IntArray, sampling: Sampling, n: int, policy: str = DEFAULT_POLICY
    ) -> None:
        """Raise what `generate` would raise before anything runs."""
        self._new_request(prompt, sampling, n, policy)

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

    def _new_request(
        self, prompt: IntArray, sampling: Sampling, n: int, policy: str, *, streamed: bool = False
    ) -> Request:
        self._check_policy(policy)
        check_sampling(sampling)
        ids = np.asarray(prompt)
        if not len(ids):
            raise ConfigError("the prompt is empty: at least one token is needed")
        if int(ids.min()) < 0 or int(ids.max()) >= self._runner.vocab_size:
            raise ConfigError(
                f"prompt token ids must lie in [0, {self._runner.vocab_size}), got {ids.min()} to {ids.max()}"
            )
        if len(ids) >= self._runner.max_context:
            raise ContextOverflowError(
                f"the prompt has {len(ids)} tokens, the context {self._runner.max_context}: no room to draw"
            )
        return Request(
            prompt=np.ascontiguousarray(ids, np.int32),
            sampling=sampling,
            seeds=choice_seeds(sampling, n),
            streamed=streamed,
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
        await asyncio.wrap_future(self._engine.pause(mode))

    async def resume(self) -> None:
        """Draw tokens again; refused while weights are loaded that no version was activated for."""
        await asyncio.wrap_future(self._engine.resume())

    async def load_weights(self, manifest: WeightManifest) -> LoadAck:
        """Load a publication into the live model; refused unless paused."""
        return await asyncio.wrap_future(self._engine.load_weights(manifest))

    async def activate(self, version: PolicyVersion) -> None:
        """Stamp tokens with this version from now on.

        There is no cache beyond that of running requests, so no old one can leak (FR-106).
        """
        await asyncio.wrap_future(self._engine.activate(version))

    async def score(self, chunk: RowChunk, *, policy: str = DEFAULT_POLICY) -> FloatArray:
        """See `EngineControl.score`."""
        self._check_policy(policy)
        longest = int(chunk.lengths.max(initial=0))
        if longest > self._runner.max_context:
            raise ContextOverflowError(
                f"a row to score has {longest} tokens, the context {self._runner.max_context}"
            )
        ids = chunk.token_ids
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._runner.vocab_size):
            raise ConfigError(
                f"token ids to score must lie in [0, {self._runner.vocab_size}), got {ids.min()} to {ids.max()}"
            )
        return await asyncio.wrap_future(self._engine.score(chunk))

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

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.get_running_loop()
        return self._loop

    def _cancel(self, request: Request) -> None:
        try:
            self._engine.cancel(request)
        except ServiceError:
            return  # closed: nothing runs any more

    def _deliver(self, events: Sequence[Event]) -> None:
        """Called in the engine's thread."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._on_events, events)
        except RuntimeError:
            return  # the loop is closed: nobody is left to tell

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if (queue := self._streams.get(event.request)) is not None:
                queue.put_nowait(event)
            elif isinstance(event, EndEvent) and event.choice is None:
                future = self._open.get(event.request)
                if future is None or future.done():
                    continue
                if event.error is not None:
                    future.set_exception(event.error)
                else:
                    future.set_result(None)


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
