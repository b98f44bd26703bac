"""What is wrong with a configuration, in words: key, value, what is accepted, origin.

The schema (pydantic) finds problems with types, ranges and names; `rules.py` those between keys.
All are collected and raised as one ConfigError, so that a user fixes a file in one go.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from nexrl.algorithms.presets import PRESETS
from nexrl.config.fields import ITEM, Field, all_fields, find_field, keys_of
from nexrl.config.nodes import DEFAULT, KeyPath, Origin, dotted, parse_value
from nexrl.config.redact import REDACTED, is_secret_key, redact
from nexrl.config.schema import RunConfig
from nexrl.config.shorthands import shorthand_key
from nexrl.errors import ConfigError, nearest

_NUMBER_LIKE = re.compile(r"[-+.\w]+")
_MENTIONED = re.compile(r"[a-z_]\w*(?:\.\w+)+|^\w+")
"""Keys in a sentence: what has dots, and its first word."""
_MAX_SHOWN = 80
"""Characters of a refused value that an error shows."""


def raise_problems(problems: Iterable[str], *, recipe: str) -> None:
    """Raise one ConfigError that lists every problem once; do nothing when there is none."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        raise ConfigError(unique[0])
    if unique:
        lines = "\n".join(f"  {i}. {text}" for i, text in enumerate(unique, 1))
        raise ConfigError(f"{len(unique)} problems in the configuration of {recipe}:\n{lines}")


def schema_problems(
    error: ValidationError, origins: Mapping[str, Origin], *, without: Collection[str] = ()
) -> list[str]:
    """One sentence for each finding of the schema, except at the keys of `without`."""
    problems = []
    for finding in error.errors(include_url=False):
        if dotted(finding["loc"]) in without:
            continue
        text = _sentence(finding["type"], finding["loc"], finding.get("input"))
        problems.append(f"{text}{origin_of(finding['loc'], origins)}")
    return problems


def origin_of(path: KeyPath, origins: Mapping[str, Origin]) -> str:
    """` (rl_train.yaml:41)` of the key or of the nearest written key above it; empty if none."""
    for length in range(len(path), 0, -1):
        origin = origins.get(dotted(path[:length]))
        if origin is not None:
            return f" ({origin})"
    return ""


def located(text: str, origins: Mapping[str, Origin]) -> str:
    """A sentence with the line of what it speaks of: the first key in it that somebody wrote, else a
    written section around one, else what brought one (`preset dapo`)."""
    keys = [_with_word(key) for key in _MENTIONED.findall(text)]
    above = [key.rsplit(".", up)[0] for key in keys for up in range(1, key.count("."))]
    found = [origins[key] for key in (*keys, *above) if key in origins]
    found = [o for o in found if not o.implied] or [o for o in found if o != DEFAULT]
    return f"{text} ({found[0]})" if found else text


def _with_word(key: str) -> str:
    """The key that holds the one word which a section may be written as."""
    word = shorthand_key(tuple(key.split(".")))
    return f"{key}.{word}" if word else key


def show(value: Any, key: str = "") -> str:
    """A refused value as it is written in YAML, shortened; a secret one is not shown."""
    if key and is_secret_key(key):
        return REDACTED
    text = json.dumps(redact(value), ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _sentence(kind: str, path: KeyPath, value: Any) -> str:
    if kind == "extra_forbidden":
        return unknown_key(path)
    field = _field_above(path)
    if field is None:
        return f"{dotted(path)} must be another type, got {show(value, str(path[-1]))}"
    if kind == "missing":
        return f"{dotted(path)} is missing; {field.key} must be {field.accepted}"
    accepted, hint = field.accepted, _type_hint(value, field)
    if len(path) > len(field.path):  # an entry, perhaps with the member of a union that was tried
        path, accepted, hint = path[: len(field.path) + 1], field.entry, ""
    elif field.kind == "section":
        word = shorthand_key(path)
        accepted = "a mapping of settings" + (f", or its {word} as one word" if word else "")
    elif field.path == ("trainer", "type") and value in PRESETS:
        hint = f"; write trainer.algorithm: {value}"
    return f"{dotted(path)} must be {accepted}, got {show(value, str(path[-1]))}{hint}"


def _field_above(path: KeyPath) -> Field | None:
    """The field of a path, or of the list or mapping that the path leads into."""
    for length in range(len(path), 0, -1):
        field = find_field(path[:length])
        if field is not None:
            return field
    return None


def _type_hint(value: Any, field: Field | None) -> str:
    if field is None:
        return ""
    if field.section and field.kind == "section":
        keys = f"; its keys are {', '.join(keys_of(field.section))}"
        return keys if value is not None else "; leave the key out, or write {} for the defaults"
    if field.kind in ("integer", "number", "true or false") and isinstance(value, str):
        plain = parse_value(value) if _NUMBER_LIKE.fullmatch(value) else value
        return "" if isinstance(plain, str) else "; write it without quotes"
    if field.kind == "integer" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if field.kind == "list" and not isinstance(value, list | dict):
        return f"; write [{value}]"
    if field.kind == "choice" and isinstance(value, str):
        choices = field.accepted.removeprefix("one of ").removesuffix(", or null").split(", ")
        return nearest(value, choices)
    return ""


def unknown_key(path: KeyPath) -> str:
    """An unknown key with the keys there are, and the nearest spelling or the right section."""
    above, leaf = _field_above(path[:-1]), str(path[-1])
    section = above.section if above else RunConfig
    siblings = keys_of(section) if section else []
    where = f"{dotted(path[:-1])}" if len(path) > 1 else "the top level"
    suggestion = suggest(leaf, path[:-1], siblings)
    text = f"{dotted(path)} is not a key"
    key, colon, value = leaf.partition(":")
    if colon and key in siblings:
        return f"{text}; write `{key}: {value}`, with a space after the colon"
    if suggestion:
        return f"{text}; did you mean {suggestion}?"
    return f"{text}; {where} accepts {', '.join(siblings)}"


def suggest(leaf: str, above: KeyPath, siblings: Sequence[str]) -> str:
    """The likeliest full key paths for a leaf name that does not exist below `above`; or ""."""
    word = shorthand_key(above)
    if word and leaf in ("name", "preset", "type"):
        return dotted((*above, word))
    longer = [key for key in siblings if key.startswith(leaf)]
    elsewhere = _paths_with_leaf(leaf)
    close = [key for key in elsewhere if key.startswith(dotted(above))]
    near = longer if longer or elsewhere else difflib.get_close_matches(leaf, siblings, 1)
    if found := [*(dotted((*above, key)) for key in near), *(close or elsewhere)]:
        return " or ".join(found[:3])
    leaves = sorted({path[-1] for path in all_fields()})
    near = difflib.get_close_matches(leaf, leaves, 1, cutoff=0.8)
    return " or ".join(_paths_with_leaf(near[0])[:3]) if near else ""


def _paths_with_leaf(leaf: str) -> list[str]:
    return [
        field.key.replace(f".{ITEM}", "[]")
        for path, field in all_fields().items()
        if path[-1] == leaf
    ]
