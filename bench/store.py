"""Rollouts per second through the pool, without and with the store: `python bench/store.py`.

Everything around the pool is free: records are made beforehand and the trainer does nothing.
CPU microseconds count all threads, so they tell what a shared controller core must spend.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.testing.makers import make_draw, make_pool, make_record


async def measure(
    num_batches: int, batch_size: int, group_size: int, path: Path | None
) -> dict[str, float]:
    """One run; seconds are wall time, microseconds CPU time per rollout."""
    store = TrajectoryStore(path) if path else None
    pool = make_pool(
        batch_size=batch_size,
        rollout_repeat_n=group_size,
        needs=("reward", "behavior_logprobs"),
        store=store,
        take_deadline_s=60.0,
    )
    groups = [
        (draw, [make_record(draw, m, version=i // batch_size) for m in range(group_size)])
        for i, draw in enumerate(map(make_draw, range(num_batches * batch_size)))
    ]

    async def produce() -> None:
        for draw, records in groups:
            await pool.admit(draw)
            for record in records:
                await pool.end_rollout(record)
        pool.close_source()

    wall, cpu = time.perf_counter(), time.process_time()
    producer = asyncio.create_task(produce())
    version = 0
    while (batch := await pool.take(version=version)) is not None:
        pool.mark_trained(batch)
        pool.drain_settled()
        version += 1
        pool.activate(version)
        pool.metrics()
    await producer
    await pool.aclose()
    if store is not None:
        await store.aclose()
    total = num_batches * batch_size * group_size
    return {
        "rollouts_per_s": total / (time.perf_counter() - wall),
        "cpu_us_per_rollout": (time.process_time() - cpu) / total * 1e6,
    }


def main() -> None:
    """Print a line per case, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--num-batches", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=128, help="groups in a batch")
    parser.add_argument("--group-size", type=int, default=8)
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (("no_store", None), ("store", Path(folder) / "store.sqlite")):
            sizes = (args.num_batches, args.batch_size, args.group_size)
            results[name] = asyncio.run(measure(*sizes, path))
    if args.json:
        print(json.dumps(results))
        return
    for name, numbers in results.items():
        print(f"{name:10s}" + "".join(f"  {k} {v:,.0f}" for k, v in numbers.items()))


if __name__ == "__main__":
    main()
