"""`nexrl plan`: looks at the recipe's rows, code, model folder and machine, and prints the plan.

`plan_probe.py` and `plan_machine.py` look, `plan_text.py` finds the units and words. No weights are
loaded and nothing is started.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nexrl.cli.plan_machine import inspect_machine
from nexrl.cli.plan_probe import RecipeProbe
from nexrl.cli.plan_text import build_plan, render_plan
from nexrl.config.loader import LoadedConfig, load_run_config
from nexrl.config.redact import REDACTED, is_secret_key, redact_text
from nexrl.errors import ConfigError

EXIT_OK = 0
EXIT_CONFIGURATION = 2


def run_plan(recipe: Path, overrides: Sequence[str], *, provenance: bool) -> int:
    """Print the plan of a recipe; 0 when it can be launched, 2 when something must be mended."""
    try:
        loaded = load_run_config(recipe, overrides)
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    with tempfile.TemporaryDirectory(prefix="nexrl-plan-") as folder:
        probe = RecipeProbe(loaded, scratch=Path(folder))
        plan = build_plan(
            loaded,
            [probe.inspect_stage(stage) for stage in loaded.stages],
            machine=[*probe.startup, *inspect_machine(loaded)],
            model=probe.size,
            machine_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )
    text = render_plan(plan)
    if provenance:
        text += "\n\n" + render_provenance(loaded)
    print(redact_text(text, secrets=loaded.secrets))
    for problem in plan.problems:
        shown = redact_text(problem, secrets=loaded.secrets)
        print(f"configuration error: {shown}", file=sys.stderr)
    return EXIT_CONFIGURATION if plan.problems else EXIT_OK


def render_provenance(loaded: LoadedConfig) -> str:
    """Every value with its origin; then, for each stage, what differs."""
    whole = _values_with_origins(loaded.config.model_dump(by_alias=True), loaded.provenance)
    lines = ["where each value comes from", *_provenance_lines(whole)]
    for stage in loaded.stages:
        own = _values_with_origins(stage.config.model_dump(by_alias=True), stage.provenance)
        different = {k: v for k, v in own.items() if k != "stages" and whole.get(k) != v}
        if different:
            lines += ["", f"in stage {stage.name}", *_provenance_lines(different)]
    return "\n".join(lines)


def _values_with_origins(
    config: Mapping[str, Any], origins: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    values = {}
    for key, origin in origins.items():
        value: Any = config
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list | tuple) else value[part]
        secret = is_secret_key(key) and value is not None
        shown = REDACTED if secret else json.dumps(value, ensure_ascii=False)
        values[key] = (shown, str(origin))
    return values


def _provenance_lines(values: Mapping[str, tuple[str, str]]) -> list[str]:
    return [f"  {key} = {value}  ({origin})" for key, (value, origin) in values.items()]
