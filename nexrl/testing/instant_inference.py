"""InstantInference: an InferenceService that answers at once, for tests and for `bench/loop.py`.

Keeps the whole contract of `services/inference/protocol.py` (seeds, version stamps, pause, load,
activate, score) over a model with one fixed distribution for each version: it looks at nothing but
the token itself. So completions cost microseconds and `score` agrees with their logprobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from nexrl.errors import ContextOverflowError, InvariantError, ServiceError
from nexrl.services.inference.seeds import choice_seeds
from nexrl.types import (
    DEFAULT_POLICY,
    Completion,
    EngineInfo,
    FinishReason,
    FloatArray,
    IntArray,
    LoadAck,
    PauseMode,
    PolicyVersion,
    Prompt,
    RowChunk,
    Sampling,
    VersionSpan,
    WeightManifest,
    derive_seed,
)

_NUM_DRAWS = 1024
"""Different completions there are; a seed picks one."""


class InstantInference:
    """Draws of `num_tokens` tokens, the last of which is `eos_token_id`.

    Invariant: tokens and text are functions of the choice's seed alone, logprobs of token and active
    version alone. While paused no call is answered.
    """

    def __init__(
        self,
        *,
        num_tokens: int = 8,
        vocab_size: int = 64,
        eos_token_id: int = 2,
        max_context: int = 1 << 20,
        latency_s: float = 0.0,
        failure_rate: float = 0.0,
        seed: int = 0,
        text: str | None = None,
        versions: Mapping[str, PolicyVersion] | None = None,
    ) -> None:
        """`failure_rate`: share of calls that answer 500, chosen by seed. `text`: what every
        completion reads; default is its token ids."""
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._max_context = max_context
        self._latency_s = latency_s
        self._failure_rate = failure_rate
        self._seed = seed
        self._versions = dict(versions or {DEFAULT_POLICY: PolicyVersion()})
        self._loaded: PolicyVersion | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._failures = np.random.default_rng(seed)
        self._draws, self._texts = self._make_draws(text)
        self._logprobs: dict[str, FloatArray] = {}
        self._draw_logprobs: dict[str, list[FloatArray]] = {}
        for version in self._versions.values():
            self._take_weights(version)
        self._spans: dict[tuple[str, int], tuple[VersionSpan, ...]] = {}
        self.num_calls = 0

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = DEFAULT_POLICY
    ) -> list[Completion]:
        """See `InferenceClient.generate`."""
        self.num_calls += 1
        version = self._version_of(policy)
        room = self._max_context - len(prompt.token_ids)
        if room < 1:
            raise ContextOverflowError(
                f"the prompt has {len(prompt.token_ids)} tokens, the context {self._max_context}"
            )
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        if not self._resumed.is_set():
            await self._resumed.wait()
            version = self._version_of(policy)
        if self._failure_rate and self._failures.random() < self._failure_rate:
            raise ServiceError("InstantInference answered 500, as it was told to", status=500)
        if sampling.temperature == 0.0:
            seeds = (derive_seed(*prompt.token_ids.tolist()),) * n
        else:
            seeds = choice_seeds(sampling, n)
        limit = min(sampling.max_tokens, room)
        return [self._completion(prompt, sampling, seed, limit, version) for seed in seeds]

    async def info(self) -> EngineInfo:
        """See `EngineControl.info`."""
        return EngineInfo(
            name="instant",
            build="1",
            model="instant",
            versions=dict(self._versions),
            capabilities={
                "token_ids": True,
                "logprobs": True,
                "version_stamps": True,
                "pause": ["keep", "recompute", "abort"],
                "deterministic": True,
            },
            max_context=self._max_context,
        )

    async def pause(self, mode: PauseMode) -> None:
        """See `EngineControl.pause`; nothing is ever half drawn, so all modes are alike."""
        self._resumed.clear()

    async def resume(self) -> None:
        """See `EngineControl.resume`."""
        self._resumed.set()

    async def load_weights(self, manifest: WeightManifest) -> LoadAck:
        """See `EngineControl.load_weights`; trusts the manifest, there are no tensors to hash."""
        self._loaded = manifest.version
        self._take_weights(manifest.version)
        return LoadAck(version=manifest.version, checksum=manifest.checksum)

    async def activate(self, version: PolicyVersion) -> None:
        """See `EngineControl.activate`."""
        if version != self._loaded and version not in self._versions.values():
            raise InvariantError(f"cannot activate {version}: {self._loaded} was loaded last")
        self._versions[version.policy] = version
        self._spans.clear()

    async def score(self, chunk: RowChunk, *, policy: str = DEFAULT_POLICY) -> FloatArray:
        """See `EngineControl.score`."""
        self._version_of(policy)
        logprobs: FloatArray = self._logprobs[policy][chunk.token_ids]
        logprobs[chunk.offsets[:-1]] = 0.0
        return logprobs

    async def aclose(self) -> None:
        """Lets go of calls that wait; idempotent."""
        self._resumed.set()

    def _version_of(self, policy: str) -> PolicyVersion:
        version = self._versions.get(policy)
        if version is None:
            raise ServiceError(
                f"no policy {policy!r}; there are {sorted(self._versions)}",
                status=404,
                retryable=False,
            )
        return version

    def _make_draws(self, text: str | None) -> tuple[list[IntArray], list[str]]:
        rng = np.random.default_rng(derive_seed(self._seed, "draws"))
        drawable = np.setdiff1d(np.arange(self._vocab_size, dtype=np.int32), [self._eos_token_id])
        table = rng.choice(drawable, size=(_NUM_DRAWS, self._num_tokens)).astype(np.int32)
        table[:, -1] = self._eos_token_id
        texts = [" ".join(map(str, row[:-1])) if text is None else text for row in table]
        return list(table), texts

    def _take_weights(self, version: PolicyVersion) -> None:
        """Logprobs of every draw at once, so that a completion looks them up."""
        self._logprobs[version.policy] = self._distribution(version)
        self._draw_logprobs[version.policy] = list(
            self._logprobs[version.policy][np.stack(self._draws)]
        )

    def _distribution(self, version: PolicyVersion) -> FloatArray:
        """[V] log probabilities of a version."""
        rng = np.random.default_rng(derive_seed(self._seed, version))
        logits = rng.normal(size=self._vocab_size)
        logprobs: FloatArray = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        return logprobs

    def _completion(
        self, prompt: Prompt, sampling: Sampling, seed: int, limit: int, version: PolicyVersion
    ) -> Completion:
        index = seed % _NUM_DRAWS
        token_ids = self._draws[index][:limit]
        finish: FinishReason = "eos" if limit >= self._num_tokens else "length"
        key = (version.policy, len(token_ids))
        spans = self._spans.get(key)
        if spans is None:
            spans = (VersionSpan(start=0, end=len(token_ids), version=version),)
            self._spans[key] = spans
        return Completion(
            token_ids=token_ids,
            logprobs=self._draw_logprobs[version.policy][index][:limit],
            versions=spans,
            text=self._texts[index] if finish == "eos" else " ".join(map(str, token_ids)),
            finish_reason=finish,
            prompt_token_ids=prompt.token_ids,
            temperature=sampling.temperature,
            logprob_kind=sampling.logprob_kind,
            seed=seed,
            raw_finish_reason="stop" if finish == "eos" else "length",
        )
