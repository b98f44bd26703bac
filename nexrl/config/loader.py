"""From a recipe folder to a RunConfig: files, inheritance, overrides, references, schema, rules.

Order: `rl_train.yaml` on top of its `defaults:` (`nodes.py`), the command line on top of both
(`overrides.py`), `${...}` resolved (`references.py`), what names bring with them put below
(`implied.py`), types and ranges (`schema.py`), rules between keys (`rules.py`). Every problem found
is raised in one ConfigError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from nexrl.config.fields import wants_text
from nexrl.config.implied import implied_settings
from nexrl.config.nodes import (
    DEFAULT,
    Node,
    Origin,
    dotted,
    merge,
    plain_leaves,
    read_yaml,
    wrap,
)
from nexrl.config.overrides import apply_overrides, parse_overrides
from nexrl.config.problems import raise_problems, schema_problems
from nexrl.config.redact import secret_values
from nexrl.config.references import resolve_references
from nexrl.config.rules import rule_problems
from nexrl.config.rules_stages import mixed_heads, unread_settings
from nexrl.config.schema import RunConfig
from nexrl.config.shorthands import expand_shorthands
from nexrl.config.stages import split_stages
from nexrl.errors import ConfigError

RECIPE_FILE = "rl_train.yaml"
MAIN_STAGE = "main"
"""Name of the only stage of a recipe without `stages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One stage of a run: the recipe with the stage's overrides, checked as a whole."""

    name: str
    """Unique in the run."""
    config: RunConfig
    """Complete configuration of the stage."""
    provenance: Mapping[str, Origin]
    """Where each value came from, by key path."""

    @property
    def prefix(self) -> str:
        """What sentences about the stage begin with; nothing in a recipe without `stages`."""
        return _prefix(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A recipe as it will run."""

    config: RunConfig
    """The recipe without its stages' overrides; settings that hold for the whole run."""
    recipe_dir: Path
    """Folder that paths in the recipe are relative to."""
    provenance: Mapping[str, Origin]
    """Where each value came from, by key path: a file and line, the command line, or default."""
    stages: tuple[StageConfig, ...]
    """At least one, in the order in which they run."""
    secrets: frozenset[str] = field(repr=False)
    """Secret values, to be blanked out of logs."""


def load_run_config(recipe: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, resolve and check a recipe: a folder with rl_train.yaml, or the file itself.

    Raises ConfigError with every problem found.
    """
    path = _recipe_file(Path(recipe))
    recipe_dir = path.parent.resolve()
    settings = parse_overrides(overrides)
    tree = apply_overrides(_read_with_defaults(path.resolve(), recipe_dir, ()), settings)

    whole = _Checked.of(tree)
    trees, wrong = split_stages(tree, whole.tree, settings)
    problems = [*whole.problems, *wrong]
    stages = []
    for name, stage_tree in trees or [(MAIN_STAGE, tree)]:
        stage = _Checked.of(stage_tree) if trees else whole
        found = stage.problems
        if stage.config is not None:
            found = rule_problems(stage.config, stage.tree.origins())
            provenance = stage.provenance(stage.config)
            stages.append(StageConfig(name=name, config=stage.config, provenance=provenance))
        problems += [_prefix(name) + text for text in found if text not in problems]
    problems += [*mixed_heads(stages), *unread_settings(stages)]
    config = whole.require_config(problems, recipe=path.name)
    return LoadedConfig(
        config=config,
        recipe_dir=recipe_dir,
        provenance=whole.provenance(config),
        stages=tuple(stages),
        secrets=whole.secrets,
    )


def settings_alone(overrides: Sequence[str]) -> RunConfig:
    """Defaults with `key=value` settings and no recipe, for serving one service by itself."""
    checked = _Checked.of(apply_overrides(Node({}, DEFAULT), parse_overrides(overrides)))
    return checked.require_config(checked.problems, recipe="the command line")


def _prefix(stage: str) -> str:
    return "" if stage == MAIN_STAGE else f"stage {stage}: "


@dataclass(frozen=True, slots=True)
class _Checked:
    """A tree as the schema sees it."""

    tree: Node
    """References resolved and shorthands expanded, on top of what its names bring with them."""
    config: RunConfig | None
    """None when there are problems."""
    problems: list[str]
    secrets: frozenset[str]

    @classmethod
    def of(cls, tree: Node) -> _Checked:
        defaults = wrap(json.loads(RunConfig().model_dump_json(by_alias=True)), DEFAULT)
        names = resolve_references(tree, defaults=defaults.plain(), is_text=wants_text).tree
        implied, problems = implied_settings(expand_shorthands(names))
        # Again, now that a reference to a setting of the preset has its value.
        resolved = resolve_references(
            tree, defaults=merge(defaults, implied).plain(), is_text=wants_text
        )
        written = expand_shorthands(resolved.tree)
        whole = merge(implied, written)
        problems = [*resolved.problems.values(), *problems]
        config = None
        try:
            text = json.dumps(whole.plain())
            config = RunConfig.model_validate_json(text, strict=True)
        except ValidationError as error:
            problems += schema_problems(error, whole.origins(), without=resolved.problems.keys())
        secrets = resolved.secrets | secret_values(written.plain())
        return cls(whole, None if problems else config, problems, secrets)

    def require_config(self, problems: Sequence[str], *, recipe: str) -> RunConfig:
        """The configuration, when nothing is wrong with it or with the run around it."""
        raise_problems(problems, recipe=recipe)
        assert self.config is not None
        return self.config

    def provenance(self, config: RunConfig) -> dict[str, Origin]:
        """Origin of every leaf of the configuration, defaults included."""
        origins = self.tree.origins()
        keys = (dotted(path) for path, _ in plain_leaves(config.model_dump(by_alias=True)))
        return {key: origins.get(key, DEFAULT) for key in keys}


def _recipe_file(recipe: Path) -> Path:
    if recipe.is_file():
        return recipe
    file = recipe / RECIPE_FILE
    if file.is_file():
        return file
    if recipe.is_dir():
        raise ConfigError(f"recipe folder {recipe} has no {RECIPE_FILE}")
    raise ConfigError(f"there is no recipe {recipe}: a recipe is a folder with {RECIPE_FILE}")


def _read_with_defaults(path: Path, recipe_dir: Path, open_files: tuple[Path, ...]) -> Node:
    """One file on top of those that its `defaults:` name, in order; later wins."""
    if path in open_files:
        chain = " -> ".join(_display(p, recipe_dir) for p in (*open_files, path))
        raise ConfigError(f"defaults form a cycle: {chain}")
    tree = expand_shorthands(read_yaml(path, _display(path, recipe_dir)))
    own = dict(tree.value)
    bases = own.pop("defaults", None)
    merged = Node({}, tree.origin)
    for entry in _default_entries(bases):
        base = (path.parent / entry.value).resolve()
        base = base / RECIPE_FILE if base.is_dir() else base
        if not base.is_file():
            raise ConfigError(f"defaults: there is no file {entry.value!r} ({entry.origin})")
        merged = merge(merged, _read_with_defaults(base, recipe_dir, (*open_files, path)))
    return merge(merged, replace(tree, value=own))


def _default_entries(node: Node | None) -> list[Node]:
    if node is None or node.value is None:
        return []
    entries = node.value if isinstance(node.value, list) else [node]
    for entry in entries:
        if not isinstance(entry.value, str):
            raise ConfigError(
                f"defaults must be a path or a list of paths, relative to this file, "
                f"got {entry.plain()!r} ({entry.origin})"
            )
    return entries


def _display(path: Path, recipe_dir: Path) -> str:
    return os.path.relpath(path, recipe_dir)
