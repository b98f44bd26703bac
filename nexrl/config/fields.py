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


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of the schema."""

    path: tuple[str, ...]
    """Key path; `*` where a list index stands."""
    kind: str
    """Type in words: integer, number, text, true or false, list, mapping, section."""
    accepted: str
    """What is accepted, as the end of a sentence: `an integer of at least 1`."""
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
            kind=_kind(info.annotation, below, is_list),
            accepted=_accepted(info.annotation, info.metadata),
            default=None if below and not is_list else info.default,
            description=_description(info, path),
            section=below,
        )
        if below:
            yield from _fields_of(below, (*path, ITEM) if is_list else path)


def _description(info: FieldInfo, path: tuple[str, ...]) -> str:
    if not info.description:
        raise AssertionError(f"the schema has no sentence for {'.'.join(path)}")
    return info.description


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section that a field holds, and whether it holds a list of them."""
    if _is_section(annotation):
        return annotation, False
    arguments = typing.get_args(annotation)
    if arguments and _is_section(arguments[0]):
        return arguments[0], True
    return None, False


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        rest = [a for a in typing.get_args(annotation) if a is not type(None)]
        return rest[0], True
    return annotation, False


def _kind(annotation: Any, section: type[Section] | None, is_list: bool) -> str:
    if section:
        return "list" if is_list else "section"
    plain, _ = _without_none(annotation)
    origin = typing.get_origin(plain)
    if origin is Literal:
        return "choice"
    if origin in (tuple, dict):
        return "list" if origin is tuple else "mapping"
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[plain]


def _accepted(annotation: Any, metadata: list[Any]) -> str:
    plain, optional = _without_none(annotation)
    return _words(plain, metadata) + (", or null" if optional else "")


def _words(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if _is_section(annotation):
        return f"a mapping with keys {', '.join(keys_of(annotation))}"
    if origin is Literal:
        return f"one of {', '.join(str(a) for a in arguments)}"
    if origin is dict:
        return "a mapping"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"a list, each entry {_words(arguments[0], [])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each entry {_words(arguments[0], [])}"
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "a text" + _pattern_words(metadata)
    noun = "an integer" if annotation is int else "a number"
    return noun + _range_words(metadata)


def _range_words(metadata: list[Any]) -> str:
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
    return " " + " and ".join(words) if words else ""


def _pattern_words(metadata: list[Any]) -> str:
    for constraint in metadata:
        pattern = getattr(constraint, "pattern", None)
        if pattern:
            return f" that matches {pattern}"
    return ""
