"""`import nexrl` and every name a recipe needs stay light; heavy packages wait for their use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "ray", "pyarrow", "matplotlib", "wandb", "tensorboardX", "openai")


def loaded_modules(statement: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "statement",
    [
        "import nexrl",
        "import nexrl.config.schema",
        "import nexrl.cli.main",
        "import nexrl.controller",
        "import nexrl.report.report, nexrl.report.live_view, nexrl.report.dump",
    ],
)
def test_no_heavy_package_is_loaded(statement: str) -> None:
    assert loaded_modules(statement).isdisjoint(HEAVY)


def test_the_package_itself_loads_only_its_nouns_and_numpy() -> None:
    loaded = loaded_modules("import nexrl")
    ours = {".".join(m.split(".")[:2]) for m in loaded if m.startswith("nexrl.")}
    assert ours == {"nexrl.errors", "nexrl.types"}
    assert loaded.isdisjoint(("pydantic", "aiohttp", "rich", "yaml", "msgpack"))
