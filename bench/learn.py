"""A short run of every preset on the tiny model of recipe/arithmetic: does each of them learn?

    warm-up by imitation until 45% of held-out sums are right -> every preset from there
    -> accuracies over batches -> docs/learn.svg and the table in bench/README.md

    python bench/learn.py [--only dapo ppo] [--fresh] [--folder runs/learn]

Curves are held-out accuracy (greedy) for presets that sample, and the share of held-out pairs,
labels or steps that are told apart rightly for those on offline data. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nexrl.activity.metric_sink import read_metrics
from nexrl.algorithms.losses import find_loss
from nexrl.algorithms.presets import PRESETS, Preset

ROOT = Path(__file__).resolve().parents[1]
WORKSPACE = ROOT / "recipe" / "arithmetic" / "agent_workspace"
TASK = ROOT / "bench" / "learn_task.py"
PICTURE = ROOT / "docs" / "learn.svg"
README = ROOT / "bench" / "README.md"
WARM_ACCURACY, TEACHER_ACCURACY = 0.45, 0.95
BATCHES = 40
ACCURACY = "validation/accuracy"
Settings = dict[str, Any]

TURNS: Settings = {
    "rollout_worker": {
        "type": "custom",
        "custom_rollout_worker_module_path": str(TASK),
        "custom_rollout_worker_class_name": "DigitTurns",
    }
}
OVERRIDES: Mapping[str, Settings] = {
    # Room before the overlong penalty: a right answer takes up to four tokens.
    "dapo": {"rollout_worker": {"sampling": {"max_tokens": 8}}},
    "ppo": {"trainer": {"algorithm": {"critic": {"lr": 1e-3, "warmup_batches": 4}}}},
    # The paper's alpha of 0.05 is for thousands of tokens: below 20 it makes lambda 0.
    "vapo": {
        "trainer": {
            "algorithm": {
                "advantage": {"length_adaptive": 5.0},
                "critic": {"lr": 1e-3, "warmup_batches": 8},
            }
        }
    },
    "gdpo": {
        "rollout_worker": {"reward": f"{TASK}:parts"},
        "validate": {"success_reward": 2.0},
    },
    "reward_model": {"trainer": {"optimizer": {"lr": 1e-3}}},
    "process_reward_model": {"trainer": {"optimizer": {"lr": 1e-3}}},
    "gigpo": TURNS,
    "step_returns": TURNS,
    "distill_top_k": {"trainer": {"algorithm": {"teacher": {"top_k": 8}}}},
}
"""What a preset needs beside the base, or what suits so short a run better than its default."""

NOTES: Mapping[str, str] = {
    "vapo": "with length_adaptive 5: the paper's 0.05 makes lambda 0 below 20 tokens, and the run "
    "collapsed to 0.01",
    "simpo": "no reference: the warm model already prefers most right sums",
    "orpo": "no reference: the warm model already prefers most right sums",
    "reward_model": "equal scores at first count as wrong; 0.5 is chance",
    "process_reward_model": "equal scores at first count as wrong; 0.5 is chance",
}
"""What must be known to read a line."""


# --- configurations -------------------------------------------------------------------------------


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Settings:
    """`over` on top of `base`, section by section."""
    result = dict(base)
    for key, value in over.items():
        inside = result.get(key)
        nested = isinstance(inside, Mapping) and isinstance(value, Mapping)
        result[key] = merged(inside, value) if nested else value
    return result


def base_settings(name: str, folder: Path) -> Settings:
    """What all runs share; services in process, because runs are short and machines small."""
    service = {"placement": "in_process", "dtype": "float32"}
    return {
        "project_name": "nexrl",
        "experiment_name": name,
        "seed": 0,
        "launch": {"run_root": str(folder / "runs")},
        "service": {
            "train_service": dict(service),
            "inference_service": {**service, "max_batch": 512},
        },
        "data": {"sources": [{"factory": f"{WORKSPACE}/data.py:train_pairs"}]},
        "rollout_worker": {
            "reward": f"{WORKSPACE}/reward.py:exact_match",
            "sampling": {"max_tokens": 4, "temperature": 1.0},
        },
        "trainer": {
            "num_steps": BATCHES,
            "optimizer": {
                "lr": 5e-4,
                "betas": [0.9, 0.98],
                "grad_clip_norm": 1.0,
                "warmup_steps": 10,
            },
        },
        "validate": {
            "enabled": True,
            "sources": [{"factory": f"{WORKSPACE}/data.py:held_out_pairs"}],
            "sampling": {"max_tokens": 4, "temperature": 0.0},
            "every_versions": 5,
        },
    }


def imitation(name: str, folder: Path, model: Settings, goal: float) -> Settings:
    """Supervised training until `goal` of the held-out sums are right."""
    return merged(
        base_settings(name, folder),
        {
            "service": {"train_service": model},
            "data": {"batch_size": 256},
            "trainer": {
                "algorithm": "sft",
                "num_steps": 400,
                "stop_at_accuracy": goal,
                "optimizer": {"lr": 2e-3},
            },
        },
    )


def settings_of(preset: Preset, folder: Path, warm: Path, teacher: Path) -> Settings:
    """The run of a preset, from the warm model."""
    base = merged(
        base_settings(preset.name, folder),
        {
            "service": {"train_service": {"model_path": str(warm)}},
            "trainer": {"algorithm": {"preset": preset.name}},
        },
    )
    family = _sampled if preset.family == "rl" else _read
    return merged(merged(base, family(preset, teacher)), OVERRIDES.get(preset.name, {}))


def _sampled(preset: Preset, teacher: Path) -> Settings:
    loss = preset.settings["trainer"]["algorithm"]["loss"]["name"]
    bounded = find_loss(loss).bounded
    changes: Settings = {
        "data": {"batch_size": 64, "rollout_repeat_n": 8},
        "trainer": {
            "num_optimizer_steps": 4 if bounded else 1,
            "optimizer": {"lr": 1e-4 if bounded else 3e-4},
        },
    }
    if preset.name.startswith("distill"):
        algorithm = {"teacher": {"path": str(teacher)}}
        changes["trainer"] = merged(changes["trainer"], {"algorithm": algorithm})
    return changes


def _read(preset: Preset, _: Path) -> Settings:
    if preset.family == "sft":
        return {"data": {"batch_size": 256}}
    factory = {"kto": "labelled", "process_reward_model": "steps"}.get(preset.name, "pairs")
    source = f"{TASK}:{factory}"
    return {
        "data": {"batch_size": 128, "sources": [{"factory": source}]},
        "trainer": {"optimizer": {"lr": 2e-4}},
        "validate": {"sources": [{"factory": source, "arguments": {"held_out": True}}]},
    }


# --- runs -----------------------------------------------------------------------------------------


def launch(settings: Settings, folder: Path) -> Path:
    """Run `nexrl launch` and return the run folder; the end of its output when it fails."""
    name = settings["experiment_name"]
    recipe = folder / f"{name}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "nexrl.cli.main", "launch", str(recipe)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    (folder / f"{name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return max((folder / "runs" / name).iterdir())


def imitated(name: str, folder: Path, model: Settings, goal: float, *, fresh: bool) -> Path:
    """Hugging Face folder of a model that reached `goal`, from an earlier call where there is one."""
    runs = folder / "runs" / name
    if fresh or not runs.exists():
        launch(imitation(name, folder, model, goal), folder)
    return max((max(runs.iterdir()) / "publications").iterdir())


def curve(run: Path) -> list[tuple[int, float]]:
    """(batches trained, held-out accuracy)."""
    records = read_metrics(run / "metrics.jsonl")
    return [(r.at_step, r.metrics[ACCURACY]) for r in records if ACCURACY in r.metrics]


# --- picture and table ----------------------------------------------------------------------------


def draw(curves: Mapping[str, list[tuple[int, float]]]) -> None:
    """Small multiples on equal axes: batches to the right, accuracy up."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "nexrl"
    from matplotlib import pyplot as plt

    columns = 6
    lines = -(-len(curves) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(2.0 * columns, 1.6 * lines),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for place in axes.flat[len(curves) :]:
        place.set_visible(False)
    for place in axes.flat[max(0, len(curves) - columns) : len(curves)]:
        place.tick_params(labelbottom=True)  # the lowest of each column, also where a line is short
    for place, (name, points) in zip(axes.flat, curves.items(), strict=False):
        steps, values = zip(*points, strict=True)
        place.plot(steps, values, color="#3b78d8", linewidth=1.5)
        place.set_title(name, fontsize=8)
        place.set(xlim=(0, BATCHES), ylim=(0, 1))
        place.tick_params(labelsize=7)
        place.grid(alpha=0.3)
        place.text(
            0.95,
            0.06,
            f"{values[0]:.2f} -> {values[-1]:.2f}",
            transform=place.transAxes,
            ha="right",
            fontsize=7,
        )
    figure.supxlabel("batches", fontsize=8)
    figure.supylabel("held-out accuracy", fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    plt.close(figure)


BEGIN, END = "<!-- learn: begin -->", "<!-- learn: end -->"


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Start, end and what there is to say, one line a preset."""
    lines = ["| preset | start | end | |", "|---|---|---|---|"]
    for name, result in results.items():
        points = result["curve"]
        cells = f"{points[0][1]:.2f} | {points[-1][1]:.2f}"
        mark = " (x)" if PRESETS[name].experimental else ""
        lines.append(f"| `{name}`{mark} | {cells} | {NOTES.get(name, '')} |")
    return "\n".join(lines)


def write_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Between the marks of bench/README.md."""
    text = README.read_text(encoding="utf-8")
    block = f"{BEGIN}\n{table(results)}\n{END}"
    marked = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    if not marked.search(text):
        raise RuntimeError(f"{README.name} has no lines {BEGIN} and {END}")
    README.write_text(marked.sub(lambda _: block, text), encoding="utf-8")


def main() -> int:
    """Exit status: 1 when a run fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="PRESET", choices=sorted(PRESETS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "learn")
    parser.add_argument("--fresh", action="store_true", help="warm up anew")
    parser.add_argument("--batches", type=int, default=BATCHES, help="batches of each run")
    args = parser.parse_args()
    factory = {"model_factory": f"{WORKSPACE}/model.py:make_model"}
    warm = imitated("warm", args.folder, factory, WARM_ACCURACY, fresh=args.fresh)
    further = {"model_path": str(warm)}
    teacher = imitated("teacher", args.folder, further, TEACHER_ACCURACY, fresh=args.fresh)
    stored = args.folder / "results.json"
    results = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    names = args.only or list(PRESETS)
    failed = []
    for name in names:
        began = time.monotonic()
        settings = settings_of(PRESETS[name], args.folder, warm, teacher)
        settings["trainer"]["num_steps"] = args.batches
        try:
            points = curve(launch(settings, args.folder))
        except RuntimeError as error:
            failed.append(name)
            print(error, flush=True)
            continue
        results[name] = {"curve": points, "seconds": time.monotonic() - began}
        print(f"{name}: {points[0][1]:.3f} -> {points[-1][1]:.3f}", flush=True)
        stored.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    ordered = {name: results[name] for name in PRESETS if name in results}
    if not args.only:
        draw({name: result["curve"] for name, result in ordered.items()})
        write_table(ordered)
    print("failed: " + ", ".join(failed) if failed else f"{len(names)} presets ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
