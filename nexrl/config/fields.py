"""What every key accepts, in words: read off the schema, so that it cannot drift from it.

Errors (`problems.py`) and the configuration reference (`reference.py`) use the same words.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import annotated_types
from pydantic.fields import FieldInfo

from nexrl.config.nodes import KeyPath
from nexrl.config.schema import RunConfig, Section

ITEM = "*"
"""Stands for any list index in a pattern of a key path."""

_KINDS: Mapping[Any, str] = {
    **{int: "integer", float: "number", str: "text", bool: "true or false"},
    **{Literal: "choice", tuple: "list", dict: "mapping"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of the schema."""

    path: tuple[str, ...]
    """Key path; `*` where a list index stands."""
    kind: str
    """Type in words: integer, number, text, true or false, list, mapping, choice, section."""
    accepted: str
    """What is accepted, as the end of a sentence: `an integer of at least 1`."""
    entry: str
    """The same of one entry of a list or mapping; empty for anything else."""
    default: Any
    """The value when the key is not written."""
    description: str
    """The sentence of the reference."""
    section: type[Section] | None = None
    """The group of settings below this key, if it is one or a list of them."""

    @property
    def key(self) -> str:
        """`data.sources.*.path`"""
        return ".".join(self.path)


@cache
def all_fields() -> Mapping[tuple[str, ...], Field]:
    """Every key, sections included, in the order of the schema."""
    return {field.path: field for field in _fields_of(RunConfig, ())}


def find_field(path: KeyPath) -> Field | None:
    """The field at a key path with list indices, or None."""
    pattern = tuple(ITEM if isinstance(p, int) or p.isdigit() else p for p in path)
    return all_fields().get(pattern)


def wants_text(path: KeyPath) -> bool:
    """Whether the schema has a text at this path."""
    field = find_field(path)
    return field is not None and field.kind == "text"


def keys_of(section: type[Section]) -> list[str]:
    """Keys of one section as they are written in YAML."""
    return [info.alias or name for name, info in section.model_fields.items()]


def _fields_of(section: type[Section], prefix: tuple[str, ...]) -> Iterator[Field]:
    for name, info in section.model_fields.items():
        path = (*prefix, info.alias or name)
        below, is_list = _section_in(info.annotation)
        yield Field(
            path=path,
            kind="section" if below and not is_list else _kind(info.annotation),
            accepted=_accepted(info),
            entry=_entry(info.annotation),
            default=None if below and not is_list else info.default,
            description=_description(info, below),
            section=below,
        )
        if below:
            yield from _fields_of(below, (*path, ITEM) if is_list else path)


def _description(info: FieldInfo, section: type[Section] | None) -> str:
    text = info.description or (section.__doc__ if section else None) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section that a field holds, and whether it holds a list of them."""
    arguments = typing.get_args(annotation)
    held = arguments[0] if arguments else annotation
    is_section = isinstance(held, type) and issubclass(held, Section)
    return (held, bool(arguments)) if is_section else (None, False)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        rest = [a for a in typing.get_args(annotation) if a is not type(None)]
        return rest[0], True
    return annotation, False


def _kind(annotation: Any) -> str:
    plain, _ = _without_none(annotation)
    return _KINDS[typing.get_origin(plain) or plain]


def _accepted(info: FieldInfo) -> str:
    plain, optional = _without_none(info.annotation)
    return _words(plain) + _bounds(info.metadata) + (", or null" if optional else "")


def _entry(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return _words(arguments[0])
    if origin is not dict or arguments[1] is Any:
        return ""
    kinds = typing.get_args(arguments[1]) or arguments[1:]
    kinds = tuple(kind for kind in kinds if kind is not int or float not in kinds)
    return " or ".join("null" if kind is type(None) else _words(kind) for kind in kinds)


def _words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(str(a) for a in arguments)}"
    if origin is tuple:
        of_length = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
        return f"a list{of_length}, each entry {_entry(annotation)}"
    section, _ = _section_in(annotation)
    if section and not arguments:
        return f"a mapping with keys {', '.join(keys_of(section))}"
    nouns = {bool: "true or false", str: "a text", int: "an integer", float: "a number"}
    return nouns.get(annotation, "a mapping")


def _bounds(metadata: list[Any]) -> str:
    words = []
    for bound in metadata:
        if isinstance(bound, annotated_types.Ge):
            words.append(f"of at least {bound.ge}")
        elif isinstance(bound, annotated_types.Gt):
            words.append(f"greater than {bound.gt}")
        elif isinstance(bound, annotated_types.Le):
            words.append(f"at most {bound.le}")
        elif isinstance(bound, annotated_types.Lt):
            words.append(f"less than {bound.lt}")
        elif pattern := getattr(bound, "pattern", None):
            words.append(f"that matches {pattern}")
    return " " + " and ".join(words) if words else ""
