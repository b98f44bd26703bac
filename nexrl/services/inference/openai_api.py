"""OpenAI's request and answer shapes, with our extensions; no engine and no HTTP here.

A field that is not known, or known but not supported at the value given, is refused by name:
a setting that is silently ignored would change what is sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nexrl.errors import ConfigError
from nexrl.types import Completion, Sampling

DEFAULT_COMPLETION_TOKENS = 16
_NO_LIMIT = 1 << 30

# Accepted at these values only, because then they mean what is done anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "logit_bias": (None, {}),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "skip_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
}
# They describe the caller or the transport, not the text.
_HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id",
)  # fmt: skip

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
R = TypeVar("R", bound="GenerationRequest")


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(BaseModel):
    """What both endpoints accept."""

    model_config = ConfigDict(extra="forbid")

    endpoint: ClassVar[str]
    """Its name in metrics."""
    id_prefix: ClassVar[str]

    model: str
    n: int = Field(1, ge=1, le=1024)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] = []
    seed: int | None = None
    seeds: list[int] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def limit(self) -> int | None:
        """Most tokens to draw for one choice."""
        return self.max_tokens

    def sampling(self) -> Sampling:
        """As the engine takes it. Absent fields have OpenAI's defaults, never those of the
        model's generation_config.json (FR-085); top_k of 0 or -1 is off (FR-086)."""
        return Sampling(
            max_tokens=_NO_LIMIT if self.limit is None else self.limit,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else None,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids),
            seed=self.seed,
            seeds=tuple(self.seeds or ()),
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    endpoint = "completions"
    id_prefix = "cmpl"

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int | None = Field(DEFAULT_COMPLETION_TOKENS, ge=1)
    logprobs: int | None = Field(None, ge=0, le=1)
    add_special_tokens: bool = True

    @property
    def wants_logprobs(self) -> bool:
        """0 asks for the drawn token's alone."""
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [i for i in self.prompt if isinstance(i, int)]
        return [ids] if ids else [p for p in self.prompt if not isinstance(p, int)]

    @property
    def object_name(self) -> str:
        """`object` of an answer or a chunk."""
        return "text_completion"

    def content(self, text: str) -> dict[str, Any]:
        """Where a choice has its text."""
        return {"text": text}

    def shape_logprobs(self, texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
        """Only the drawn token is listed."""
        return {
            "tokens": list(texts),
            "token_logprobs": list(logprobs),
            "top_logprobs": [{t: p} for t, p in zip(texts, logprobs, strict=True)],
            "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
        }


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    endpoint = "chat"
    id_prefix = "chatcmpl"

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the drawn tokens' logprobs are asked for."""
        return bool(self.logprobs)

    @property
    def limit(self) -> int | None:
        """The newer name wins."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def object_name(self) -> str:
        """`object` of an answer or a chunk."""
        return "chat.completion.chunk" if self.stream else "chat.completion"

    def content(self, text: str) -> dict[str, Any]:
        """Where a choice has its text."""
        if self.stream:
            return {"delta": {"content": text}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def shape_logprobs(self, texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
        """Only the drawn token is listed."""
        return {
            "content": [
                {"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []}
                for t, p in zip(texts, logprobs, strict=True)
            ]
        }


def parse(kind: type[R], body: Any) -> R:
    """The request, or a ConfigError that names each field that is wrong or unsupported."""
    if not isinstance(body, dict):
        raise ConfigError(f"the request body must be a JSON object, got {type(body).__name__}")
    fields = dict(body)
    for name in _HARMLESS:
        fields.pop(name, None)
    problems = []
    for name in [n for n in fields if n in _NEUTRAL and n not in kind.model_fields]:
        value = fields.pop(name)
        if value not in _NEUTRAL[name] and not (name == "best_of" and value == body.get("n", 1)):
            accepted = " or ".join(repr(v) for v in _NEUTRAL[name])
            problems.append(f"{name} = {value!r} is not supported (accepted: {accepted})")
    try:
        # An explicit null means the default, as in OpenAI's own interface.
        request = kind.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        problems.extend(_in_words(kind, error))
    if problems:
        raise ConfigError("; ".join(problems))
    return request


def _in_words(kind: type[BaseModel], error: ValidationError) -> Iterable[str]:
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            yield f"unsupported field {name!r} (accepted: {', '.join(sorted(kind.model_fields))})"
        else:
            yield f"{name} = {detail['input']!r}: {detail['msg']}"


# --- answers ----------------------------------------------------------------------------------


def wire_finish_reason(reason: str) -> str:
    """OpenAI knows stop and length; an abort keeps its own name."""
    return "stop" if reason in ("eos", "stop_string", "stop_token") else reason


def stop_reason(completion: Completion, full_text: str, stops: Sequence[str]) -> int | str | None:
    """What ended a choice, as vLLM says it: the stop token, the stop string, or null."""
    if completion.finish_reason == "stop_token":
        return int(completion.token_ids[-1])
    if completion.finish_reason == "stop_string":
        hits = [s for s in stops if full_text.startswith(s, len(completion.text))]
        return max(hits, key=len, default=None)
    return None


def usage(num_prompt: int, num_drawn: int) -> dict[str, int]:
    """Token counts."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_drawn,
        "total_tokens": num_prompt + num_drawn,
    }


def extensions(completion: Completion) -> dict[str, Any]:
    """What `return_token_ids` adds to a choice."""
    return {
        "token_ids": completion.token_ids.tolist(),
        "versions": [
            {"start": s.start, "end": s.end, "version": str(s.version)} for s in completion.versions
        ],
        "logprob_kind": completion.logprob_kind,
        "seed": completion.seed,
    }
