"""All names of `nexrl.algorithms`, each through the checks of its family.

A name that appears in a registry is certified by appearing there: without a reference it fails,
unless it is marked experimental.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.aggregation import AGGREGATIONS
from nexrl.algorithms.corrections import CORRECTION_PRESETS
from nexrl.algorithms.kl import KL_ESTIMATORS
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from tests.certify.certificate_table import Certified, Errors
from tests.certify.certify_advantages import certify_advantage
from tests.certify.certify_by_hand import by_hand
from tests.certify.certify_losses import certify_loss
from tests.certify.certify_parts import certify_aggregation, certify_correction, certify_kl
from tests.certify.certify_preference import certify_preference
from tests.certify.certify_service import certify_in_service, hosted_models
from tests.certify.reference_advantages import REFERENCES
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


def _losses() -> dict[str, bool]:
    return {name: definition.experimental for name, definition in LOSSES.items()}


FAMILIES: Mapping[str, Family] = {
    "advantage": Family(
        names=lambda: dict.fromkeys(ADVANTAGES, False),
        references=lambda: set(REFERENCES),
        check=lambda name: certify_advantage(ADVANTAGES[name]),
    ),
    "loss": Family(
        names=_losses,
        references=known_losses,
        check=lambda name: certify_loss(LOSSES[name]),
    ),
    "preference loss": Family(
        names=lambda: dict.fromkeys(PREFERENCE_LOSSES, False),
        references=lambda: set(PREFERENCE),
        check=lambda name: certify_preference(PREFERENCE_LOSSES[name]),
    ),
    "KL estimator": Family(
        names=lambda: dict.fromkeys(KL_ESTIMATORS, False),
        references=lambda: set(KL_NAMES),
        check=certify_kl,
    ),
    "aggregation": Family(
        names=lambda: dict.fromkeys(AGGREGATIONS, False),
        references=lambda: set(AGGREGATION_NAMES),
        check=certify_aggregation,
    ),
    "correction": Family(
        names=lambda: dict.fromkeys(CORRECTION_PRESETS, False),
        references=lambda: set(CORRECTION_NAMES),
        check=certify_correction,
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
    worked = by_hand(family, name)
    if worked is None and not experimental:
        raise LookupError(f"{family} {name} has no number worked by hand")
    if worked is not None:
        errors["by hand"] = worked
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
