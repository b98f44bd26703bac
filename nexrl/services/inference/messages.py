"""Messages between our client and our server: msgpack, token arrays as raw bytes.

One request carries many calls; its answer is a stream of frames, each with the calls that ended in
one step of the engine. The choices of a frame travel as columns, so that a frame costs a few calls
however many choices and tokens it has. Every other server is spoken to in OpenAI's JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

from nexrl.errors import InvariantError
from nexrl.services.http import error_body, error_from_answer, status_of
from nexrl.types import Completion, IntArray, PolicyVersion, Sampling, VersionSpan

CONTENT_TYPE = "application/msgpack"
GENERATE_PATH = "/generate"
ABORT_PATH = "/generate/abort"
LENGTH_BYTES = 4
"""Before each frame: its length, little-endian."""
_DAMAGE = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, msgpack.exceptions.UnpackException,
)  # fmt: skip
_PER_CHOICE = ("text", "finish_reason", "raw_finish_reason", "seed", "temperature", "logprob_kind", "version_source")  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One `generate` call, whose seeds are decided."""

    prompt: IntArray
    """[P] as fed."""
    sampling: Sampling
    """Its own seed and seeds count no more."""
    seeds: tuple[int, ...]
    """One for each choice."""
    policy: str
    """Who draws."""


Answer = list[Completion] | Exception
"""What one call ends with: its choices in order, or its error."""


def pack_generate(request_id: str, calls: Sequence[Call]) -> bytes:
    """A request; prompts and settings that calls share are stated once, and every sampling field
    is (FR-085)."""
    prompts: dict[bytes, int] = {}
    settings: dict[tuple[Sampling, str], int] = {}
    rows = []
    for call in calls:
        setting = (replace(call.sampling, seed=None, seeds=()), call.policy)
        prompt = np.ascontiguousarray(call.prompt, "<i4").tobytes()
        rows.append(
            (
                prompts.setdefault(prompt, len(prompts)),
                settings.setdefault(setting, len(settings)),
                call.seeds,
            )
        )
    fields = [asdict(sampling) | {"policy": policy} for sampling, policy in settings]
    body = {"id": request_id, "prompts": list(prompts), "settings": fields, "calls": rows}
    packed: bytes = msgpack.packb(body)
    return packed


def unpack_generate(body: bytes) -> tuple[str, list[Call]]:
    """Id and calls of a request; InvariantError when it is not one."""
    try:
        message = msgpack.unpackb(body, use_list=False)
        prompts = [np.frombuffer(p, "<i4") for p in message["prompts"]]
        policies = [str(fields.pop("policy")) for fields in message["settings"]]
        settings = [Sampling(**fields) for fields in message["settings"]]
        calls = [
            Call(prompts[p], settings[s], tuple(seeds), policies[s])
            for p, s, seeds in message["calls"]
        ]
        return str(message["id"]), calls
    except _DAMAGE as error:
        raise InvariantError(f"not a readable generate request: {error!r}") from error


def pack_frame(answers: Sequence[tuple[int, Answer]]) -> bytes:
    """(index of the call, its answer) for calls that have ended, its length in front."""
    errors = [
        (index, status_of(answer), json.dumps(error_body(answer)).encode())
        for index, answer in answers
        if isinstance(answer, Exception)
    ]
    done = [(index, answer) for index, answer in answers if not isinstance(answer, Exception)]
    choices = [completion for _, answer in done for completion in answer]
    versions: dict[PolicyVersion, int] = {}
    body: dict[str, Any] = {
        "errors": errors,
        "calls": [(index, len(answer)) for index, answer in done],
        "lengths": [len(c.token_ids) for c in choices],
        "token_ids": b"".join(c.token_ids.astype("<i4", copy=False).tobytes() for c in choices),
        "logprobs": [
            None if c.logprobs is None else c.logprobs.astype("<f4", copy=False).tobytes()
            for c in choices
        ],
        "spans": [
            [(s.start, s.end, versions.setdefault(s.version, len(versions))) for s in c.versions]
            for c in choices
        ],
    }
    body["versions"] = [str(v) for v in versions]
    for name in _PER_CHOICE:
        body[name] = [getattr(c, name) for c in choices]
    packed: bytes = msgpack.packb(body)
    return len(packed).to_bytes(LENGTH_BYTES, "little") + packed


def unpack_frame(frame: bytes, calls: Sequence[Call], url: str) -> list[tuple[int, Answer]]:
    """Inverse of `pack_frame` without the length; the prompts are those of the calls."""
    try:
        message = msgpack.unpackb(frame)
        answers: list[tuple[int, Answer]] = [
            (index, error_from_answer("inference", url, status, body))
            for index, status, body in message["errors"]
        ]
        ends = np.cumsum(message["lengths"]).tolist()
        token_ids = np.frombuffer(message["token_ids"], "<i4")
        versions = [_parse_version(text) for text in message["versions"]]

        def completion(row: int, prompt: IntArray) -> Completion:
            logprobs = message["logprobs"][row]
            return Completion(
                token_ids=token_ids[ends[row] - message["lengths"][row] : ends[row]],
                logprobs=None if logprobs is None else np.frombuffer(logprobs, "<f4"),
                versions=tuple(
                    VersionSpan(start=start, end=end, version=versions[version])
                    for start, end, version in message["spans"][row]
                ),
                prompt_token_ids=prompt,
                **{name: message[name][row] for name in _PER_CHOICE},
            )

        first = 0
        for index, num_choices in message["calls"]:
            call = calls[index]
            if num_choices != len(call.seeds):
                raise ValueError(f"{num_choices} choices for {len(call.seeds)} seeds")
            rows = range(first, first + num_choices)
            answers.append((index, [completion(row, call.prompt) for row in rows]))
            first += num_choices
    except _DAMAGE as error:
        raise InvariantError(f"not a readable generate answer: {error!r}") from error
    return answers


@lru_cache(maxsize=64)
def _parse_version(text: str) -> PolicyVersion:
    return PolicyVersion.parse(text)
