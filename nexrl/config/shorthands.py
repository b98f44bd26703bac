"""One word in place of a section: `trainer.algorithm: dapo` is `{preset: dapo}`.

Applied to every file, stage and override before they are merged, so that a word changes one key of
a mapping below it instead of replacing the mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nexrl.config.nodes import KeyPath, Node

SHORTHANDS: Mapping[KeyPath, str] = {
    ("trainer", "algorithm"): "preset",
    ("trainer", "algorithm", "advantage"): "name",
    ("trainer", "algorithm", "loss"): "name",
    ("trainer", "algorithm", "correction"): "preset",
}
"""Sections that may be written as one word, and the key that the word is the value of."""


def shorthand_key(path: KeyPath) -> str | None:
    """The key that a word at this path stands for, also within a stage; None elsewhere."""
    return SHORTHANDS.get(path[2:] if path[:1] == ("stages",) else path)


def expand_shorthands(node: Node, path: KeyPath = ()) -> Node:
    """The tree with a mapping for every word; each keeps its origin.

    A reference to another key is left for when it is resolved: it may stand for a mapping.
    """
    if isinstance(node.value, dict):
        return replace(
            node, value={k: expand_shorthands(v, (*path, k)) for k, v in node.value.items()}
        )
    if isinstance(node.value, list):
        items = [expand_shorthands(v, (*path, i)) for i, v in enumerate(node.value)]
        return replace(node, value=items)
    key = shorthand_key(path)
    if key is None or not isinstance(node.value, str) or _may_be_a_mapping(node.value):
        return node
    return replace(node, value={key: node})


def _may_be_a_mapping(text: str) -> bool:
    return text.startswith("${") and not text.startswith("${oc.env:")
