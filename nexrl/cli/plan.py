"""`nexrl plan`: looks at the recipe's rows, code, model folder and machine, and prints the plan.

`plan_probe.py` and `plan_machine.py` look, `plan_text.py` finds the units and words. No weights are
loaded and nothing is started.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nexrl.cli.plan_machine import inspect_machine
from nexrl.cli.plan_probe import RecipeProbe
from nexrl.cli.plan_text import build_plan, render_plan
from nexrl.config.loader import LoadedConfig, load_run_config
from nexrl.config.nodes import Origin, dotted, plain_leaves
from nexrl.config.redact import REDACTED, is_secret_path, redact_text
from nexrl.config.schema import RunConfig


def run_plan(recipe: Path, overrides: Sequence[str], *, provenance: bool) -> bool:
    """Print the plan of a recipe; whether it can be launched. ConfigError when it is refused."""
    loaded = load_run_config(recipe, overrides)
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
    return not plan.problems


def render_provenance(loaded: LoadedConfig) -> str:
    """Every value with its origin; then, for each stage, what differs."""
    whole = dict(_provenance_lines(loaded.config, loaded.provenance))
    lines = ["where each value comes from", *whole.values()]
    for stage in loaded.stages:
        own = dict(_provenance_lines(stage.config, stage.provenance))
        different = [v for k, v in own.items() if k != "stages" and whole.get(k) != v]
        if different:
            lines += ["", f"in stage {stage.name}", *different]
    return "\n".join(lines)


def _provenance_lines(
    config: RunConfig, origins: Mapping[str, Origin]
) -> Iterator[tuple[str, str]]:
    """Key, and its value with its origin."""
    for path, value in plain_leaves(config.model_dump(by_alias=True)):
        key = dotted(path)
        secret = is_secret_path(path) and value is not None
        shown = REDACTED if secret else json.dumps(value, ensure_ascii=False)
        yield key, f"  {key} = {shown}  ({origins[key]})"
