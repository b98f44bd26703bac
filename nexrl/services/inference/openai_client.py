"""Drawing tokens from any OpenAI-compatible URL: vLLM, SGLang, llama.cpp, hosted services.

Such servers differ in what they return. A few tiny requests at the start find out and are kept as
a capability record; token ids come from the server or the server is refused for training: text is
never encoded again (FR-008, FR-170).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from nexrl.errors import ConfigError, ContextOverflowError, InfrastructureError, ServiceError
from nexrl.services.http import HttpClient
from nexrl.services.inference.seeds import choice_seeds
from nexrl.types import (
    DEFAULT_POLICY,
    Completion,
    EngineInfo,
    FinishReason,
    FloatArray,
    IntArray,
    LogprobKind,
    PolicyVersion,
    Prompt,
    Sampling,
    VersionSpan,
)

# Engines write it for a logprob that is absent, NaN or clamped.
_ABSENT_LOGPROB = -9999.0
_FINISH_REASONS: Mapping[str, FinishReason] = {
    "length": "length",
    "max_tokens": "length",
    "limit": "length",
    "abort": "abort",
    "cancelled": "abort",
    "eos": "eos",
    "eos_token": "eos",
    "end_turn": "eos",
    "stop_sequence": "stop_string",
    "word": "stop_string",
}
_IDS_HELP = (
    "start the server so that it returns them (vLLM >= 0.10.2: it honours return_token_ids in the "
    "request; SGLang: --return-output-ids); ids are never guessed by encoding text again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server was found to offer, by asking it."""

    token_ids: bool
    """It returns the ids it drew."""
    logprobs: bool
    """It returns a logprob for each."""
    logprob_kind: LogprobKind
    """Whether its logprobs change with the temperature (tempered) or not (raw)."""
    neutral_fields: bool
    """It accepts top_k, min_p and repetition_penalty, so its own defaults can be switched off."""


_HOPED_FOR = Capabilities(
    token_ids=True, logprobs=True, logprob_kind="tempered", neutral_fields=True
)
_PLAIN = Capabilities(token_ids=False, logprobs=True, logprob_kind="raw", neutral_fields=False)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a server says to a request for one choice."""

    choice: Mapping[str, Any]
    num_stated: int | None
    """Drawn tokens by its own count; None when it states none."""

    @property
    def token_ids(self) -> list[int]:
        """Ids from an explicit id field, under any engine's spelling; empty when there is none."""
        for name in ("token_ids", "response_token_ids", "output_token_ids", "output_ids"):
            ids = self.choice.get(name)
            if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids):
                return ids
        return []

    @property
    def top_logprob(self) -> float | None:
        """The largest logprob listed for the first token."""
        logprobs = self.choice.get("logprobs")
        top = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
        if not top or not isinstance(top[0], dict) or not top[0]:
            return None
        return max(float(v) for v in top[0].values())


