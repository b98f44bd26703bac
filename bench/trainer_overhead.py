"""Trainer overhead on the tiny model, and the time that `import nexrl` takes.

Overhead is what `train_batch` takes beyond the train service's own forward, backward and optimizer
seconds: advantages, chunks, hand-over, metrics. 64 groups of 8 rows of the arithmetic recipe's size.

    python bench/trainer_overhead.py [--batches 12] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from nexrl.config.schema import TrainerConfig, TrainServiceConfig
from nexrl.services.train.local import make_local_train_service
from nexrl.testing.makers import make_tracker
from nexrl.testing.tiny_models import make_tiny_model
from nexrl.trainer.build import build_trainer
from nexrl.trainer.trainer import TrainerContext
from nexrl.types import (
    Batch,
    Completion,
    ModelSpec,
    PolicyVersion,
    RolloutGroup,
    RolloutRecord,
    TrajectoryStatus,
    VersionSpan,
)

GROUPS, REPEAT = 64, 8


def make_batch(rng: np.random.Generator, number: int) -> Batch:
    """Random tokens in the shape of `12+34=` and its answer; rewards 0 and 1."""
    groups = []
    for g in range(GROUPS):
        prompt = rng.integers(2, 12, size=6).astype(np.int32)
        records = []
        for m in range(REPEAT):
            tokens = rng.integers(2, 12, size=int(rng.integers(3, 5))).astype(np.int32)
            completion = Completion(
                token_ids=tokens,
                logprobs=np.full(len(tokens), -2.0, np.float32),
                versions=(
                    VersionSpan(start=0, end=len(tokens), version=PolicyVersion(number=number)),
                ),
                text="",
                finish_reason="eos",
                prompt_token_ids=prompt,
            )
            trajectory = completion.to_trajectory(
                reward=float(rng.integers(2)), group_id=f"g{g}", trajectory_id=f"{number}/{g}/{m}"
            )
            records.append(
                RolloutRecord(
                    rollout_id=f"{number}/{g}/{m}",
                    group_key=f"g{g}",
                    member=m,
                    status=TrajectoryStatus.COMPLETED,
                    trajectories=(trajectory,),
                )
            )
        groups.append(
            RolloutGroup(
                group_key=f"g{g}",
                policy="actor",
                source="",
                admission=g,
                admitted_version=number,
                records=tuple(records),
            )
        )
    return Batch(
        batch_id=number,
        policy="actor",
        version=number,
        groups=tuple(groups),
        num_expected_groups=GROUPS,
    )


async def measure(folder: Path, batches: int) -> dict[str, float]:
    """Medians over the batches after the first two."""
    service = make_local_train_service(TrainServiceConfig())
    await service.create(ModelSpec(path=str(make_tiny_model(folder))))
    config = TrainerConfig()
    trainer = build_trainer(
        config, TrainerContext(train_service=service, config=config, tracker=make_tracker()), folder
    )
    await trainer.setup()
    rng = np.random.default_rng(0)
    steps, shares = [], []
    for number in range(batches):
        batch = make_batch(rng, number)
        before = sum((await service.info("actor")).seconds.values())
        started = time.perf_counter()
        await trainer.train_batch(batch)
        step_s = time.perf_counter() - started
        busy_s = sum((await service.info("actor")).seconds.values()) - before
        steps.append(step_s)
        shares.append(1 - busy_s / step_s)
    await trainer.aclose()
    await service.aclose()
    return {"step_s": statistics.median(steps[2:]), "overhead_share": statistics.median(shares[2:])}


def import_seconds() -> float:
    """Median of five cold interpreters: `import nexrl` beyond starting Python."""
    code = "import time; t = time.perf_counter(); import nexrl; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(5)
    ]
    return statistics.median(float(r.stdout) for r in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(measure(Path(name) / "model", args.batches))
    result["import_s"] = import_seconds()
    rounded = {k: round(v, 4) for k, v in result.items()}
    print(json.dumps(rounded) if args.json else rounded)


if __name__ == "__main__":
    main()
