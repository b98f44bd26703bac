"""`key=value` of the command line, put into a configuration tree.

The value is read as YAML. List entries are addressed by index, or by name where they have one:
`data.sources.0.path=a.jsonl`, `stages.rl.trainer.num_steps=20`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nexrl.config.nodes import COMMAND_LINE, Node, dotted, merge, parse_value, wrap
from nexrl.config.shorthands import expand_shorthands
from nexrl.errors import ConfigError

_INDEX = re.compile(r"\[(\w+)\]")
"""`sources[0]`, another spelling of `sources.0`."""


@dataclass(frozen=True, slots=True)
class Override:
    """One setting of the command line."""

    path: tuple[str, ...]
    """Key path; an entry of a list is its index or name."""
    node: Node
    """The value, with the command line as origin."""


def parse_overrides(texts: Sequence[str]) -> tuple[Override, ...]:
    """Read every `key=value`; a value that is not YAML is refused with its key."""
    overrides = []
    for text in texts:
        key, equals, value = text.partition("=")
        parts = tuple(part.strip() for part in _INDEX.sub(r".\1", key).split("."))
        if not equals or not all(parts):
            raise ConfigError(
                f"{text!r} on the command line: an override is written key=value, "
                "for example trainer.num_steps=20"
            )
        try:
            node = wrap(parse_value(value), COMMAND_LINE)
        except ConfigError as error:
            raise ConfigError(
                f"{text!r}: {error}; an override with spaces is written in quotes"
            ) from error
        overrides.append(Override(parts, expand_shorthands(node, parts)))
    return tuple(overrides)


def apply_overrides(tree: Node, overrides: Sequence[Override]) -> Node:
    """The tree with every override in it; a mapping is merged, anything else replaces."""
    for override in overrides:
        tree = _put(tree, override.path, override, 0)
    return tree


def _put(node: Node, path: tuple[str, ...], override: Override, depth: int) -> Node:
    if depth == len(path):
        return merge(node, override.node)
    part, here = path[depth], dotted(path[:depth])
    if isinstance(node.value, list):
        index = _index(node.value, part, here)
        items = list(node.value)
        if index == len(items):
            items.append(Node({}, COMMAND_LINE, COMMAND_LINE))
        items[index] = _put(items[index], path, override, depth + 1)
        return replace(node, value=items)
    if node.value is None or (isinstance(node.value, str) and "${" in node.value):
        node = replace(node, value={})
    if not isinstance(node.value, dict):
        raise ConfigError(
            f"{dotted(path)} (command line): {here} is {node.plain()!r}, which has no keys"
        )
    if part == "stages" and depth == 0 < len(path) - 1 and part not in node.value:
        raise ConfigError(f"{dotted(path)} (command line): the recipe has no stages")
    child = node.value.get(part, Node({}, COMMAND_LINE, COMMAND_LINE))
    return replace(node, value={**node.value, part: _put(child, path, override, depth + 1)})


def _index(items: list[Node], part: str, here: str) -> int:
    """The entry's index; one past the end appends."""
    if part.isdigit() and int(part) <= len(items):
        return int(part)
    names = [
        item.value["name"].plain() if isinstance(item.value, dict) and "name" in item.value else ""
        for item in items
    ]
    if part in names:
        return names.index(part)
    accepted = ", ".join([*(str(i) for i in range(len(items) + 1)), *(n for n in names if n)])
    raise ConfigError(
        f"{here}.{part} (command line): {here} has no entry {part!r}; it has {accepted}"
    )
