"""Makers of rollout tests: a runner over any worker, and what it records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nexrl.config.schema import FailurePolicyConfig, RolloutWorkerConfig
from nexrl.rollout.rollout_worker import RolloutWorker, WorkerContext
from nexrl.rollout.runner import RolloutRunner
from nexrl.testing.char_renderer import CharRenderer
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.makers import RecordingTracker, make_draw
from nexrl.types import Draw, RolloutRecord, Sampling


class Rollouts:
    """A runner and every record it ended, in order."""

    def __init__(self, worker: RolloutWorker, *, num_rollouts: int = 1) -> None:
        self.tracker = RecordingTracker()
        self.records: list[RolloutRecord] = []
        self.runner = RolloutRunner(
            worker, num_rollouts=num_rollouts, run_id="run", run_seed=7, tracker=self.tracker
        )

    async def on_end(self, record: RolloutRecord) -> None:
        self.records.append(record)

    async def run(self, *draws: Draw) -> list[RolloutRecord]:
        """All records of the draws, the runner closed."""
        try:
            for draw in draws or (make_draw(),):
                await self.runner.run_group(draw, self.on_end)
        finally:
            await self.runner.aclose()
        return self.records


def _context(**fields: Any) -> WorkerContext:
    config = fields.pop("config", {})
    fields.setdefault("inference", InstantInference())
    fields.setdefault("renderer", CharRenderer())
    fields.setdefault("sampling", Sampling(max_tokens=16))
    return WorkerContext(config=RolloutWorkerConfig(**config), **fields)


@pytest.fixture
def make_context() -> Callable[..., WorkerContext]:
    """A context with instant inference; `config` is a mapping of section rollout_worker."""
    return _context


@pytest.fixture
def make_rollouts() -> Callable[..., Rollouts]:
    """Rollouts of a worker class, or of a plain step function of (worker, item); `settings` are
    keys of section rollout_worker and of its failure_policy."""

    def make(
        step: Any, *, context: WorkerContext | None = None, num_rollouts: int = 1, **settings: Any
    ) -> Rollouts:
        cls = (
            step if isinstance(step, type) else type("TestWorker", (RolloutWorker,), {"step": step})
        )
        retry = {k: settings.pop(k) for k in ("max_attempts", "retry_member") if k in settings}
        settings["failure_policy"] = FailurePolicyConfig(retry_delay_s=0.01, **retry)
        context = context or _context()
        config = context.config.model_copy(update={"deadline_s": 60.0, **settings})
        return Rollouts(cls(replace(context, config=config)), num_rollouts=num_rollouts)

    return make
