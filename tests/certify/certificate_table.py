"""The certificate: bounds, rows, and the page that lists them.

[Certified] + stored comparison with TRL -> docs/certificate.md
"""

from __future__ import annotations

import json
import math
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
    "ranks": 1e-9,
    "service": 1e-4,
    "trainer": 1e-5,
    "extremes": 0.0,
}
"""Check -> largest error accepted."""


def worst(errors: Iterable[float]) -> float:
    """The largest error, 0 of none; what is no number is larger than all: `max` would lose it."""
    return max((math.inf if math.isnan(e) else float(e) for e in errors), default=0.0)


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
| float64 | value and gradient against the reference, numpy and torch, on random and on degenerate inputs: one token, none, zero advantages, every token beyond a clip, all masked, groups of one, constant but for rounding, and incomplete, several turns, more tokens than are worked on at once | 1e-9 |
| float32 | the same in float32, from the same numbers | 1e-4 |
| by hand | implementation and reference against numbers worked by hand (`tests/certify/hand_*.py` shows the arithmetic), and the default settings against literal ones | 1e-9 |
| differences | analytic gradient against central differences, stop-gradients held, away from kinks | 1e-6 |
| invariance | rows or members in another order, and chunks of one and two: same sum, same gradients | 1e-9 |
| ranks | rows dealt to two and three ranks, one of them without a trained token or without a row, with unequally many micro-steps: each sums its own terms under the weights of the whole step, and the gradients are summed, for every aggregation that the loss allows | 1e-9 |
| service | gradient by a model's weights through the train service: one chunk or several, rows backwards, micro-batches padded, single and packed, and the reference's gradient sent through `backward`; float32 | 1e-4 |
| trainer | from trajectories to weights: `trainer.algorithm` as it is written in a recipe, through configuration, trainer and a small train service, as one optimizer step and as two; float32 columns | 1e-5 |
| extremes | results, gradients and their squared norms in float32 that are not finite: logprobs 80 nats apart both ways, no token, one, 4,096, all masked; verdicts on such inputs that are not the reference's | 0 |

An error is the largest difference over the largest number expected (of a loss: over the sum of its
terms' sizes). (x) marks experimental names. A dash: the check does not apply, for the reason given
under the heading. `tests/unit/train/test_ranks.py` makes the check `ranks` once more with two
processes and a collective.
"""

Reasons = Sequence[tuple[str, str]]

ABSENT: Mapping[str, Reasons] = {
    "advantage": (
        ("differences", "a loss takes them as numbers, nothing is differentiated"),
        ("ranks, service", "they are made once for a whole batch, before a row is sent anywhere"),
        ("trainer", "every one of them is in a preset below"),
    ),
    "loss": (("trainer", "presets below; the service evaluates the same function"),),
    "preference loss": (
        ("service", "the trainer evaluates them and sends gradients of logprobs or values"),
        ("trainer", "every one of them is a preset below"),
    ),
    "KL estimator": (("ranks, service", "certified as a term of the losses above"),),
    "aggregation": (
        ("float32", "weights are made in float64"),
        ("differences", "nothing is differentiated"),
        ("service", "a loss takes them as an input"),
    ),
    "correction": (
        ("float32", "weights are made in float64"),
        ("differences", "no gradient flows through them, by construction"),
        ("ranks", "they are made for a whole optimizer step, before rows are dealt"),
        ("service", "a loss takes them as an input"),
    ),
    "filter": (
        ("float32, differences", "a verdict is no number"),
        ("ranks, service, trainer", "the pool asks them before there is a batch"),
    ),
    "shaping rule": (
        ("float32", "rewards are float64 throughout"),
        ("differences", "nothing is differentiated"),
        ("ranks, service", "rewards are shaped before a row is sent anywhere"),
    ),
    "entropy setting": (
        ("float32, differences", "of the three, only `coefficient` multiplies what has a gradient"),
        ("ranks, service", "certified as a term of the losses above"),
    ),
    "learning-rate schedule": (
        ("float32, differences", "a plain float of a step's number"),
        ("invariance, ranks, service", "no row is looked at"),
        ("trainer", "the optimizer's settings are no part of an objective"),
    ),
    "preset": (
        (
            "float64, float32, differences",
            "a preset is a choice among the parts certified above; by hand its settings are held "
            "against literal ones (`reference_compositions.py`)",
        ),
        ("ranks, service", "those of its loss and its aggregation"),
    ),
    "metric": (
        (
            "float64, float32",
            "metrics are read off whole batches, with float32 columns: column trainer",
        ),
        ("by hand", "in `tests/unit/algorithms/test_metrics.py`"),
        ("differences", "nothing is differentiated"),
        ("ranks, service", "the trainer makes them of what the service returns, in one process"),
    ),
}
"""Family -> (checks, why they do not apply) to some or to all of its names."""


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
    checks = list(BOUNDS)
    reasons = "; ".join(f"{names}: {reason}" for names, reason in ABSENT.get(family, ()))
    lines = [
        f"## {_title(family)}",
        "",
        *([f"Dashes: {reasons}.", ""] if reasons else []),
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


def unexplained(rows: Iterable[Certified]) -> list[str]:
    """Dashes without a reason, and reasons without a dash."""
    rows, found = list(rows), []
    for family in dict.fromkeys(row.family for row in rows):
        own = [row for row in rows if row.family == family and row.errors]
        dashed = {check for check in BOUNDS if any(check not in row.errors for row in own)}
        reasons = {check for names, _ in ABSENT.get(family, ()) for check in names.split(", ")}
        found += [f"{family}: {check}" for check in sorted(dashed ^ reasons)]
    return found
