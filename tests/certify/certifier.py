"""All names of `nexrl.algorithms`, each through the checks of its family.

A name that appears in a registry is certified by appearing there: without a reference it fails,
unless it is marked experimental.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.aggregation import AGGREGATIONS
from nexrl.algorithms.corrections import CORRECTION_PRESETS
from nexrl.algorithms.filters import GROUP_FILTERS
from nexrl.algorithms.kl import KL_ESTIMATORS
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.metrics import METRIC_UNITS
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from nexrl.algorithms.presets import PRESETS
from nexrl.algorithms.schedule import Schedule
from nexrl.config.schema_algorithm import EntropyConfig, ShapingConfig
from tests.certify import reference_rules
from tests.certify.certificate_table import Certified, Errors, worst
from tests.certify.certify_advantages import certify_advantage
from tests.certify.certify_by_hand import by_hand
from tests.certify.certify_losses import certify_loss
from tests.certify.certify_parts import certify_aggregation, certify_correction, certify_kl
from tests.certify.certify_preference import certify_preference
from tests.certify.certify_ranks import (
    certify_aggregation_ranks,
    certify_preference_ranks,
    certify_ranks,
)
from tests.certify.certify_rules import CHECKS
from tests.certify.certify_service import certify_in_service, hosted_models
from tests.certify.certify_trainer import (
    certify_in_trainer,
    certify_metric,
    metric_errors,
    preset_numbers,
)
from tests.certify.hand_defaults import defaults_error
from tests.certify.reference_advantages import REFERENCES
from tests.certify.reference_compositions import PARTS, READ, SAMPLED
from tests.certify.reference_divergences import AGGREGATION_NAMES, CORRECTION_NAMES, KL_NAMES
from tests.certify.reference_losses import known_losses
from tests.certify.reference_preference import PREFERENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names of one kind and how they are checked."""

    names: Callable[[], Mapping[str, bool]]
    """Every name, and whether it is experimental."""
    references: Callable[[], set[str]]
    """Names that have a reference."""
    check: Callable[[str], Errors]
    """Worst errors of a name that has a reference."""
    by_hand: bool = True
    """Whether numbers worked by hand are asked of every name that is not experimental."""


def _losses() -> dict[str, bool]:
    return {name: definition.experimental for name, definition in LOSSES.items()}


def _plain(names: Iterable[str]) -> Callable[[], dict[str, bool]]:
    return lambda: dict.fromkeys(names, False)


FAMILIES: Mapping[str, Family] = {
    "advantage": Family(
        names=_plain(ADVANTAGES),
        references=lambda: set(REFERENCES),
        check=lambda name: certify_advantage(ADVANTAGES[name]),
    ),
    "loss": Family(
        names=_losses,
        references=known_losses,
        check=lambda name: {
            **certify_loss(LOSSES[name]),
            "ranks": certify_ranks(LOSSES[name]),
        },
    ),
    "preference loss": Family(
        names=_plain(PREFERENCE_LOSSES),
        references=lambda: set(PREFERENCE),
        check=lambda name: {
            **certify_preference(PREFERENCE_LOSSES[name]),
            "ranks": certify_preference_ranks(PREFERENCE_LOSSES[name]),
        },
    ),
    "KL estimator": Family(
        names=_plain(KL_ESTIMATORS), references=lambda: set(KL_NAMES), check=certify_kl
    ),
    "aggregation": Family(
        names=_plain(AGGREGATIONS),
        references=lambda: set(AGGREGATION_NAMES),
        check=lambda name: {
            **certify_aggregation(name),
            "ranks": certify_aggregation_ranks(name),
        },
    ),
    "correction": Family(
        names=_plain(CORRECTION_PRESETS),
        references=lambda: set(CORRECTION_NAMES),
        check=certify_correction,
    ),
    "filter": Family(
        names=_plain(GROUP_FILTERS),
        references=lambda: set(reference_rules.FILTERS),
        check=CHECKS["filter"],
    ),
    "shaping rule": Family(
        names=_plain(ShapingConfig.model_fields),
        references=lambda: set(reference_rules.SHAPING),
        check=CHECKS["shaping rule"],
    ),
    "entropy setting": Family(
        names=_plain(EntropyConfig.model_fields),
        references=lambda: set(reference_rules.ENTROPY),
        check=CHECKS["entropy setting"],
    ),
    "learning-rate schedule": Family(
        names=_plain(get_args(Schedule)),
        references=lambda: set(reference_rules.SCHEDULES),
        check=CHECKS["learning-rate schedule"],
    ),
    "preset": Family(
        names=lambda: {name: preset.experimental for name, preset in PRESETS.items()},
        references=lambda: {*SAMPLED, *READ},
        check=lambda name: {"by hand": preset_numbers(name)},
    ),
    "metric": Family(
        names=_plain(METRIC_UNITS),
        references=lambda: set(metric_errors()["trainer"]),
        check=certify_metric,
        by_hand=False,
    ),
}


def present_names() -> list[tuple[str, str]]:
    """(family, name) of everything that must be on the certificate."""
    return [(family, name) for family, kind in FAMILIES.items() for name in kind.names()]


def certify_name(family: str, name: str) -> Certified:
    """The line of one name, all checks but the train service's."""
    kind = FAMILIES[family]
    experimental = kind.names()[name]
    if name not in kind.references():
        return Certified(family=family, name=name, errors={}, experimental=experimental)
    errors = dict(kind.check(name))
    if family == "preset" or (family, name) in PARTS:
        for check, error in certify_in_trainer(family, name).items():
            errors[check] = worst([errors.get(check, 0.0), error])
    worked = by_hand(family, name)
    if worked is None and kind.by_hand and "by hand" not in errors and not experimental:
        raise LookupError(f"{family} {name} has no number worked by hand")
    apart = worst([worked or 0.0, defaults_error(family, name)])
    if worked is not None or apart:
        errors["by hand"] = apart
    return Certified(family=family, name=name, errors=errors, experimental=experimental)


def certify_all() -> Iterator[Certified]:
    """Every line, train service included."""
    with TemporaryDirectory() as folder:
        hosted = hosted_models(Path(folder))
        for family, name in present_names():
            row = certify_name(family, name)
            if family == "loss" and row.errors:
                service = certify_in_service(LOSSES[name], hosted)
                errors = {**row.errors, "service": service}
                row = Certified(
                    family=family, name=name, errors=errors, experimental=row.experimental
                )
            yield row
