"""Text out of tokens as they come: whole characters, stop strings across tokens."""

from __future__ import annotations

import pytest

from nexrl.services.inference.engines.builtin.stop_text import (
    IncrementalText,
    StopText,
    first_stop,
    held_back,
)
from nexrl.types import IntArray


def decode_bytes(ids: IntArray) -> str:
    """One token for each byte, as byte-level tokenizers have in the worst case."""
    return bytes(int(i) for i in ids).decode(errors="replace")


def test_an_emoji_split_over_tokens_appears_once_it_is_whole() -> None:
    """FR-008: a fragment is never shown nor encoded again."""
    text = IncrementalText(decode_bytes)
    pieces = [text.add(b) for b in "a😀b".encode()]
    assert pieces == ["a", "", "", "", "😀", "b"]


def test_a_stop_string_is_found_across_tokens() -> None:
    watch = StopText(decode_bytes, ["\nQ:", "END"])
    found = [watch.add(b) for b in b"one\nQ:"]
    assert found == [None] * 5 + ["\nQ:"]


def test_a_near_miss_does_not_stop() -> None:
    watch = StopText(decode_bytes, ["END"])
    assert [watch.add(b) for b in b"ENENXEN"] == [None] * 7
    assert watch.add(ord("D")) == "END"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("a b c", [" c", " b"], (1, " b")),
        ("abc", ["b", "bc"], (1, "bc")),
        ("abc", ["x"], None),
    ],
)
def test_the_earliest_stop_wins_then_the_longest(
    text: str, stops: list[str], expected: tuple[int, str] | None
) -> None:
    assert first_stop(text, stops) == expected


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [("hello <", ["</s>"], 1), ("hello </s", ["</s>"], 3), ("hello", ["</s>"], 0), ("x", [], 0)],
)
def test_the_beginning_of_a_stop_string_is_held_back(
    text: str, stops: list[str], expected: int
) -> None:
    assert held_back(text, stops) == expected
