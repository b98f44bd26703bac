"""Text out of tokens as they are drawn: for streaming, and to find stop strings.

A character may be spread over several tokens, so a token's text is known only with its
neighbours: decoding goes on from the last point at which the text was whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nexrl.types import IntArray

Decode = Callable[[IntArray], str]
_INCOMPLETE = "\ufffd"


class IncrementalText:
    """Decodes a growing token sequence at a cost that does not grow with it.

    Invariant: the pieces returned so far, joined, are a prefix of the text of all tokens.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def add(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is still incomplete."""
        self._ids.append(token_id)
        # The tokens from _prefix to _read are decoded again as context: some tokenizers write a
        # token's leading space only when another stands before it.
        before = self._text(self._prefix, self._read)
        after = self._text(self._prefix, len(self._ids))
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _text(self, start: int, end: int) -> str:
        return self._decode(np.asarray(self._ids[start:end], np.int32)) if end > start else ""


class StopText:
    """Watches the text of one sequence for its stop strings."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._text = IncrementalText(decode)
        self._stops = tuple(stops)
        self._keep = max(len(s) for s in stops) - 1
        self._tail = ""

    def add(self, token_id: int) -> str | None:
        """The stop string that this token completes, if any."""
        piece = self._text.add(token_id)
        if not piece:
            return None
        window = self._tail + piece
        found = first_stop(window, self._stops)
        self._tail = window[-self._keep :] if self._keep else ""
        return found[1] if found else None


class StreamedText:
    """What a stream may show of one choice: nothing that may still become a stop string.

    Invariant: what was sent, joined, is a prefix of the completion's text.
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._text = IncrementalText(decode)
        self._stops = stops
        self._held = ""
        self._num_sent = 0

    def add(self, token_id: int) -> str:
        """The text that can be sent now; a token that completes a stop string is the last."""
        text = self._held + self._text.add(token_id)
        if first_stop(text, self._stops):
            return ""
        num_ready = len(text) - held_back(text, self._stops)
        self._held = text[num_ready:]
        self._num_sent += num_ready
        return text[:num_ready]

    def rest(self, whole: str) -> str:
        """What of the completion's text was not sent yet."""
        return whole[self._num_sent :]


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Position and value of the earliest stop string in the text; the longest at one position."""
    hits = [(at, -len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not hits:
        return None
    at, _, stop = min(hits)
    return at, stop


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end that may be the beginning of a stop string."""
    longest = max((len(s) for s in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
