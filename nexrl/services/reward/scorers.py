r"""Answer scorers for recipes: `reward: nexrl.services.reward.scorers:number_match`.

Small and strict: a wrong answer is never right because a right one is contained in it, and a gold
answer that cannot be read gives None (not scored), never 1 (FR-062). Each reports `correct` and
`unparsed` as reward parts, so that the rate of unreadable answers is a metric.

Equal for `boxed_math` (FR-067): `1/2` and `0.5`; `1,000` and `1000`; `\frac12`, `\dfrac{1}{2}` and
`1/2`; `7.41\%` and `7.41%`; `(1,2)` and `(1, 2)`; `x=3` and `3`; `3.0` and `3`.

Not equal, on purpose:

| gold | answer | why |
|---|---|---|
| `50%` | `0.5` | a percentage is not the bare number |
| `\frac{\sqrt{2}}{2}` | `\frac{1}{\sqrt{2}}` | no symbolic algebra, only spelling |
| `1\frac{1}{2}` | `1.5` | a mixed number reads like a product |
| `\{1,2\}` | `\{2,1\}` | order counts |
| `(0,1)` | `[0,1]` | brackets mean something |
| `3 cm` | `3` | units count |
| `1/3` | `0.333` | a rounded number is another number |
"""

from __future__ import annotations

import re
from fractions import Fraction

from nexrl.services.reward.protocol import RewardResult
from nexrl.services.reward.signature import instant

_NUMBER = re.compile(
    r"(?<![\w.])[-\u2212]?"  # a sign only where no operand stands before it
    r"(?>(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+)"
    r"(?>(?:[eE][-+]?\d{1,3}(?!\d))?)"
    r"(?!\.?\d|[eE][-+]?\d)"  # 1.2.3 and 1e9999 are no numbers
    r"(?:\s*/\s*\d+(?![\d.]*\d))?"
    r"(?:\s*\\?%)?"
)
_MAX_NUMBER_CHARS = 64
_UNREAD = RewardResult(value=None, parts={"unparsed": 1.0})
_RIGHT = RewardResult(value=1.0, parts={"correct": 1.0, "unparsed": 0.0})
_WRONG = RewardResult(value=0.0, parts={"correct": 0.0, "unparsed": 0.0})
_NO_ANSWER = RewardResult(value=0.0, parts={"correct": 0.0, "unparsed": 1.0})

Number = tuple[Fraction, bool]
"""Exact value, and whether it is written as a percentage."""


@instant
def exact_match(
    completion: str, answer: str, *, tag: str | None = None, ignore_case: bool = False
) -> RewardResult:
    """1 when the completion is the answer, white space around it aside. With `tag="answer"` what
    stands between `<answer>` and `</answer>` is compared; there must be exactly one such pair."""
    gold = answer.strip()
    if not gold:
        return _UNREAD
    given = completion
    if tag is not None:
        found = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", completion, re.DOTALL)
        if len(found) != 1:
            return _NO_ANSWER
        given = found[0]
    given = given.strip()
    if ignore_case:
        given, gold = given.casefold(), gold.casefold()
    return _RIGHT if given == gold else _WRONG


@instant
def number_match(completion: str, answer: str | int | float) -> RewardResult:
    """1 when the last number in the completion equals the answer exactly, as numbers do: `1/2` is
    `0.5`, `1,000` is `1000`, and `21` is not `1` (FR-065)."""
    gold = _whole_number(str(answer))
    if gold is None:
        return _UNREAD
    found = [match.group() for match in _NUMBER.finditer(completion)]
    given = _to_number(found[-1]) if found else None
    if given is None:
        return _NO_ANSWER
    return _RIGHT if given == gold else _WRONG


@instant
def boxed_math(completion: str, answer: str | int | float) -> RewardResult:
    r"""1 when the last `\boxed{...}` of the completion equals the answer, up to the spellings
    listed at the top of this file. The answer may be boxed itself."""
    text = str(answer)
    gold = _boxed(text) if r"\boxed" in text else text
    if gold is None or not _is_readable(gold):
        return _UNREAD
    given = _boxed(completion)
    if given is None or not _is_readable(given):
        return _NO_ANSWER
    return _RIGHT if _canonical(given) == _canonical(gold) else _WRONG


def _whole_number(text: str) -> Number | None:
    """The number that the whole text is, or None."""
    match = _NUMBER.fullmatch(text.strip())
    return None if match is None else _to_number(match.group())


def _to_number(text: str) -> Number | None:
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    percent = text.endswith("%")
    plain = text.rstrip("%\\").replace(",", "").replace("\u2212", "-")
    numerator, _, denominator = (part.strip() for part in plain.partition("/"))
    try:
        value = Fraction(numerator) / Fraction(denominator or 1)
    except (ValueError, ZeroDivisionError):
        return None
    return value, percent


def _boxed(text: str) -> str | None:
    r"""Contents of the last `\boxed{...}`, braces balanced; None when there is none."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = start + len(r"\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def _is_readable(text: str) -> bool:
    return bool(_spelled(text)) and text.count("{") == text.count("}")


_COMMANDS_WITHOUT_MEANING = re.compile(r"\\(?:left|right|displaystyle|[!,;: ])|[$~]|\\[()]")
_TEXT_COMMANDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)")
_PLAIN_FRACTION = re.compile(r"(-?)\\frac\{(-?[\d,.]+)\}\{([\d,.]+)\}")
_ASSIGNMENT = re.compile(r"^[A-Za-z]=(?!=)(.+)$")
_BRACKETS = {"(": ")", "[": "]", r"\{": r"\}"}


def _spelled(text: str) -> str:
    """One spelling for each way to write the same: no spacing, no text commands, plain fractions."""
    text = _COMMANDS_WITHOUT_MEANING.sub("", text.strip().rstrip("."))
    text = _TEXT_COMMANDS.sub(r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text).replace(r"\%", "%").replace("\u2212", "-")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = re.sub(r"\s+", "", text)
    whole = _PLAIN_FRACTION.fullmatch(text)
    if whole is not None:
        sign = "-" if (whole[1] == "-") != whole[2].startswith("-") else ""
        text = f"{sign}{whole[2].lstrip('-')}/{whole[3]}"
    assignment = _ASSIGNMENT.match(text)
    return assignment[1] if assignment else text


def _canonical(text: str) -> object:
    """A value that is equal exactly for equal answers: a number, a bracketed list, or a spelling."""
    text = _spelled(text)
    number = _whole_number(text)
    if number is not None:
        return number
    if "," in text and len(text) > 2:
        for opening, closing in _BRACKETS.items():
            for end in (")", "]") if opening != r"\{" else (closing,):
                if text.startswith(opening) and text.endswith(end):
                    inner = text[len(opening) : -len(end)]
                    return (opening, tuple(_canonical(p) for p in _split(inner)), end)
        parts = _split(text)
        if len(parts) > 1:
            return ("", tuple(_canonical(p) for p in parts), "")
    return text


def _split(text: str) -> list[str]:
    """Parts between the commas that stand in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
