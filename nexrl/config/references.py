"""`${a.b.c}` and `${oc.env:NAME,default}` in a configuration tree.

Works on the merged tree of `nodes.py`, before the schema sees it. A text that is one reference
takes the type of what it points to; within a longer text a reference is written out. `\\${` is a
literal `${`. A key that is written nowhere has the schema's default.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nexrl.config.nodes import KeyPath, Node, dotted, parse_value, wrap
from nexrl.config.redact import is_secret_key
from nexrl.errors import ConfigError

_REFERENCE = re.compile(r"(?<!\\)\$\{([^{}]*)\}")
_ENV = "oc.env:"


class _CycleError(ConfigError):
    """A reference that leads to itself."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A tree without references, and what was learnt on the way."""

    tree: Node
    """Same shape; each resolved value keeps the origin of the reference."""
    problems: Mapping[str, str]
    """By key path, one sentence for each reference that cannot be resolved; null in the tree."""
    secrets: frozenset[str]
    """Values of environment variables whose name says that they are secret."""


def resolve_references(
    tree: Node, *, defaults: Mapping[str, Any], is_text: Callable[[KeyPath], bool]
) -> Resolved:
    """Resolve every reference of a tree.

    `defaults` answers for keys that are not written. `is_text` tells where the schema wants a
    text: there an environment variable stays one, elsewhere its value is read as YAML.
    """
    resolver = _Resolver(tree, defaults, is_text)
    resolved = tree.map_leaves(resolver.resolve)
    return Resolved(tree=resolved, problems=resolver.problems, secrets=frozenset(resolver.secrets))


@dataclass(slots=True)
class _Resolver:
    """Invariant: `open` holds the references being followed, so that a cycle is seen."""

    tree: Node
    defaults: Mapping[str, Any]
    is_text: Callable[[KeyPath], bool]
    problems: dict[str, str] = field(default_factory=dict)
    secrets: set[str] = field(default_factory=set)
    open: list[str] = field(default_factory=list)

    def resolve(self, node: Node, path: KeyPath) -> Node:
        """A scalar without references; null with a problem where one cannot be resolved."""
        text = node.value
        if not isinstance(text, str) or "${" not in text:
            return node
        try:
            if whole := _REFERENCE.fullmatch(text):
                # What was found, as if written where the reference stands.
                found = wrap(self._look_up(whole[1], path), node.origin)
                return replace(found, key_origin=node.key_origin)
            if "${" in _REFERENCE.sub("", text).replace("\\${", ""):
                raise ConfigError(r"`${` without its `}` (write \${ for a literal ${)")
            written = _REFERENCE.sub(lambda match: self._as_text(match[1]), text)
            return replace(node, value=written.replace("\\${", "${"))
        except ConfigError as error:
            if self.open and isinstance(error, _CycleError):
                raise  # told once, of the key that one came from
            self.problems[dotted(path)] = f"{dotted(path)}: {error} ({node.origin})"
            return replace(node, value=None)

    def _as_text(self, reference: str) -> str:
        value = self._look_up(reference, None)
        if isinstance(value, dict | list) or value is None:
            raise ConfigError(f"${{{reference}}} is {value!r}; within a text it must be a scalar")
        return str(value).lower() if isinstance(value, bool) else str(value)

    def _look_up(self, reference: str, path: KeyPath | None) -> Any:
        """The value that a reference stands for; `path` is None within a longer text."""
        reference = reference.strip()
        if reference.startswith(_ENV):
            text = path is None or self.is_text(path)
            return self._environment(reference.removeprefix(_ENV), text=text)
        if ":" in reference:
            raise ConfigError(
                f"unknown resolver in ${{{reference}}}; there is only oc.env:NAME,default"
            )
        if reference in self.open:
            chain = " -> ".join([*self.open[self.open.index(reference) :], reference])
            raise _CycleError(f"references form a cycle: {chain}")
        self.open.append(reference)
        try:
            return self._follow(reference)
        finally:
            self.open.pop()

    def _follow(self, reference: str) -> Any:
        node: Node = self.tree
        path: KeyPath = ()
        for part in reference.split("."):
            if isinstance(node.value, str):  # perhaps a reference to a mapping
                node = self._resolved(node, path, reference)
            child = node.at(part)
            if child is None:
                return self._default(reference)
            node, path = child, (*path, part)
        return self._resolved(node, path, reference).plain()

    def _resolved(self, node: Node, path: KeyPath, reference: str) -> Node:
        """The node without references; a problem inside becomes a problem of `reference`."""
        inner = replace(self, problems={})
        resolved = node.map_leaves(inner.resolve, path)
        for text in inner.problems.values():
            raise ConfigError(f"${{{reference}}} cannot be resolved: {text}")
        return resolved

    def _default(self, reference: str) -> Any:
        value: Any = self.defaults
        for part in reference.split("."):
            if not isinstance(value, Mapping) or part not in value:
                known = sorted({dotted(path) for path, _ in self.tree.walk() if path})
                near = difflib.get_close_matches(reference, known, 1)
                hint = f"; did you mean ${{{near[0]}}}?" if near else ""
                raise ConfigError(f"${{{reference}}} points to no key{hint}")
            value = value[part]
        return value

    def _environment(self, argument: str, *, text: bool) -> Any:
        name, comma, default = argument.partition(",")
        name = name.strip()
        value = os.environ.get(name)
        if value is None and not comma:
            raise ConfigError(
                f"environment variable {name} is not set and ${{oc.env:{name}}} has no default"
            )
        if value is None:
            value = default
        elif is_secret_key(name) and value:
            self.secrets.add(value)
        return value if text else parse_value(value)