class OpenAIInferenceClient:
    """`InferenceClient` over `/completions` with token-id prompts.

    Invariants: every sampling field is sent with every request; a completion has as many logprobs
    as ids, all at most 0 and finite, or none at all. The weights behind the URL do not change, so
    the version is `pinned`.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        token: str | None = None,
        request_deadline_s: float = 120.0,
        connect_deadline_s: float = 30.0,
        policy: str = DEFAULT_POLICY,
        version: PolicyVersion | None = None,
        needs_training_data: bool = True,
    ) -> None:
        self.model = model
        self._policy = policy
        self._version = version or PolicyVersion(policy=policy)
        self._needs_training_data = needs_training_data
        self._http = HttpClient(
            url,
            name="inference",
            token=token,
            connect_deadline_s=connect_deadline_s,
            request_deadline_s=request_deadline_s,
        )
        self._found: Capabilities | None = None
        self._probing = asyncio.Lock()
        self.num_null_logprobs = 0
        """Completions whose logprobs were dropped because one was null (FR-089)."""

    # --- drawing ----------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = DEFAULT_POLICY
    ) -> list[Completion]:
        """Draw n completions of one prompt; one request for each choice, which has its own seed."""
        if policy != self._policy:
            raise ConfigError(f"policy {policy!r} is not served here (served: {self._policy!r})")
        found = await self.probe()
        tasks = [
            asyncio.create_task(self._draw(prompt, replace(sampling, seed=seed, seeds=()), found))
            for seed in choice_seeds(sampling, n)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _body(self, prompt: IntArray, sampling: Sampling, found: Capabilities) -> Mapping[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop) or None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 1,
            "stream": False,
        }
        if sampling.seed is not None:
            # Engines keep the seed in a signed 64-bit number.
            body["seed"] = sampling.seed & ((1 << 63) - 1)
        if found.token_ids:
            body["return_token_ids"] = True
        if found.neutral_fields:
            # Their defaults come from the model's generation_config.json otherwise (FR-085).
            body |= {"min_p": 0.0, "repetition_penalty": 1.0, "top_k": sampling.top_k or -1}
            body |= {"stop_token_ids": list(sampling.stop_token_ids)}
        elif sampling.top_k is not None or sampling.stop_token_ids:
            raise ConfigError(
                "this server accepts neither top_k nor stop_token_ids, got "
                f"top_k = {sampling.top_k}, stop_token_ids = {sampling.stop_token_ids}"
            )
        return body

    async def _ask(self, prompt: IntArray, sampling: Sampling, found: Capabilities) -> _Answer:
        """One request for one choice."""
        try:
            body = self._body(prompt, sampling, found)
            answer = await self._http.request_json("POST", "/completions", body)
        except ServiceError as error:
            if error.status == 400 and "context" in str(error).lower():
                raise ContextOverflowError(str(error)) from error
            raise
        if not isinstance(answer, dict):
            raise InfrastructureError(f"inference: expected a JSON object, got {answer!r}")
        choices, usage = answer.get("choices"), answer.get("usage")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise InfrastructureError(f"inference: expected one choice, got {choices!r}")
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return _Answer(choices[0], count if isinstance(count, int) else None)

    async def _draw(self, prompt: Prompt, sampling: Sampling, found: Capabilities) -> Completion:
        answer = await self._ask(prompt.token_ids, sampling, found)
        choice, ids, num_stated = answer.choice, answer.token_ids, answer.num_stated
        if num_stated != 0:
            self._check_ids(ids)
        if ids and num_stated not in (None, len(ids)):
            raise ServiceError(
                f"the server counts {num_stated} drawn tokens but returns {len(ids)} ids: its stop "
                "tokens are probably left out, so rows would not end with them (FR-026)",
                retryable=False,
            )
        logprobs, num_null = read_logprobs(choice.get("logprobs"), len(ids)) if ids else (None, 0)
        self.num_null_logprobs += num_null > 0
        raw = str(choice.get("finish_reason") or "")
        span = VersionSpan(start=0, end=len(ids), version=self._version)
        kind = sampling.logprob_kind
        return Completion(
            token_ids=np.asarray(ids, np.int32),
            logprobs=logprobs,
            versions=(span,) if ids else (),
            text=str(choice.get("text") or ""),
            finish_reason=normalise_finish_reason(raw, choice.get("stop_reason"), sampling),
            prompt_token_ids=prompt.token_ids,
            version_source="pinned",
            temperature=sampling.temperature,
            logprob_kind="truncated" if kind == "truncated" else found.logprob_kind,
            seed=sampling.seed,
            raw_finish_reason=raw,
        )

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids and self._needs_training_data:
            raise ConfigError(
                f"the server at {self._http.base_url} returns no token ids, so nothing it draws can "
                f"be trained; {_IDS_HELP}"
            )

    # --- what the server offers -------------------------------------------------------------

    async def probe(self) -> Capabilities:
        """Find out once what the server offers; ConfigError when it cannot serve training."""
        async with self._probing:
            if self._found is None:
                self._found = await self._probe()
        return self._found

    async def _probe(self) -> Capabilities:
        prompt, sampling = np.ones(1, np.int32), Sampling(max_tokens=1, temperature=1.0, seed=0)
        accepted = _HOPED_FOR
        try:
            hot = await self._ask(prompt, sampling, accepted)
        except ServiceError as error:
            if error.status not in (400, 422):
                raise
            accepted = _PLAIN
            hot = await self._ask(prompt, sampling, accepted)
        self._check_ids(hot.token_ids)
        accepted = replace(accepted, token_ids=bool(hot.token_ids))
        cool = await self._ask(prompt, replace(sampling, temperature=0.5), accepted)
        return replace(
            accepted,
            logprobs=hot.top_logprob is not None,
            logprob_kind=_compare_kinds(hot.top_logprob, cool.top_logprob),
        )

    async def info(self) -> EngineInfo:
        """The capability record as an engine's self-description."""
        found = asdict(await self.probe())
        never = dict.fromkeys(("version_stamps", "checksum_echo", "score", "deterministic"), False)
        return EngineInfo(
            name="openai",
            build="",
            model=self.model,
            versions={self._policy: self._version},
            capabilities=found | never | {"pause": []},
        )

    async def aclose(self) -> None:
        """Close all connections; idempotent."""
        await self._http.aclose()


def _compare_kinds(hot: float | None, cool: float | None) -> LogprobKind:
    """At a lower temperature the likeliest token gains probability, unless logprobs are raw.

    Servers that list only the drawn token may list different ones; equal values mean raw, and
    that is also assumed where nothing can be compared, since then no correction is claimed.
    """
    if hot is None or cool is None or math.isclose(hot, cool, rel_tol=1e-4, abs_tol=1e-6):
        return "raw"
    return "tempered"


def read_logprobs(logprobs: Any, num_ids: int) -> tuple[FloatArray | None, int]:
    """Logprobs of the drawn tokens, and how many were null.

    One null drops them all: the row then counts as one without logprobs, which has its own rule
    (FR-089). A number that cannot be a logprob fails closed.
    """
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if values is None:
        return None, 0
    if len(values) != num_ids:
        raise ServiceError(
            f"the server returned {num_ids} token ids but {len(values)} logprobs", retryable=False
        )
    num_null = sum(v is None or (isinstance(v, float) and math.isnan(v)) for v in values)
    if num_null:
        return None, num_null
    array = np.asarray(values, np.float32)
    wrong = array[(array > 1e-6) | (array <= _ABSENT_LOGPROB) | ~np.isfinite(array)]
    if len(wrong):
        raise ServiceError(
            f"the server returned {wrong[0]:g} as a logprob (at most 0 and above "
            f"{_ABSENT_LOGPROB:g} is accepted)",
            retryable=True,
        )
    return np.minimum(array, np.float32(0.0)), 0


def normalise_finish_reason(raw: str, stop_reason: Any, sampling: Sampling) -> FinishReason:
    """One vocabulary for all engines, from the finish reason alone and never from the last id
    (FR-022)."""
    if raw.lower() in ("stop", "tool_calls"):
        if isinstance(stop_reason, str):
            return "stop_string"
        return "stop_token" if stop_reason in sampling.stop_token_ids else "eos"
    return _FINISH_REASONS.get(raw.lower(), "error")
