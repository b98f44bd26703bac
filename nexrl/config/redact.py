"""Keeps secrets out of everything that is written down: dumps, logs, trackers, the report.

What is secret is known by the name of its key, by its shape (credentials in a URL, a bearer
header), and by value for those that were read from the environment (`LoadedConfig.secrets`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

from nexrl.config.nodes import KeyPath, plain_leaves

REDACTED = "***"

_SECRET_WORDS = frozenset(
    "apikey apikeys token secret secrets password passwords passwd passphrase authorization "  # noqa: SIM905 - a list would be a page long
    "credential credentials cookie bearer".split()
)
_SECRET_KEYS = frozenset({"api", "access", "private", "secret"})
"""Words that make a following `key` or `keys` secret."""
_TEXT_TOKENS = frozenset(
    "eos bos pad unk mask sep cls stop per next last first new end start image".split()  # noqa: SIM905 - as above
)
"""Words that make a following `token` a token of text, of which this field is full."""
_URL_CREDENTIALS = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]*(?=@)|(?<=://)[^\s/@:]+(?=@)")
_BEARER = re.compile(r"\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{4,}", re.IGNORECASE)
_ASSIGNMENT = re.compile(
    r"(?P<key>[\"']?[A-Za-z_.-]*(?:api[_-]?key|password|passwd|secret|token|authorization)[\"']?\s*[=:]\s*)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&}\])\"']+)",
    re.IGNORECASE,
)
_NOT_SECRET = frozenset({"null", "none", "bearer", "basic", REDACTED})
_MIN_SECRET_LENGTH = 4
"""A shorter value would blank out unrelated text wherever it happens to occur."""


def is_secret_key(key: str) -> bool:
    """Whether the name of a key or variable says that its value is secret.

    `api_key`, `HF_TOKEN` and `db.password` are; `max_tokens`, `eos_token` and `prompt_key` are
    not: tokens of text and names of columns are everywhere in this field.
    """
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())
    before, last = words[-2] if len(words) > 1 else "", words[-1]
    if last in ("key", "keys"):
        return before in _SECRET_KEYS
    return last in _SECRET_WORDS and not (last == "token" and before in _TEXT_TOKENS)


def is_secret_path(path: KeyPath) -> bool:
    """Whether a value lies below a secret key."""
    return any(is_secret_key(part) for part in path if isinstance(part, str))


def redact(value: Any, *, secrets: Collection[str] = ()) -> Any:
    """A copy of any nested configuration, mapping, sequence or text without its secrets.

    `secrets` are values to blank out wherever they occur, for example `LoadedConfig.secrets`.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(by_alias=True)
    if isinstance(value, Mapping):
        return {
            key: REDACTED
            if isinstance(key, str) and is_secret_key(key) and _holds_secret(item)
            else redact(item, secrets=secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item, secrets=secrets) for item in value]
    if isinstance(value, str):
        return redact_text(value, secrets=secrets)
    return value


def redact_text(text: str, *, secrets: Collection[str] = ()) -> str:
    """A log line or any other text without its secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, REDACTED)
    text = _URL_CREDENTIALS.sub(REDACTED, text)
    text = _BEARER.sub(rf"\1\2{REDACTED}", text)
    return _ASSIGNMENT.sub(_hide_assigned, text)


def secret_values(value: Any) -> set[str]:
    """Every text below a secret key, so that it can be blanked out of other texts too."""
    return {
        item
        for path, item in plain_leaves(value)
        if isinstance(item, str) and item and is_secret_path(path)
    }


def _holds_secret(item: Any) -> bool:
    """An unset secret stays visible as unset; a number is a count, not a secret."""
    return item is not None and item != "" and not isinstance(item, bool | int | float)


def _hide_assigned(match: re.Match[str]) -> str:
    key, value = match.group("key"), match.group("value")
    name = key.strip(" \t=:\"'")
    if not is_secret_key(name) or value.lower() in _NOT_SECRET or value.isdecimal():
        return match.group()
    return f"{key}{REDACTED}"
