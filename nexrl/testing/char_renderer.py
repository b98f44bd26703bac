"""CharRenderer: a Renderer without a tokenizer, for tests: one character is one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nexrl.errors import ConfigError
from nexrl.types import IntArray

EOS = 2
_FIRST = 3
"""Id of the character chr(0)."""


class CharRenderer:
    """Characters by code point; id 2 ends a sequence. Messages read `<role>content` + EOS + newline."""

    eos_token_ids: tuple[int, ...] = (EOS,)
    vocab_size = 1024

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self._has_chat_template = has_chat_template
        self.num_calls = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> IntArray:
        """See `Renderer.encode`; there is no BOS."""
        self.num_calls += 1
        return np.array([ord(c) + _FIRST for c in text], np.int32)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> IntArray:
        """See `Renderer.render`."""
        if not self._has_chat_template:
            raise ConfigError("the tokenizer has no chat template, so messages cannot be rendered")
        parts: list[int] = []
        for message in messages:
            parts += self.encode(f"<{message['role']}>{message['content']}").tolist()
            parts += [EOS, ord("\n") + _FIRST]
        if add_generation_prompt:
            parts += self.encode("<assistant>").tolist()
        return np.array(parts, np.int32)

    def decode(self, token_ids: IntArray, *, skip_special_tokens: bool = True) -> str:
        """See `Renderer.decode`."""
        shown = (t for t in token_ids.tolist() if not (skip_special_tokens and t == EOS))
        return "".join("</s>" if t == EOS else chr(t - _FIRST) for t in shown)
