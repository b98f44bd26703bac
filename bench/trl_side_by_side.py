"""NexRL beside TRL's GRPOTrainer: same tiny model, prompts, group size, lengths, optimizer steps.

Each round times both, in turn, each in its own process; the ratio of medians is what to quote.
TRL lives in an environment of its own (`make bench-trl` makes it and runs this file).

    python bench/trl_side_by_side.py --trl-python .venv-trl/bin/python [--rounds 3] [--steps 12]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

GROUPS, REPEAT, MAX_NEW, LR = 8, 8, 32, 1e-4
HERE = Path(__file__).resolve()
TRL_SCRIPT = HERE.with_name("trl_worker.py")
NEXRL_SCRIPT = HERE.with_name("trl_nexrl_worker.py")


def make_inputs(folder: Path) -> None:
    """A 0.83M-parameter Qwen2 with a character tokenizer, and 64 prompts; made once for both."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from trl_nexrl_worker import make_inputs; "
        "from pathlib import Path; make_inputs(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), str(HERE.parent)], check=True)


def run(command: list[str]) -> dict[str, float]:
    """One timed process; its last output line is JSON."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings = json.dumps(
        {"groups": GROUPS, "repeat": REPEAT, "max_new": MAX_NEW, "lr": LR, "steps": args.steps}
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        commands = {
            "trl": [args.trl_python, str(TRL_SCRIPT), str(folder), settings],
            "nexrl in process": [
                sys.executable,
                str(NEXRL_SCRIPT),
                str(folder),
                settings,
                "in_process",
            ],
            "nexrl over HTTP": [
                sys.executable,
                str(NEXRL_SCRIPT),
                str(folder),
                settings,
                "process",
            ],
        }
        results: dict[str, list[dict[str, float]]] = {k: [] for k in commands}
        for number in range(args.rounds):
            for label, command in commands.items():
                results[label].append(run(command))
                if not args.json:
                    print(number, label, results[label][-1], flush=True)
    rates = {k: statistics.median(r["trajectories_per_s"] for r in v) for k, v in results.items()}
    summary = {
        "trajectories_per_s": {k: round(v, 1) for k, v in rates.items()},
        "ratio_in_process": round(rates["nexrl in process"] / rates["trl"], 2),
        "ratio_http": round(rates["nexrl over HTTP"] / rates["trl"], 2),
        "last": {k: v[-1] for k, v in results.items()},
    }
    print(json.dumps(summary, indent=None if args.json else 1))


if __name__ == "__main__":
    main()
