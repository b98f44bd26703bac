"""Docs are tested: fences compile or run, every setting and flag is described, links lead somewhere."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from nexrl.cli.main import make_parser
from nexrl.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^ *```\s*$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
_WORD = re.compile(r"--[a-z][a-z-]+")


@dataclass(frozen=True)
class Fence:
    """A code block of a page."""

    page: Path
    """Where it stands."""
    line: int
    """Line of its first line of code."""
    info: tuple[str, ...]
    """Words after the backticks: language, then `run` (must run) or `outline` (is no program)."""
    code: str
    """Without the indentation of its list."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def fences(language: str) -> Iterator[Fence]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            info = tuple(match["info"].split())
            if info[:1] == (language,):
                line = text.count("\n", 0, match.start("body")) + 1
                yield Fence(page, line, info, textwrap.dedent(match["body"]))


def config_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted key of every field, as a user writes it."""
    for name, info in model.model_fields.items():
        key = prefix + (info.alias or name)
        yield key
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from config_keys(kind, f"{key}.")


def described_keys(reference: str) -> set[str]:
    """Keys of the reference: a heading names a group, the rows of its table the settings in it."""
    found: set[str] = set()
    group = ""
    for line in reference.splitlines():
        if match := re.match(r"#+ `?([a-z_.]+)`?$", line):
            group = f"{match[1]}."
            found.add(match[1])
        elif line.startswith("#"):
            group = ""
        elif match := re.match(r"\| `([a-z_]+)` \|", line):
            found.add(group + match[1])
    return found


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """Every long option of a parser and its commands."""
    found: set[str] = set()
    for action in parser._actions:
        found |= {option for option in action.option_strings if option.startswith("--")}
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= flags(command)
    return found - {"--help"}


@pytest.mark.parametrize("fence", list(fences("python")), ids=str)
def test_python_in_the_docs_compiles(fence: Fence) -> None:
    if "outline" not in fence.info:
        compile(fence.code, str(fence), "exec")


@pytest.mark.parametrize("fence", [f for f in fences("python") if "run" in f.info], ids=str)
def test_python_in_the_docs_that_is_marked_runs(fence: Fence, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", fence.code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{fence}\n{done.stderr}"


@pytest.mark.parametrize("fence", list(fences("yaml")), ids=str)
def test_yaml_in_the_docs_parses(fence: Fence) -> None:
    yaml.safe_load(fence.code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = _LINK.findall(page.read_text(encoding="utf-8"))
    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_every_setting_is_in_the_configuration_reference() -> None:
    """FR-161: docs and settings drift apart."""
    reference = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert sorted(set(config_keys(RunConfig)) - described_keys(reference)) == []


def test_the_configuration_reference_describes_no_setting_that_does_not_exist() -> None:
    reference = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    known = set(config_keys(RunConfig))
    sections = {key for key in described_keys(reference) if key.split(".")[0] in known}
    assert sorted(sections - known) == []


def test_every_command_line_flag_is_described_in_the_docs() -> None:
    described = {w for page in PAGES for w in _WORD.findall(page.read_text(encoding="utf-8"))}
    assert flags(make_parser()) - described == set()


def test_every_metric_that_the_tracker_makes_is_in_the_metrics_page() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("activity", "report")
        for path in sorted((ROOT / "nexrl" / folder).glob("*.py"))
    ]
    families = (
        "reward|rollout|goodput|time|memory|error|reward_service|validation|mismatch|loss|nll"
    )
    names = {n for s in sources for n in re.findall(rf'"((?:{families})/[a-z0-9_]+)"', s)}
    assert len(names) > 20
    assert [n for n in sorted(names) if f"`{n}`" not in page] == []


def test_pins_cover_every_direct_dependency_of_the_tested_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        n: r for n, r in project["optional-dependencies"].items() if n not in ("ray", "kubernetes")
    }
    wanted = {
        re.split(r"[<>=\[]", requirement)[0].lower()
        for requirement in (*project["dependencies"], *(r for rs in extras.values() for r in rs))
    } - {"nexrl"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if not line.startswith("#")}
    assert wanted - pinned == set()
    assert all("==" in line for line in lines if line and not line.startswith("#"))


def test_every_make_target_is_listed_by_help_and_declared_phony() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split())
    assert set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.MULTILINE)) == phony
