"""PromptBuilder: the prompt of a data item as token ids, tokenised once for all who ask.

Used by the built-in workers and by `RolloutWorker.generate`; the ids it makes are what the
inference client sends. The same item gives the very same `Prompt`, so that concurrent calls of
one rollout group can be coalesced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from nexrl.config.schema import DataConfig, RolloutWorkerConfig
from nexrl.errors import DataError
from nexrl.protocols import Renderer
from nexrl.types import IntArray, Prompt

V = TypeVar("V")
Messages = Sequence[Mapping[str, Any]]
PromptLike = str | Messages | Prompt | IntArray | Sequence[int]

_NUM_CACHED = 4096


class BoundedCache(Generic[V]):
    """Values by key; the oldest entry leaves when it is full.

    Invariant: at most `limit` entries.
    """

    def __init__(self, limit: int = _NUM_CACHED) -> None:
        self._limit = limit
        self._values: dict[str, V] = {}

    def get(self, key: str, make: Callable[[], V]) -> V:
        """The value of the key, made on first use."""
        value = self._values.get(key)
        if value is None:
            value = make()
            if len(self._values) >= self._limit:
                del self._values[next(iter(self._values))]
            self._values[key] = value
        return value


class PromptBuilder:
    """Data items, texts and messages to prompts, as the configuration says."""

    def __init__(self, renderer: Renderer, config: RolloutWorkerConfig, data: DataConfig) -> None:
        self._renderer = renderer
        self._config = config
        self._data = data
        self._cache: BoundedCache[Prompt] = BoundedCache()

    def of_row(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt of a data item: its prompt column, else its messages column."""
        value = row.get(self._data.prompt_key)
        if type(value) is str:
            return self._of_text(value)
        return self.build(self.source_of(row))

    def source_of(self, row: Mapping[str, Any]) -> str | Messages:
        """The string or messages that the item is prompted with; DataError when it has neither."""
        for key in (self._data.prompt_key, self._data.messages_key):
            value = row.get(key)
            if value is None:
                continue
            if isinstance(value, str) or _is_messages(value):
                source: str | Messages = value
                return source
            raise DataError(
                f"column {key!r} must hold a string or a non-empty list of messages with a "
                f"`role` each, got {value!r:.80}"
            )
        columns = ", ".join(sorted(map(str, row))) or "none"
        raise DataError(
            f"the row has neither column {self._data.prompt_key!r} (data.prompt_key) nor "
            f"{self._data.messages_key!r} (data.messages_key); it has: {columns}"
        )

    def build(self, prompt: PromptLike) -> Prompt:
        """A prompt from a text, messages, token ids, or a prompt as it is."""
        if isinstance(prompt, str):
            return self._of_text(prompt)
        if isinstance(prompt, Prompt):
            return prompt
        if _is_messages(prompt):
            messages: Messages = prompt  # type: ignore[assignment]
            return self._cache.get(repr(messages), lambda: self._render(messages))
        token_ids = np.asarray(prompt)
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu" or not len(token_ids):
            raise DataError(
                "a prompt is a string, a non-empty list of messages, a Prompt or a non-empty list "
                f"of token ids, got {prompt!r:.80}"
            )
        return Prompt(token_ids=token_ids.astype(np.int32))

    def _of_text(self, text: str) -> Prompt:
        return self._cache.get(text, lambda: self._encode(text))

    def _encode(self, text: str) -> Prompt:
        if self._config.chat_template:
            system, user = self._config.system_prompt, {"role": "user", "content": text}
            messages = [user] if system is None else [{"role": "system", "content": system}, user]
            return Prompt(token_ids=self._renderer.render(messages), text=text)
        token_ids = self._renderer.encode(text)
        if not len(token_ids):
            raise DataError(f"the prompt {text!r:.80} has no tokens")
        return Prompt(token_ids=token_ids, text=text)

    def _render(self, messages: Messages) -> Prompt:
        text = "\n".join(f"{m['role']}: {m.get('content', '')}" for m in messages)
        return Prompt(token_ids=self._renderer.render(messages), text=text)


def _is_messages(value: Any) -> bool:
    """A non-empty list of mappings, each with a role."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(m, Mapping) and "role" in m for m in value)
    )
