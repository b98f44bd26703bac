"""`nexrl store`: look at a run's trajectories, or take them elsewhere."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nexrl.types import TrajectoryStatus

if TYPE_CHECKING:
    from nexrl.pool.store_reader import StoreReader


def add_store_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `store export` and `store show`."""
    parser = subparsers.add_parser("store", help="look at a run's trajectories, or export them")
    actions = parser.add_subparsers(dest="store_action", required=True, metavar="ACTION")
    export = actions.add_parser("export", help="write trajectories to a JSONL or Parquet file")
    export.add_argument(
        "--format", choices=("jsonl", "parquet"), default="jsonl", help="file format"
    )
    export.add_argument("--output", type=Path, required=True, help="file to write")
    export.add_argument(
        "--status", choices=[s.value for s in TrajectoryStatus], help="only rollouts that ended so"
    )
    show = actions.add_parser("show", help="print counts, rewards and one trajectory")
    show.add_argument("--id", help="trajectory or rollout to print; default: the newest ones")
    show.add_argument("--limit", type=int, default=1, help="trajectories to print (default: 1)")
    for action in (export, show):
        action.add_argument(
            "store", metavar="RUN_OR_DB", type=Path, help="run folder or store file"
        )
        action.set_defaults(run=run_store)


def run_store(args: argparse.Namespace) -> int:
    """Run `store export` or `store show`; returns the exit status."""
    from nexrl.pool.store_reader import StoreReader, find_store

    with StoreReader(find_store(args.store)) as reader:
        if args.store_action == "export":
            from nexrl.pool.store_export import export_jsonl, export_parquet

            export = export_jsonl if args.format == "jsonl" else export_parquet
            count = export(reader, args.output, status=args.status)
            print(f"{count} lines written to {args.output}", file=sys.stderr)
            return 0
        return _show(reader, args.id, args.limit)


def _show(reader: StoreReader, identity: str | None, limit: int) -> int:
    from nexrl.pool.store_export import to_jsonable
    from nexrl.pool.store_reader import annotated

    if identity is None:
        for name, count in reader.counts().items():
            print(f"{count:10d}  {name}")
        statistics = reader.reward_statistics()
        print("rewards: " + (", ".join(f"{k} {v:.4g}" for k, v in statistics.items()) or "none"))
        found = reader.newest(limit)
    else:
        found = list(itertools.islice(reader.read(trajectory_id=identity), limit))
        if not found:
            print(f"no trajectory or rollout {identity!r} in {reader.path}", file=sys.stderr)
            return 1
    for stored in found:
        record = stored.record
        print(f"\n--- rollout {record.rollout_id}: {record.status.value} {record.reason}".rstrip())
        print(f"    {stored.outcome} {stored.outcome_reason} at version {stored.outcome_version}")
        if record.failure is not None:
            print(f"    {record.failure.failure_class.value}: {record.failure.message}")
        for trajectory in annotated(stored):
            print(json.dumps(to_jsonable(trajectory), indent=2, ensure_ascii=False))
    return 0
