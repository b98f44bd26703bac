"""Messages between our client and our server: msgpack, token arrays as raw bytes.

The choices of one call travel as columns, so that a message costs a few calls however many
choices and tokens it has. Every other server is spoken to in OpenAI's JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

from nexrl.errors import InvariantError
from nexrl.types import (
    Completion,
    IntArray,
    PolicyVersion,
    Sampling,
    VersionSpan,
)

CONTENT_TYPE = "application/msgpack"
GENERATE_PATH = "/generate"


def pack_generate(prompt: IntArray, sampling: Sampling, seeds: Sequence[int], policy: str) -> bytes:
    """A request for one choice per seed; every sampling field is stated (FR-085)."""
    body = {
        "prompt": np.ascontiguousarray(prompt, "<i4").tobytes(),
        "sampling": asdict(sampling) | {"seed": None, "seeds": list(seeds)},
        "policy": policy,
    }
    packed: bytes = msgpack.packb(body)
    return packed


def unpack_generate(body: bytes) -> tuple[IntArray, Sampling, int, str]:
    """Prompt, sampling, number of choices and policy of a request."""
    try:
        message = msgpack.unpackb(body)
        fields = message["sampling"]
        for name in ("stop", "stop_token_ids", "seeds"):
            fields[name] = tuple(fields[name])
        sampling = Sampling(**fields)
        prompt = np.frombuffer(message["prompt"], "<i4")
        return prompt, sampling, len(sampling.seeds), str(message["policy"])
    except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise InvariantError(f"not a readable generate request: {error!r}") from error


def pack_completions(completions: Sequence[Completion]) -> bytes:
    """The choices of one call, which share prompt, temperature and logprob kind."""
    first = completions[0]
    body: dict[str, Any] = {
        "lengths": [len(c.token_ids) for c in completions],
        "token_ids": np.concatenate([c.token_ids for c in completions]).astype("<i4").tobytes(),
        "logprobs": None,
        "versions": [[(s.start, s.end, str(s.version)) for s in c.versions] for c in completions],
        "texts": [c.text for c in completions],
        "finish_reasons": [c.finish_reason for c in completions],
        "raw_finish_reasons": [c.raw_finish_reason for c in completions],
        "seeds": [c.seed for c in completions],
        "version_source": first.version_source,
        "temperature": first.temperature,
        "logprob_kind": first.logprob_kind,
    }
    logprobs = [c.logprobs for c in completions if c.logprobs is not None]
    if len(logprobs) == len(completions):
        body["logprobs"] = np.concatenate(logprobs).astype("<f4").tobytes()
    packed: bytes = msgpack.packb(body)
    return packed


def unpack_completions(body: bytes, prompt: IntArray) -> list[Completion]:
    """Inverse of `pack_completions`; the prompt is the caller's own."""
    try:
        message = msgpack.unpackb(body)
        token_ids = np.frombuffer(message["token_ids"], "<i4")
        raw = message["logprobs"]
        logprobs = None if raw is None else np.frombuffer(raw, "<f4")
        ends = np.cumsum(message["lengths"]).tolist()
        return [
            Completion(
                token_ids=token_ids[end - length : end],
                logprobs=None if logprobs is None else logprobs[end - length : end],
                versions=tuple(
                    VersionSpan(start=start, end=stop, version=_parse_version(text))
                    for start, stop, text in message["versions"][i]
                ),
                text=message["texts"][i],
                finish_reason=message["finish_reasons"][i],
                prompt_token_ids=prompt,
                version_source=message["version_source"],
                temperature=message["temperature"],
                logprob_kind=message["logprob_kind"],
                seed=message["seeds"][i],
                raw_finish_reason=message["raw_finish_reasons"][i],
            )
            for i, (end, length) in enumerate(zip(ends, message["lengths"], strict=True))
        ]
    except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise InvariantError(f"not a readable generate answer: {error!r}") from error


@lru_cache(maxsize=64)
def _parse_version(text: str) -> PolicyVersion:
    return PolicyVersion.parse(text)
