"""Presets: a published algorithm as a choice among the composable parts.

`trainer.algorithm: dapo` puts the settings of `PRESETS["dapo"]` under what the recipe writes; all
of them can be overridden. `nexrl algorithms show dapo` prints a preset with its formula.
"""

from __future__ import annotations

from collections.abc import Mapping

from nexrl.algorithms.experimental_presets import EXPERIMENTAL_PRESETS
from nexrl.algorithms.offline_presets import OFFLINE_PRESETS
from nexrl.algorithms.policy_presets import POLICY_PRESETS
from nexrl.algorithms.preset_definition import Family as Family
from nexrl.algorithms.preset_definition import Preset as Preset
from nexrl.errors import ConfigError, nearest

PRESETS: Mapping[str, Preset] = {
    preset.name: preset for preset in (*POLICY_PRESETS, *OFFLINE_PRESETS, *EXPERIMENTAL_PRESETS)
}
"""By name, in the order in which they are listed."""


def find_preset(name: str) -> Preset:
    """The preset of that name; ConfigError with the nearest spelling and all there are."""
    if name in PRESETS:
        return PRESETS[name]
    raise ConfigError(
        f"trainer.algorithm.preset: no preset is named {name!r}{nearest(name, PRESETS)} (accepted: "
        f"{', '.join(PRESETS)}; `nexrl algorithms` describes them)"
    )
