"""The controller path alone: services that answer at once, everything else real, store on.

Loader, runner, single-turn worker, pool, SQLite store, GRPO trainer, weight sync and metrics are the
production classes; inference, training and reward answer immediately. One process, one event loop.

    python bench/loop.py [--concurrency 1,8,64,1024] [--batch 1024] [--batches 20] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.activity.metric_sink import MetricSink
from nexrl.config.loader import load_run_config
from nexrl.controller import Controller, StageResult
from nexrl.launch.stage import StageSurroundings, build_stage
from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.rendering.renderer import load_renderer
from nexrl.services.reward.signature import instant
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.instant_train import InstantTrain
from nexrl.testing.tiny_models import make_micro_model
from nexrl.types import ModelSpec, PolicyVersion
from nexrl.weight_sync.controller import WeightSyncController

HERE = Path(__file__).resolve()
REPEAT = 8


def items() -> list[dict[str, str]]:
    """Data factory: ten thousand short prompts."""
    return [{"prompt": f"{i % 100}+{i // 100}="} for i in range(10_000)]


@instant
def reward(completion: str) -> float:
    """Answers at once, and differs between siblings."""
    return float(len(completion) % 2)


def settings(
    batch: int, batches: int, concurrency: int, model: Path, store: bool
) -> dict[str, Any]:
    return {
        "experiment_name": "loop",
        "data": {
            "sources": [{"factory": f"{HERE}:items"}],
            "batch_size": batch // REPEAT,
            "rollout_repeat_n": REPEAT,
        },
        "rollout_worker": {
            "reward": f"{HERE}:reward",
            "sampling": {"max_tokens": 8},
            "max_concurrent": concurrency,
        },
        "trajectory_pool": {"store": {"enabled": store}},
        "trainer": {"num_steps": batches, "algorithm": {"kl": {"coefficient": 0.0}}},
        "service": {"train_service": {"model_path": str(model)}},
    }


def write_recipe(folder: Path, model: Path, concurrency: int, args: argparse.Namespace) -> Path:
    folder.mkdir()
    recipe = settings(args.batch, args.batches, concurrency, model, not args.no_store)
    (folder / "rl_train.yaml").write_text(json.dumps(recipe))
    return folder


async def run_once(
    folder: Path, model: Path, concurrency: int, args: argparse.Namespace
) -> dict[str, float]:
    """One stage of `batches` batches; the rate leaves out the first two."""
    loaded = load_run_config(folder)
    loop = asyncio.get_running_loop()
    tracker = ActivityTracker(loaded.config.runtime_monitor)
    sink = MetricSink(folder / "metrics.jsonl", clock=loop.time)
    train, inference = InstantTrain(), InstantInference()
    await train.create(ModelSpec(path=str(model)))
    store = None
    if not args.no_store:
        store = TrajectoryStore(folder / "store.sqlite", run_id="loop")
    controller = Controller(
        train=train,
        weight_sync=WeightSyncController(
            train=train,
            engines=[inference],
            config=loaded.config.weight.model_copy(update={"verify": "off"}),
            folder=folder / "publications",
            tracker=tracker,
        ),
        tracker=tracker,
        sink=sink,
        version=PolicyVersion(),
    )
    await controller.start()
    stage = build_stage(
        loaded.stages[0],
        0,
        StageSurroundings(
            recipe_dir=folder,
            run_id="loop",
            train=train,
            inference=inference,
            engine=await inference.info(),
            renderer=load_renderer(model),
            store=store,
            tracker=tracker,
            recorder=None,
            checkpoints=folder / "checkpoints",
        ),
        controller.version,
    )
    await controller.run_stage(stage, StageResult(name="main"))
    ended = time.perf_counter()
    if store is not None:
        await store.aclose()
    await inference.aclose()
    await train.aclose()
    sink.close()
    shutdown_s = time.perf_counter() - ended
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    walls = [r["wall_s"] for r in records if r["axis"] == "step"]
    rate = args.batch * (len(walls) - 2) / (walls[-1] - walls[1])
    return {
        "concurrency": concurrency,
        "trajectories_per_s": round(rate),
        "shutdown_s": round(shutdown_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", default="1,8,64,1024")
    parser.add_argument("--batch", type=int, default=1024, help="trajectories in a batch")
    parser.add_argument("--batches", type=int, default=22)
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        model = make_micro_model(Path(name) / "model")
        for concurrency in map(int, args.concurrency.split(",")):
            folder = write_recipe(Path(name) / f"c{concurrency}", model, concurrency, args)
            result = asyncio.run(run_once(folder, model, concurrency, args))
            results.append(result)
            if not args.json:
                print(result, flush=True)
    rates = [r["trajectories_per_s"] for r in results]
    print(
        json.dumps(
            {
                "batch": args.batch,
                "results": results,
                "max_over_min": round(max(rates) / min(rates), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
