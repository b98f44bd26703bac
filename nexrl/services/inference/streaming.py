"""A streamed answer: engine events in, OpenAI chunks out.

Text that may still become a stop string, and bytes that are not yet a whole character, are held
back until the next token decides.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np

from nexrl.protocols import Renderer
from nexrl.services.inference.engines.builtin.request import TokenEvent
from nexrl.services.inference.engines.builtin.stop_text import (
    Decode,
    IncrementalText,
    first_stop,
    held_back,
)
from nexrl.services.inference.openai_api import (
    ChatRequest,
    CompletionRequest,
    chat_logprobs,
    completion_logprobs,
    stop_reason,
    usage,
    wire_finish_reason,
)
from nexrl.types import Completion, IntArray, Prompt, Sampling

if TYPE_CHECKING:
    from nexrl.services.inference.engines.builtin.service import BuiltinInference


class _ChoiceStream:
    """One choice's text so far.

    Invariant: what was sent, joined, is a prefix of the completion's text.
    """

    def __init__(self, decode: Decode, stops: tuple[str, ...]) -> None:
        self._text = IncrementalText(decode)
        self._stops = stops
        self._held = ""
        self._num_sent = 0
        self._stopped = False

    def add(self, token_id: int) -> str:
        """The text that can be sent now."""
        if self._stopped:
            return ""
        text = self._held + self._text.add(token_id)
        if first_stop(text, self._stops):
            self._stopped = True
            return ""
        keep = held_back(text, self._stops)
        ready, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._num_sent += len(ready)
        return ready

    def rest(self, completion: Completion) -> str:
        """What of the completion's text was not sent yet."""
        return completion.text[self._num_sent :]


async def stream_chunks(
    inference: BuiltinInference,
    asked: CompletionRequest | ChatRequest,
    prompt: IntArray,
    sampling: Sampling,
    *,
    head: Mapping[str, Any],
) -> AsyncGenerator[dict[str, Any], None]:
    """One chunk for each token, one with the finish reason for each choice, then the usage."""
    chat = isinstance(asked, ChatRequest)
    decode = inference.renderer.decode
    choices = [_ChoiceStream(decode, sampling.stop) for _ in range(asked.n)]
    num_drawn = 0
    if chat:
        for index in range(asked.n):
            yield {**head, "choices": [_chat_choice(index, {"role": "assistant", "content": ""})]}
    events = inference.stream(Prompt(token_ids=prompt), sampling=sampling, n=asked.n)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, TokenEvent):
                num_drawn += 1
                yield {
                    **head,
                    "choices": [_token_choice(asked, event, choices, inference.renderer)],
                }
            elif event.choice is not None:
                completion = inference.completion(event.request, event.choice)
                choice = _delta(chat, event.choice, choices[event.choice].rest(completion))
                choice["finish_reason"] = wire_finish_reason(completion.finish_reason)
                choice["stop_reason"] = stop_reason(
                    completion, decode(completion.token_ids), sampling.stop
                )
                yield {**head, "choices": [choice]}
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield {**head, "choices": [], "usage": usage(len(prompt), num_drawn)}


def _token_choice(
    asked: CompletionRequest | ChatRequest,
    event: TokenEvent,
    choices: Sequence[_ChoiceStream],
    renderer: Renderer,
) -> dict[str, Any]:
    chat = isinstance(asked, ChatRequest)
    choice = _delta(chat, event.choice, choices[event.choice].add(event.token_id))
    if asked.wants_logprobs:
        token = renderer.decode(np.array([event.token_id], np.int32), skip_special_tokens=False)
        shape = chat_logprobs if chat else completion_logprobs
        choice["logprobs"] = shape([token], [event.logprob])
    if asked.return_token_ids:
        choice["token_ids"] = [event.token_id]
    return choice


def _delta(chat: bool, index: int, text: str) -> dict[str, Any]:
    if chat:
        return _chat_choice(index, {"content": text})
    return {"index": index, "text": text, "finish_reason": None, "logprobs": None}


def _chat_choice(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": dict(delta), "finish_reason": None, "logprobs": None}
