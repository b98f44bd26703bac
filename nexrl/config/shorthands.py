"""One word in place of a section: `trainer.algorithm: dapo` is `{preset: dapo}`.

Applied to every file, stage and override before they are merged, so that a word changes one key of
a mapping below it instead of replacing the mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nexrl.config.nodes import KeyPath, Node

SHORTHANDS: Mapping[tuple[str, ...], str] = {
    ("trainer", "algorithm"): "preset",
    ("trainer", "algorithm", "advantage"): "name",
    ("trainer", "algorithm", "loss"): "name",
    ("trainer", "algorithm", "correction"): "preset",
}
"""Sections that may be written as one word, and the key that the word is the value of."""


def shorthand_key(path: KeyPath) -> str | None:
    """The key that a word at this path stands for, also within a stage; None elsewhere."""
    below = path[2:] if path[:1] == ("stages",) else path
    return SHORTHANDS.get(tuple(map(str, below)))


def expand_shorthands(tree: Node, path: KeyPath = ()) -> Node:
    """The tree at a path with a mapping for every word; each keeps its origin.

    A reference to another key is left for when it is resolved: it may stand for a mapping.
    """
    return tree.map_leaves(_expanded, path)


def _expanded(node: Node, path: KeyPath) -> Node:
    key, text = shorthand_key(path), node.value
    if key is None or not isinstance(text, str):
        return node
    may_be_a_mapping = text.startswith("${") and not text.startswith("${oc.env:")
    return node if may_be_a_mapping else replace(node, value={key: node})
