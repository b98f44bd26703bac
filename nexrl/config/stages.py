"""`stages`: named overrides of some sections, run one after another.

A stage is the recipe with the stage's settings on top, and the command line on top of that: an
override without a stage in its key holds for every stage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from nexrl.config.nodes import Node, merge
from nexrl.config.overrides import Override, apply_overrides
from nexrl.config.problems import suggest
from nexrl.errors import nearest

STAGE_SECTIONS = ("data", "rollout_worker", "trajectory_pool", "trainer", "weight", "validate")
"""Sections that may differ between stages; services, launch and seed hold for the whole run."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def split_stages(
    tree: Node, resolved: Node, overrides: Sequence[Override]
) -> tuple[list[tuple[str, Node]], list[str]]:
    """Name and unresolved tree of each stage, in order; and what is wrong with the list itself.

    Names are read from the resolved tree. Without stages both lists are empty.
    """
    node = tree.at("stages")
    entries = node.value if node is not None and isinstance(node.value, list) else []
    base = {key: child for key, child in tree.value.items() if key != "stages"}
    common = [o for o in overrides if o.path[0] != "stages"]
    stages: list[tuple[str, Node]] = []
    problems: list[str] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry.value, dict):
            continue  # the schema names it
        named = resolved.at("stages", str(index), "name")
        name = named.value if named is not None and isinstance(named.value, str) else ""
        problems += _problems(f"stages.{index}", entry, name, [other for other, _ in stages])
        own = {key: child for key, child in entry.value.items() if key in STAGE_SECTIONS}
        merged = merge(replace(tree, value=base), Node(own, entry.origin))
        stages.append((name or str(index), apply_overrides(merged, common)))
    return stages, problems


def _problems(key: str, entry: Node, name: str, others: Sequence[str]) -> list[str]:
    problems = []
    if not _NAME.fullmatch(name):
        got = f", got {name!r}" if name else ""
        problems.append(
            f"{key} needs a `name` of letters, digits, `.`, `_` and `-`, unique in the run{got} "
            f"({entry.origin})"
        )
    elif name in others:
        problems.append(
            f"{key}.name {name!r} is used twice; names of stages are unique ({entry.origin})"
        )
    for child_key, child in entry.value.items():
        if child_key != "name" and child_key not in STAGE_SECTIONS:
            hint = nearest(child_key, ("name", *STAGE_SECTIONS))
            meant = "" if hint else suggest(child_key, (), STAGE_SECTIONS)
            if meant.partition(".")[0] in STAGE_SECTIONS:
                hint = f"; did you mean {meant}?"
            hint = hint or f"; it may set {', '.join(STAGE_SECTIONS)}"
            origin = child.key_origin or child.origin
            problems.append(f"{key}.{child_key} cannot be set in a stage{hint} ({origin})")
    return problems
