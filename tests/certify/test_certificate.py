"""Every algorithm against its independent reference, and the page that says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.corrections import ACTIONS, LEVELS, CorrectionPreset
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from tests.certify.certificate_table import BOUNDS, PAGE, Certified, listed, page
from tests.certify.certifier import certify_name, present_names
from tests.certify.certify_advantages import certify_advantage
from tests.certify.certify_losses import certify_loss
from tests.certify.certify_parts import correction_errors
from tests.certify.certify_preference import certify_preference
from tests.certify.certify_service import Hosted, certify_in_service, hosted_models


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Hosted:
    return hosted_models(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("family", "name"), present_names())
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
