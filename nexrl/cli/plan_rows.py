"""What a plan finds by making rows of an offline worker, before anything is started.

The first rows of each source go through the worker that a run uses, so a label that is a string or
two equal responses are told with their file and line, not in the middle of a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from nexrl.cli.plan_text import Finding, problem, warning
from nexrl.config.schema import RunConfig
from nexrl.errors import DataError
from nexrl.protocols import Renderer
from nexrl.rollout.build import worker_class
from nexrl.rollout.rollout_worker import RolloutWorker, WorkerContext
from nexrl.types import Trajectory

PlacedRow = tuple[str, Mapping[str, Any]]
"""Where a row stands, and its columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTrial:
    """What became of the rows that were tried."""

    longest: int | None
    """Tokens of the longest row, prompt and response; None when none could be made."""
    finding: Finding | None
    """A problem when no row can be trained, a warning when some cannot."""


def try_rows(
    config: RunConfig, rows: Sequence[PlacedRow], *, renderer: Renderer, recipe_dir: Path
) -> RowTrial:
    """Make the rows of an offline worker; ConfigError for settings of its own that are wrong."""
    context = WorkerContext(
        inference=None, renderer=renderer, config=config.rollout_worker, data=config.data
    )
    worker = worker_class(config.rollout_worker, recipe_dir)(context)
    return asyncio.run(_try(worker, rows))


async def _try(worker: RolloutWorker, rows: Sequence[PlacedRow]) -> RowTrial:
    lengths: list[int] = []
    wrong: list[str] = []
    for place, row in rows:
        try:
            # Built-in workers are async and return what they made.
            made = await cast(Awaitable[Trajectory | list[Trajectory]], worker.step(dict(row)))
        except DataError as error:
            wrong.append(f"{place}: {error}")
            continue
        trajectories = made if isinstance(made, list) else [made]
        lengths += [len(r.token_ids) for t in trajectories for r in t.rows]
    finding = None
    if wrong and lengths:
        finding = warning(
            f"{len(wrong)} of the {len(rows)} rows read cannot be trained and count as failed "
            f"rollouts; the first: {wrong[0]}"
        )
    elif wrong:
        finding = problem(
            f"none of the {len(rows)} rows read can be trained; the first: {wrong[0]}"
        )
    return RowTrial(longest=max(lengths, default=None), finding=finding)
