"""`make certify-trl`: NexRL's losses and TRL's own code on the same tensors.

    requests -> bench/trl_losses.py in TRL's environment -> differences and causes -> trl_result.json

The stored result fills the last table of docs/certificate.md, so that `make certify` keeps it where
TRL is not installed. A cause that can be computed is taken into account and the rest compared anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.certify.certificate_table import ROOT, TRL_RESULT
from tests.certify.trl_preference_requests import preference_comparisons
from tests.certify.trl_requests import (
    Graded,
    distillation_comparisons,
    make_batch,
    policy_comparisons,
)


def _apart(ours: Graded, theirs: Mapping[str, Any]) -> float:
    """Largest difference of loss and gradients, over the largest of each."""
    errors: list[float] = [abs(ours[0] - theirs["loss"]) / max(abs(theirs["loss"]), 1e-3)]
    for found, expected in zip(ours[1], theirs["gradients"].values(), strict=True):
        array = np.asarray(expected)
        errors.append(float(abs(found - array).max() / max(abs(array).max(), 1e-9)))
    return max(errors)


def compare(trl_python: str) -> dict[str, Any]:
    """The whole result, as it is stored."""
    batch = make_batch()
    lines = [
        *policy_comparisons(batch),
        *preference_comparisons(batch),
        *distillation_comparisons(),
    ]
    asked = {str(number): line.request for number, line in enumerate(lines)}
    done = subprocess.run(
        [trl_python, str(ROOT / "bench" / "trl_losses.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    rows = []
    for number, line in enumerate(lines):
        theirs = answer["answers"][str(number)]
        as_is = _apart(line.ours(), theirs)
        accounted = _apart(line.ours_accounted(), theirs) if line.ours_accounted else as_is
        rows.append(
            {
                "name": line.name,
                "trl": line.trl,
                "as_is": as_is,
                "accounted": accounted,
                "cause": line.cause,
            }
        )
    return {"version": answer["version"], "rows": rows}


def main() -> None:
    """Compare, store, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", required=True, help="Python of an environment with TRL")
    result = compare(parser.parse_args().trl_python)
    TRL_RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in result["rows"]:
        print(f"{row['name']:32} {row['as_is']:.1e} {row['accounted']:.1e}  {row['cause']}")


if __name__ == "__main__":
    main()
