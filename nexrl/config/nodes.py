"""YAML as a tree of nodes that remember their file and line.

First stop of a configuration: `loader.py` reads every file through `read_yaml`, merges the trees,
resolves references in them (`references.py`) and only then gives plain values to the schema. An
error at any later stop can so name the line that the value came from.

Scalars follow the YAML 1.2 core schema: `1e-4` is a number, `no` is a text, `010` is ten and a
date is a text, where YAML 1.1 would surprise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from nexrl.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from."""

    file: str
    """A file relative to the recipe folder, `command line`, `default`, or what brought the value
    with it: `preset dapo`."""
    line: int = 0
    """Line in that file, from 1; 0 when it is not a file."""
    implied: bool = False
    """Whether nobody wrote it: a default, or what came with something that was written."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


COMMAND_LINE = Origin("command line")
DEFAULT = Origin("default", implied=True)


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a configuration tree; immutable, so trees may share branches."""

    value: Any
    """A scalar, or a dict of str to Node, or a list of Node."""
    origin: Origin
    """Where it was written."""
    key_origin: Origin | None = None
    """Where its key was written, if it has one; an unknown key is reported there."""

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def walk(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
        """This node and all below it, with their key paths."""
        yield path, self
        if isinstance(self.value, dict):
            for key, child in self.value.items():
                yield from child.walk((*path, key))
        elif isinstance(self.value, list):
            for index, child in enumerate(self.value):
                yield from child.walk((*path, index))

    def at(self, *path: str) -> Node | None:
        """The node below, by keys and indices; None where there is none."""
        node = self
        for part in path:
            below = node.value
            if isinstance(below, dict) and part in below:
                node = below[part]
            elif isinstance(below, list) and part.isdigit() and int(part) < len(below):
                node = below[int(part)]
            else:
                return None
        return node

    def map_leaves(self, change: Callable[[Node, KeyPath], Node], path: KeyPath = ()) -> Node:
        """The tree with a node in place of every scalar."""
        if isinstance(self.value, dict):
            below = {k: child.map_leaves(change, (*path, k)) for k, child in self.value.items()}
            return replace(self, value=below)
        if isinstance(self.value, list):
            items = [child.map_leaves(change, (*path, i)) for i, child in enumerate(self.value)]
            return replace(self, value=items)
        return change(self, path)

    def origins(self) -> dict[str, Origin]:
        """Origin of every key path; that of the key where there is one."""
        return {dotted(path): node.key_origin or node.origin for path, node in self.walk()}


def dotted(path: KeyPath) -> str:
    """`("data", "sources", 0)` as `data.sources.0`, the spelling of the command line."""
    return ".".join(str(part) for part in path)


def wrap(value: Any, origin: Origin) -> Node:
    """A plain value as a tree whose nodes all have one origin."""
    if isinstance(value, Mapping):
        return Node({k: wrap(v, origin) for k, v in value.items()}, origin, origin)
    if isinstance(value, list):
        return Node([wrap(v, origin) for v in value], origin, origin)
    return Node(value, origin, origin)


def plain_leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Key path and value of everything in a plain value that holds nothing further."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from plain_leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from plain_leaves(item, (*path, index))
    else:
        yield path, value


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`: mappings key by key, anything else replaced as a whole."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return replace(over, value=merged)


def read_yaml(path: Path, name: str) -> Node:
    """The tree of one YAML file; `name` stands for it in origins and errors."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror} ({path})") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8"
        ) from error
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> Node:
    """The tree of a YAML text that must be one mapping; an empty text is an empty mapping."""
    node = _compose(text, name)
    if node is None:
        return Node({}, Origin(name, 1))
    tree = _Builder(name).build(node)
    if tree.value is None:
        return replace(tree, value={})
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{tree.origin}: expected a mapping of settings, got {tree.plain()!r}")
    return tree


def parse_value(text: str) -> Any:
    """The value of one command-line override, read as YAML; empty is null."""
    node = _compose(text, "command line")
    return None if node is None else _Builder("command line").build(node).plain()


def _compose(text: str, name: str) -> yaml.Node | None:
    _check_characters(text, name)
    loader = _CoreLoader(text)
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark and name != COMMAND_LINE.file else name
        detail = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}: not valid YAML: {detail}") from error
    finally:
        loader.dispose()


def _check_characters(text: str, name: str) -> None:
    """Refuse a character that YAML forbids, by line; PyYAML gives an offset only."""
    found = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise ConfigError(f"{name}:{line}: control character {found.group()!r} in YAML")


class _CoreLoader(yaml.SafeLoader):
    """Scalars by the YAML 1.2 core schema, plus `_` between digits."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own hook, filled below


_PATTERNS = {
    "tag:yaml.org,2002:bool": ("tTfF", r"true|True|TRUE|false|False|FALSE"),
    "tag:yaml.org,2002:int": (
        "-+0123456789",
        r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+",
    ),
    "tag:yaml.org,2002:float": (
        "-+0123456789.",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
    "tag:yaml.org,2002:null": ("~nN", r"~|null|Null|NULL|"),
}
_TAGS = {*_PATTERNS, *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq"))}
for _tag, (_first, _pattern) in _PATTERNS.items():
    _CoreLoader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), [*_first])
_CoreLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^$"), [""])


def _scalar(tag: str, text: str) -> Any:
    kind = tag.rpartition(":")[2]
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    digits = text.replace("_", "")
    if kind == "int":
        return int(digits, 0) if digits[:2] in ("0o", "0x") else int(digits)
    if kind == "float":
        return float(digits.replace(".inf", "inf").replace(".nan", "nan").lower())
    return text


class _Builder:
    """Turns PyYAML nodes into ours; refuses what would be lost or guessed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: set[int] = set()

    def build(self, node: yaml.Node, key_origin: Origin | None = None) -> Node:
        origin = self._origin(node)
        if id(node) in self._open:
            raise ConfigError(f"{origin}: an anchor that contains itself")
        self._open.add(id(node))
        try:
            return Node(self._value(node, origin), origin, key_origin)
        finally:
            self._open.discard(id(node))

    def _value(self, node: yaml.Node, origin: Origin) -> Any:
        if node.tag not in _TAGS:
            raise ConfigError(f"{origin}: tag {node.tag!r} is not supported in a configuration")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child) for child in node.value]
        try:
            return _scalar(node.tag, node.value)
        except ValueError as error:
            raise ConfigError(f"{origin}: cannot read {node.value!r}: {error}") from error

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        result: dict[str, Node] = {}
        for key_node, value_node in node.value:
            origin = self._origin(key_node)
            key = key_node.value
            if key == "<<":
                raise ConfigError(
                    f"{origin}: merge keys (<<) are not supported; use `defaults:` or ${{a.b}}"
                )
            if not isinstance(key_node, yaml.ScalarNode) or not isinstance(
                _scalar(key_node.tag, key), str
            ):
                raise ConfigError(f"{origin}: key {key!r} must be a text; put it in quotes")
            if key in result:
                first = result[key].key_origin
                raise ConfigError(f"{origin}: key {key!r} appears twice (first at {first})")
            result[key] = self.build(value_node, origin)
        return result

    def _origin(self, node: yaml.Node) -> Origin:
        if self._name == COMMAND_LINE.file:
            return COMMAND_LINE
        return Origin(self._name, node.start_mark.line + 1)
