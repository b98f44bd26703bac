"""Who may import whom: the table below is the rule, the files are the facts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "nexrl"
FILES = sorted(PACKAGE.rglob("*.py"))

NOUNS = ("types", "errors", "wire")
BASE = (*NOUNS, "protocols")
PURE = (*BASE, "atomic", "config", "algorithms", "rendering", "blocking_pool", "weight_manifest")
SEAMS = (*PURE, "services.*.protocol")
MODULES = ("data", "rollout", "pool", "trainer", "weight_sync", "activity")
CLIENTS = ("services.http", "services.*.protocol", "services.*.client")
EVERYTHING = (*PURE, *MODULES, "services", "controller", "checkpoint", "report")

# Unit -> what it may import beside itself. `*` stands for one name; a unit covers what is below it.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "types": ("errors",),
    "wire": ("errors", "types"),
    "protocols": NOUNS,
    "atomic": (),
    "config": (*BASE, "algorithms"),
    "algorithms": BASE,
    "rendering": BASE,
    "blocking_pool": BASE,
    "weight_manifest": BASE,
    **dict.fromkeys(MODULES, SEAMS),
    "services": (),
    "services.http": BASE,
    "services.*.protocol": BASE,
    "services.*": (*SEAMS, "services.http"),
    # A trained reward model is scored by the code that trained it.
    "services.reward.model": (*SEAMS, "services.reward", "services.train.backends.hf_model"),
    "report": (*PURE, "activity"),
    "checkpoint": (*SEAMS, *MODULES),
    "controller": (*SEAMS, *MODULES, *CLIENTS, "checkpoint", "report"),
    "launch": EVERYTHING,
    "cli": (*EVERYTHING, "launch"),
    "testing": (*EVERYTHING, "launch"),
}

HEAVY = frozenset(
    [
        "datasets",
        "gguf",
        "jinja2",
        "matplotlib",
        "openai",
        "pyarrow",
        "ray",
        "reasoning_gym",
        "safetensors",
        "tensorboardX",
        "tokenizers",
        "torch",
        "transformers",
        "wandb",
    ]
)
MAY_BE_HEAVY = frozenset({"server", "backends", "engines"})
"""Rooms of a service in which models live."""


def dotted(path: Path) -> str:
    """`pool/ledger.py` as `pool.ledger`; a package's `__init__` as the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def covers(unit: str, module: str) -> bool:
    """Whether a unit of the table is the module or lies above it."""
    names, inside = unit.split("."), module.split(".")
    return len(names) <= len(inside) and all(
        u in ("*", m) for u, m in zip(names, inside, strict=False)
    )


def unit_of(module: str) -> str | None:
    """The most specific unit of the table that covers a module."""
    found = [unit for unit in MAY_IMPORT if covers(unit, module)]
    return max(found, key=lambda unit: unit.count("."), default=None)


def allowed_for(module: str) -> tuple[str, ...]:
    """What a module may import: the entries of its unit, and the unit itself under its own names."""
    if not module:
        return ("errors", "types")
    unit = unit_of(module)
    assert unit is not None, f"nexrl.{module} belongs to no unit: add it to MAY_IMPORT"
    return (*MAY_IMPORT[unit], ".".join(module.split(".")[: unit.count(".") + 1]))


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        base = node.module or ""
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and `pool.ledger.Ledger` for each name of NexRL, imported at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for name in imported_names(node):
            if name.startswith("nexrl."):
                yield node.lineno, name.removeprefix("nexrl.")  # type: ignore[attr-defined]


def top_level_imports(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Imports that run when the module is imported: not in functions, not for the type checker."""
    for statement in body:
        for name in imported_names(statement):
            yield statement.lineno, name
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from top_level_imports(statement.orelse)
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from top_level_imports(
                [s for s in ast.iter_child_nodes(statement) if isinstance(s, ast.stmt)]
            )


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    allowed = allowed_for(dotted(path))
    wrong = [
        f"{name_of(path)}:{line} imports nexrl.{name}"
        for line, name in own_imports(path)
        if name != "__version__" and not any(covers(entry, name) for entry in allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_heavy_packages_are_imported_at_the_top_only_where_models_live(path: Path) -> None:
    names = dotted(path).split(".")
    if names[0] == "services" and MAY_BE_HEAVY & set(names[2:]):
        return
    heavy = [
        f"{name_of(path)}:{line} imports {name}"
        for line, name in top_level_imports(ast.parse(path.read_text(encoding="utf-8")).body)
        if name.split(".")[0] in HEAVY
    ]
    assert heavy == []


def test_the_table_has_no_cycle() -> None:
    allowed = {
        unit: {
            other
            for entry in entries
            for other in MAY_IMPORT
            if other != unit and covers(entry, other)
        }
        for unit, entries in MAY_IMPORT.items()
    }
    order: list[str] = []
    while len(order) < len(allowed):
        free = [unit for unit in allowed if unit not in order and allowed[unit] <= set(order)]
        assert free, f"a cycle among {sorted(set(allowed) - set(order))}"
        order += free


@pytest.mark.parametrize(
    ("module", "name", "may"),
    [
        ("pool.ledger", "pool.admission.Slots", True),
        ("pool.ledger", "trainer.trainer.Trainer", False),
        ("trainer.policy_gradient", "services.train.protocol.TrainService", True),
        ("trainer.policy_gradient", "services.train.client.Client", False),
        ("services.train.server", "services.inference.protocol.InferenceClient", True),
        ("services.train.server", "services.inference.server.Engine", False),
        ("services.train.server", "pool.ledger.Ledger", False),
        ("controller", "services.train.server.Server", False),
    ],
)
def test_the_rule_itself_tells_right_from_wrong(module: str, name: str, may: bool) -> None:
    assert any(covers(entry, name) for entry in allowed_for(module)) is may
