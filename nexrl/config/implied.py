"""Settings that come with a name: what a preset, a correction, a loss or an estimator brings.

They lie above the schema's defaults and below everything that is written, each with its origin
(`preset dapo`). What is written lower down wins:

    names of the preset bring  <  the preset sets  <  written names bring  <  written

A preset's settings of a loss, estimator or correction go when another one is written in its place:
the clip range of ppo says nothing about cispo. The aggregation stays; it belongs to the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import reduce
from typing import Any

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.corrections import CORRECTION_PRESETS
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.presets import Preset, find_preset
from nexrl.config.fields import all_fields
from nexrl.config.nodes import DEFAULT, Node, Origin, merge, wrap
from nexrl.config.shorthands import SHORTHANDS
from nexrl.errors import ConfigError

ALGORITHM = ("trainer", "algorithm")
_KEPT = {"aggregation"}
"""Keys of a preset's section that stay when the section's name changes."""


def implied_settings(written: Node) -> tuple[Node, list[str]]:
    """What the names of a tree bring with them, and what is wrong with the preset's name.

    `written` has its references resolved and its shorthands expanded.
    """
    node = written.at(*ALGORITHM, "preset")
    name = all_fields()[(*ALGORITHM, "preset")].default if node is None else node.value
    if not isinstance(name, str):
        return Node({}, DEFAULT), []  # the schema names it
    try:
        preset = find_preset(name)
    except ConfigError as error:
        where = f" ({node.key_origin or node.origin})" if node else ""
        return Node({}, DEFAULT), [f"{error}{where}"]
    parts = (preset.settings, *_shares(preset, written))
    settings = reduce(merge, (_implied(part, f"preset {name}") for part in parts))
    settings = _without_replaced(settings, written)
    layers = (*_brought(settings), settings, *_brought(written))
    return reduce(merge, layers, Node({}, DEFAULT)), []


def _implied(settings: Any, by: str) -> Node:
    return wrap(settings, Origin(by, implied=True))


def _shares(preset: Preset, written: Node) -> Iterator[dict[str, Any]]:
    """A preset's settings that are a share of another setting, where that makes a number."""
    for key, (other, share) in preset.shares.items():
        path = tuple(other.split("."))
        node = written.at(*path)
        whole = all_fields()[path].default if node is None else node.value
        if isinstance(whole, int) and int(share * whole):
            yield _nested(tuple(key.split(".")), int(share * whole))


def _without_replaced(settings: Node, written: Node) -> Node:
    """A preset's settings less those of sections for which another name is written."""
    for path, key in SHORTHANDS.items():
        own, other = settings.at(*path), written.at(*path, key)
        if path == ALGORITHM or own is None or other is None:
            continue
        name = own.at(key)
        if name is None or name.value != other.value:
            kept = {k: v for k, v in own.value.items() if k in _KEPT}
            settings = _replaced(settings, path, replace(own, value=kept))
    return settings


def _brought(tree: Node) -> Iterator[Node]:
    """What the names of losses, estimators and corrections in a tree bring."""

    def word(*path: str) -> str:
        node = tree.at(*ALGORITHM, *path)
        return node.value if node is not None and isinstance(node.value, str) else ""

    def bring(by: str, **settings: Any) -> Node:
        return _implied(_nested(ALGORITHM, settings), by)

    preset, action = word("correction", "preset"), word("correction", "action")
    if preset in CORRECTION_PRESETS and preset != "none":
        correction = asdict(CORRECTION_PRESETS[preset])
        yield bring(f"correction {preset}", correction=correction, recompute_proximal=True)
    elif action not in ("", "none"):
        yield bring(f"correction {action}", recompute_proximal=True)
    loss, advantage = word("loss", "name"), word("advantage", "name")
    if loss in LOSSES and LOSSES[loss].aggregation:
        yield bring(f"loss {loss}", loss={"aggregation": LOSSES[loss].aggregation})
    if advantage in ADVANTAGES and "greedy_rewards" in ADVANTAGES[advantage].needs:
        yield bring(f"advantage {advantage}", greedy_baseline=True)


def _replaced(tree: Node, path: tuple[str, ...], node: Node) -> Node:
    if not path:
        return node
    child = _replaced(tree.value[path[0]], path[1:], node)
    return replace(tree, value={**tree.value, path[0]: child})


def _nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    nested: dict[str, Any] = value
    return nested
