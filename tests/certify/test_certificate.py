"""Every algorithm against its independent reference, and the page that says so."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nexrl.algorithms
from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.aggregation import AGGREGATIONS
from nexrl.algorithms.corrections import ACTIONS, LEVELS, CorrectionPreset
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from tests.certify.certificate_table import ABSENT, BOUNDS, PAGE, Certified, listed, page
from tests.certify.certifier import certify_name, present_names
from tests.certify.certify_advantages import certify_advantage
from tests.certify.certify_losses import certify_loss
from tests.certify.certify_parts import correction_errors
from tests.certify.certify_preference import certify_preference
from tests.certify.certify_ranks import rank_error, weights_by_rank
from tests.certify.certify_service import Hosted, certify_in_service, hosted_models
from tests.certify.certify_trainer import compare, comparisons
from tests.certify.reference_compositions import READ, SAMPLED, Composition

NOT_NAMES_OF_ALGORITHMS = {"PROVIDERS", "PREFERENCE_INPUTS", "REGULARISERS"}
"""Tables in `nexrl.algorithms` whose keys nobody selects."""
WHOLE_BATCHES = [
    pytest.param(family, name, marks=[pytest.mark.slow] if family == "metric" else [])
    for family, name in present_names()
]
"""Metrics are read off every composition at once."""


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Hosted:
    return hosted_models(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("family", "name"), WHOLE_BATCHES)
def test_name_is_what_its_paper_says(family: str, name: str) -> None:
    """FR-029, FR-031, FR-034, FR-035, FR-037, FR-038, FR-043, FR-044, FR-047, FR-053, FR-088,
    FR-097: values, gradients, denominators, groups, extremes."""
    row = certify_name(family, name)
    assert row.failures() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_through_the_train_service_is_the_references(name: str, hosted: Hosted) -> None:
    """FR-029, FR-035, FR-092, FR-094: any chunks, order, padding and packing."""
    assert certify_in_service(LOSSES[name], hosted) <= BOUNDS["service"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("action", ACTIONS)
def test_every_level_and_action_of_a_correction_equals_the_reference(
    level: Any, action: Any
) -> None:
    preset = CorrectionPreset(level=level, action=action, low=0.7, high=1.4)
    errors = correction_errors(preset)
    assert errors["float64"] <= BOUNDS["float64"]
    assert errors["extremes"] == 0


def registries() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every public table by name that a file of `nexrl.algorithms` has."""
    for module in pkgutil.iter_modules(nexrl.algorithms.__path__):
        for name, table in vars(importlib.import_module(f"nexrl.algorithms.{module.name}")).items():
            if name.isupper() and isinstance(table, Mapping) and not name.startswith("_"):
                yield name, table


def test_every_name_of_every_registry_is_certified() -> None:
    """A new registry, like a new name, needs a family of the certificate."""
    certified = {name for _, name in present_names()}
    for registry, table in registries():
        if registry not in NOT_NAMES_OF_ALGORITHMS and not registry.endswith("_SETTINGS"):
            assert set(table) <= certified, f"{registry} has names without a line"


def test_presets_carry_every_advantage_and_preference_loss_through_a_trainer() -> None:
    """What the page says of their dashes."""
    assert {plan.advantage for plan in SAMPLED.values()} == set(ADVANTAGES)
    assert {plan.loss for plan in READ.values()} == {"cross_entropy", *PREFERENCE_LOSSES}


def dashed(text: str) -> dict[str, set[str]]:
    """Family of a page -> checks with a dash."""
    found: dict[str, set[str]] = {}
    family, checks = "", list[str]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            family = line[3:].removesuffix("es" if line.endswith("sses") else "s")
        elif line.startswith("| name | float64"):
            checks = cells[1:]
        elif line.startswith("| `"):
            out = {check for check, cell in zip(checks, cells[1:], strict=True) if cell == "-"}
            found[family] = found.get(family, set()) | out
    return found


def test_every_dash_of_the_page_has_its_reason() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for family, checks in dashed(text).items():
        reasons = {check for names, _ in ABSENT.get(family, ()) for check in names.split(", ")}
        assert checks == reasons, family
        assert all(reason in text for _, reason in ABSENT.get(family, ()))


def test_page_lists_exactly_the_present_names_and_no_failure() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert listed(text) == set(present_names()), "run `make certify`"
    assert "## Failures\n\nNone.\n" in text


def test_wrong_loss_is_refused() -> None:
    """The certifier can fail: a clip at another place, a gradient of the wrong sign."""
    right = LOSSES["ppo"]
    wider = replace(right, term_of=lambda o, i, s: right.term_of(o, i, {**s, "clip_high": 0.29}))
    reversed_sign = replace(right, term_of=lambda o, i, s: -right.term_of(o, i, s))
    for wrong in (wider, reversed_sign):
        assert certify_loss(wrong)["float64"] > BOUNDS["float64"]


def test_loss_that_peeks_over_a_chunk_is_refused() -> None:
    right = LOSSES["reinforce"]
    mean = replace(right, term_of=lambda o, i, s: right.term_of(o, i, s) / len(i["weight"]))
    assert certify_loss(mean)["invariance"] > BOUNDS["invariance"]


def test_layouts_of_a_batch_are_one_call_and_one_for_each_row() -> None:
    one_step, two_steps = comparisons("preset", "grpo")
    assert [run.num_calls for run in one_step.runs] == [1, 18, 1]
    assert [run.num_calls for run in two_steps.runs] == [2, 18]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_rank_that_makes_its_own_denominator_is_refused(aggregation: str) -> None:
    """FR-028: averaged over ranks, as data parallel libraries do by themselves."""
    error = rank_error(LOSSES["ppo"], {}, aggregation, weights_by_rank)
    assert error > 1000 * BOUNDS["ranks"]


@pytest.mark.parametrize(
    "change",
    [
        {"aggregation": "token_mean"},
        {"advantage": "dr_grpo"},
        {"kl": (0.05, "k3", "loss")},
        {"kl": (0.04, "k2", "loss")},
        {"settings": {"clip_low": 0.2, "clip_high": 0.28}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_preset_that_is_another_composition_is_refused(change: dict[str, Any]) -> None:
    other: Composition = replace(SAMPLED["grpo"], **change)
    errors = dict(compare(other, "grpo", {}, 1).errors())
    assert errors["trainer"] > BOUNDS["trainer"]


def test_wrong_advantage_and_wrong_preference_are_refused() -> None:
    undivided = replace(ADVANTAGES["grpo"], estimate=ADVANTAGES["dr_grpo"].estimate)
    assert certify_advantage(undivided)["float64"] > BOUNDS["float64"]
    wrong = replace(PREFERENCE_LOSSES["hinge"], name="dpo", config=PREFERENCE_LOSSES["dpo"].config)
    assert certify_preference(wrong)["float64"] > BOUNDS["float64"]


def test_name_without_a_reference_fails_unless_experimental() -> None:
    unknown = Certified(family="loss", name="new", errors={})
    assert unknown.failures() == ["loss new has no reference"]
    assert replace(unknown, experimental=True).failures() == []


def test_page_tells_an_error_out_of_bounds(tmp_path: Path) -> None:
    row = Certified(family="loss", name="ppo", errors={"float64": 1e-3, "extremes": 0.0})
    assert "loss ppo: float64 is 1.00e-03, accepted is 1e-09" in page([row])
    assert listed(page([row])) == {("loss", "ppo")}
