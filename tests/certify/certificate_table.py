"""The certificate: bounds, rows, and the page that lists them.

[Certified] + stored comparison with TRL -> docs/certificate.md
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Errors = Mapping[str, float]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "certificate.md"
TRL_RESULT = Path(__file__).with_name("trl_result.json")
BOUNDS: Mapping[str, float] = {
    "float64": 1e-9,
    "float32": 1e-4,
    "by hand": 1e-9,
    "differences": 1e-6,
    "invariance": 1e-9,
    "service": 1e-4,
    "extremes": 0.0,
}
"""Check -> largest error accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """One line of the certificate."""

    family: str
    """Heading that it stands under."""
    name: str
    """As in configuration."""
    errors: Errors
    """Worst error by check; a check that says nothing of this family is left out, and a name
    without a reference has none."""
    experimental: bool = False
    """Listed, but not promised."""

    def failures(self) -> list[str]:
        """Checks beyond their bound, and a missing reference, in words."""
        if not self.errors:
            return [] if self.experimental else [f"{self.family} {self.name} has no reference"]
        return [
            f"{self.family} {self.name}: {check} is {error:.2e}, accepted is {BOUNDS[check]:.0e}"
            for check, error in self.errors.items()
            if not error <= BOUNDS[check]
        ]


INTRODUCTION = """# Certificate

What each algorithm of `nexrl/algorithms/` computes, held against a second, independent one: short
Python loops in float64, written from the papers (`tests/certify/reference_*.py`), which share no
code with what they judge. `make certify` runs every check and writes this page; `make test` runs
them too and fails when a name is missing here, has no reference, or is out of bounds.

| column | what is compared | accepted |
|---|---|---|
| float64 | loss and gradient against the reference, numpy and torch, on random and on degenerate inputs: one token, zero advantages, every token beyond a clip, all masked, groups of one, constant and incomplete groups, several turns | 1e-9 |
| float32 | the same in float32, from the same numbers | 1e-4 |
| by hand | implementation and reference against numbers worked by hand (`tests/certify/hand_*.py` shows the arithmetic) | 1e-9 |
| differences | analytic gradient against central differences, stop-gradients held, away from kinks | 1e-6 |
| invariance | rows in another order, and chunks of one and two: same sum, same gradients | 1e-9 |
| service | gradient by a model's weights through the train service: one chunk or several, rows backwards, micro-batches padded, single and packed, and the reference's gradient sent through `backward`; float32 | 1e-4 |
| extremes | losses and gradients that are not finite: logprobs 80 nats apart both ways, no token, one, 4,096, all masked | 0 |

An error is the largest difference over the largest number expected (of a loss: over the sum of its
terms' sizes). A dash: the check says nothing about the family. (x) marks experimental names.
"""


def page(rows: Iterable[Certified]) -> str:
    """The whole page."""
    rows = list(rows)
    families = dict.fromkeys(row.family for row in rows)
    parts = [INTRODUCTION]
    parts += [_family(family, [row for row in rows if row.family == family]) for family in families]
    failures = [failure for row in rows for failure in row.failures()]
    parts.append("## Failures\n\n" + ("\n".join(f"- {f}" for f in failures) or "None.") + "\n")
    if TRL_RESULT.exists():
        parts.append(_trl(json.loads(TRL_RESULT.read_text(encoding="utf-8"))))
    return "\n".join(parts)


def listed(text: str) -> set[tuple[str, str]]:
    """(family, name) of every line of a page's tables of names."""
    found, family = set(), ""
    for line in text.splitlines():
        if line.startswith("## "):
            family = line[3:].removesuffix("es" if line.endswith("sses") else "s")
        if line.startswith("| `"):
            found.add((family, line.split("`")[1]))
    return found


def _title(family: str) -> str:
    return f"{family}es" if family.endswith("s") else f"{family}s"


def _family(family: str, rows: Sequence[Certified]) -> str:
    checks = [check for check in BOUNDS if any(check in row.errors for row in rows)]
    lines = [
        f"## {_title(family)}",
        "",
        _line(["name", *checks]),
        _line(["---"] * (len(checks) + 1)),
    ]
    lines += [_line(_cells(row, checks)) for row in rows]
    return "\n".join(lines) + "\n"


def _cells(row: Certified, checks: Sequence[str]) -> Iterator[str]:
    yield f"`{row.name}`" + (" (x)" if row.experimental else "")
    for check in checks:
        if not row.errors:
            yield "not certified"
        elif check not in row.errors:
            yield "-"
        elif check == "extremes":
            yield f"{row.errors[check]:.0f}"
        else:
            yield f"{row.errors[check]:.0e}" if row.errors[check] else "0"


def _trl(result: Mapping[str, Any]) -> str:
    lines = [
        f"## Beside TRL {result['version']}",
        "",
        "TRL's own loss code on the same tensors (`make certify-trl`): largest difference of loss and",
        "gradient, as it is, and once what stands in the last column is taken into account.",
        "",
        _line(["name", "TRL", "as it is", "accounted for", "difference and its cause"]),
        _line(["---"] * 5),
    ]
    for row in result["rows"]:
        numbers = (f"{row[key]:.0e}" if row[key] else "0" for key in ("as_is", "accounted"))
        lines.append(_line([row["name"], f"`{row['trl']}`", *numbers, row["cause"]]))
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
