"""`nexrl launch`: one run from configuration to report.

Order of start: configuration, run folder, services, first publication, stages. Order of stop, also
on failure and Ctrl-C: stage modules (in `controller.py`), store, services, then summary and report;
the first cause of a failure is the last thing printed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.activity.metric_sink import MetricLogger, MetricSink, read_metrics
from nexrl.checkpoint import (
    CheckpointManifest,
    CheckpointStore,
    config_differences,
    load_policies,
    read_state,
)
from nexrl.config.cautions import run_cautions
from nexrl.config.loader import LoadedConfig, load_run_config
from nexrl.config.schema import RunConfig
from nexrl.controller import Controller, Stage, StageResult
from nexrl.errors import ConfigError, RunStoppedError, StoreError
from nexrl.launch.model_folder import resolve_model_folder
from nexrl.launch.process import THREAD_ENVIRONMENT
from nexrl.launch.services import Services, local_services, policy_head
from nexrl.launch.stage import StageSurroundings, build_stage
from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.rendering.renderer import load_renderer
from nexrl.report.dump import DumpRecorder, recording
from nexrl.report.failure_text import failure_reason, format_failure
from nexrl.report.live_view import LiveView
from nexrl.report.report import write_report
from nexrl.report.run_folder import RunFolder, find_latest
from nexrl.report.summary import RunStatus, summarize_run, summarize_stages, write_summary
from nexrl.types import DEFAULT_POLICY, LedgerSnapshot, ModelSpec, PolicyVersion
from nexrl.weight_sync.controller import WeightSyncController

log = logging.getLogger(__name__)
EXIT_CODES: Mapping[RunStatus, int] = {"completed": 0, "failed": 1, "interrupted": 130}


def launch(recipe: Path, overrides: Sequence[str] = (), *, resume: str | None = None) -> int:
    """Run a recipe to its end; returns the exit code. ConfigError before anything has started."""
    for name, value in THREAD_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    extra = [] if resume is None else [f"resume={json.dumps(resume)}"]
    loaded = load_run_config(recipe, [*overrides, *extra])
    for text in run_cautions(loaded):
        print(f"warning: {text}", file=sys.stderr)  # noqa: T201
    folder, checkpoint = _open_run_folder(loaded.config)
    try:
        return asyncio.run(_run(loaded, folder, checkpoint))
    finally:
        folder.close()


async def _run(
    loaded: LoadedConfig, folder: RunFolder, checkpoint: tuple[Path, CheckpointManifest] | None
) -> int:
    return await _Run(loaded, folder, checkpoint).main()


def _open_run_folder(
    config: RunConfig,
) -> tuple[RunFolder, tuple[Path, CheckpointManifest] | None]:
    """A new folder, or the one to resume with its newest checkpoint."""
    if config.resume is None:
        return RunFolder.create(config.launch.run_root, config.experiment_name), None
    path: str | Path = config.resume
    if path == "latest":
        newest = find_latest(config.launch.run_root, config.experiment_name)
        if newest is None:
            raise ConfigError(
                f"resume: no run of experiment {config.experiment_name!r} under "
                f"{config.launch.run_root!r}"
            )
        path = newest
    folder = RunFolder.open(path)
    return folder, CheckpointStore(folder.checkpoints, keep_last=1).latest()


@dataclass(slots=True)
class _Outcome:
    status: RunStatus = "failed"
    exit_reason: str = ""
    error: BaseException | None = None
    ledgers: list[LedgerSnapshot] = field(default_factory=list)
    time_shares: dict[str, Mapping[str, float]] = field(default_factory=dict)


class _Run:
    """One process's share of a run. Invariant: summary.json and report.html are written however
    it ends, short of SIGKILL."""

    def __init__(
        self,
        loaded: LoadedConfig,
        folder: RunFolder,
        checkpoint: tuple[Path, CheckpointManifest] | None,
    ) -> None:
        self._loaded = loaded
        self._config = loaded.config
        self._folder = folder
        self._checkpoint = checkpoint
        self._global_step = checkpoint[1].global_step if checkpoint else 0
        self._resumed_step = self._global_step if loaded.config.resume is not None else None
        self._head = policy_head(loaded.stages)
        self._outcome = _Outcome()
        self._resolved: dict[str, Any] = loaded.config.model_dump(mode="json", by_alias=True)
        self._shown_path = os.path.relpath(folder.path)
        monitor = loaded.config.runtime_monitor
        self._tracker = ActivityTracker(monitor)
        self._view = LiveView(self._tracker, mode=monitor.live, plain_every_s=monitor.plain_every_s)

    async def main(self) -> int:
        """The whole run; never raises for what a run can meet."""
        async with self._view:
            await self._guarded(self._record())
        status = self._outcome.status
        code = EXIT_CODES[status]
        try:
            self._write_outcome()
        except (OSError, StoreError) as error:  # a full disk must not hide what ended the run
            print(f"the summary and the report could not be written: {error}", file=sys.stderr)  # noqa: T201
            code = code or EXIT_CODES["failed"]
        self._print_outcome()
        if status == "interrupted":
            # What a thread of start-up still does (a model factory, loading) is not waited for.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        return code

    async def _record(self) -> None:
        """Open what the run is recorded in, work, close it."""
        self._view.say(f"run folder: {self._shown_path}")
        self._folder.open_log()
        for text in run_cautions(self._loaded):
            log.warning("%s", text)
        code_version = self._folder.write_origin(self._resolved, secrets=self._loaded.secrets)
        sink = MetricSink(
            self._folder.metrics,
            clock=asyncio.get_running_loop().time,
            loggers=await asyncio.to_thread(self._loggers),
            resumed_step=self._resumed_step,
        )
        try:
            await self._work(sink, code_version)
        finally:
            # A tracker may upload for minutes; meanwhile a signal must be heard.
            await asyncio.to_thread(sink.close)

    async def _guarded(self, work: Any) -> None:
        """Turn signals and errors into an outcome; a second signal ends the process at once."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        caught: list[str] = []

        def interrupt(name: str) -> None:
            if caught:
                os._exit(EXIT_CODES["interrupted"])
            caught.append(name)
            task.cancel()

        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, interrupt, number.name)
        outcome = self._outcome
        try:
            await task
            outcome.status = "completed"
        except asyncio.CancelledError:
            outcome.status = "interrupted"
            outcome.exit_reason = f"stopped by {caught[0] if caught else 'cancellation'}"
        except BaseException as error:  # noqa: BLE001 - every failure becomes summary, text and exit code
            outcome.error = error
            outcome.exit_reason = failure_reason(error, secrets=self._loaded.secrets)
        finally:
            # After a first signal they stay until the loop closes: the loop still waits for a call
            # in a thread, and a second signal must end that too.
            if not caught:
                for number in numbers:
                    loop.remove_signal_handler(number)

    def _loggers(self) -> list[MetricLogger]:
        """Blocking: a tracker is asked for a run."""
        loggers: list[MetricLogger] = []
        if "tensorboard" in self._config.logger:
            from nexrl.activity.loggers import TensorBoardLogger

            loggers.append(
                TensorBoardLogger(self._folder.tensorboard, resumed_step=self._resumed_step)
            )
        if "wandb" in self._config.logger:
            from nexrl.activity.loggers import WandbLogger

            loggers.append(
                WandbLogger(
                    self._folder.wandb,
                    project=self._config.project_name,
                    name=self._folder.name,
                    config=self._resolved,
                    secrets=self._loaded.secrets,
                )
            )
        return loggers

    # --- the work -----------------------------------------------------------------------------

    async def _work(self, sink: MetricSink, code_version: Mapping[str, Any]) -> None:
        tracker = self._tracker
        with tracker.activity("setup", "model folder"):
            model_folder = await asyncio.to_thread(
                resolve_model_folder, self._config, recipe_dir=self._loaded.recipe_dir
            )
            renderer = await asyncio.to_thread(load_renderer, model_folder)
        async with AsyncExitStack() as stack:
            with tracker.activity("setup", "services"):
                services = await stack.enter_async_context(
                    local_services(
                        self._config,
                        model_folder=model_folder,
                        logs=self._folder.logs,
                        head=self._head,
                    )
                )
            recorder = self._recorder(code_version)
            if recorder is not None:
                stack.callback(recorder.close)
            store = self._open_store(sink.segment)
            if store is not None:
                stack.push_async_callback(store.aclose)
            self._list_differences()
            async with _supervised(services):
                version = await self._load_weights(services, model_folder, sink.segment)
                controller = Controller(
                    train=services.train,
                    weight_sync=self._weight_sync(services, recorder),
                    tracker=tracker,
                    sink=sink,
                    version=version,
                    global_step=self._global_step,
                    view=self._view,
                    recorder=recorder,
                    code_version=code_version,
                    resolved_config=self._resolved,
                )
                await controller.start()
                around = StageSurroundings(
                    recipe_dir=self._loaded.recipe_dir,
                    run_id=f"{self._folder.name}#{version.incarnation}",
                    train=services.train,
                    inference=services.inference,
                    engine=await services.inference.info(),
                    renderer=renderer,
                    store=store,
                    tracker=tracker,
                    recorder=recorder,
                    checkpoints=self._folder.checkpoints,
                )
                await self._run_stages(controller, around)

    async def _run_stages(self, controller: Controller, around: StageSurroundings) -> None:
        tracker = self._tracker
        manifest = self._checkpoint[1] if self._checkpoint else None
        self._outcome.exit_reason = "every stage was done before this resume"
        for index, stage_config in enumerate(self._loaded.stages):
            if manifest and (index, not manifest.stage_done) < (manifest.stage_index, True):
                continue
            with tracker.activity("setup", f"stage {stage_config.name}"):
                stage = await asyncio.to_thread(
                    build_stage, stage_config, index, around, controller.version
                )
            result = StageResult(name=stage_config.name)
            if manifest and self._checkpoint and index == manifest.stage_index:
                _restore(stage, result, self._checkpoint)
                await load_policies(
                    self._checkpoint[0], around.train, stage.trainer.further_policies
                )
            elif index:
                await around.train.reset_optimizer(DEFAULT_POLICY)
            tracker.begin_stage()
            self._view.say(
                f"stage {stage_config.name}: {stage_config.config.trainer.num_steps} batches"
            )
            try:
                await controller.run_stage(stage, result)
            finally:
                self._outcome.ledgers.append(stage.pool.ledger)
                self._outcome.time_shares[stage_config.name] = tracker.stage_time_share()
            _refuse_all_failed(stage, tracker)
            self._outcome.exit_reason = result.stopped_early or "all batches are trained"
            self._view.say(f"stage {stage_config.name} ended: {self._outcome.exit_reason}")

    async def _load_weights(
        self, services: Services, model_folder: Path, incarnation: int
    ) -> PolicyVersion:
        """Weights and version to begin with; every start of the run is an incarnation."""
        spec = ModelSpec(path=str(model_folder), head=self._head, seed=self._config.seed)
        if self._checkpoint is None:
            await services.train.create(spec)
            return PolicyVersion(incarnation=incarnation)
        folder, manifest = self._checkpoint
        await load_policies(folder, services.train, [spec])
        return replace(manifest.policy_version, incarnation=incarnation)

    def _list_differences(self) -> None:
        """A resume with another configuration is allowed, and said."""
        if self._checkpoint is None:
            return
        for text in config_differences(self._checkpoint[1].config, self._resolved):
            if not text.startswith("resume:"):
                self._tracker.warn(f"this setting differs from the run that is resumed: {text}")

    def _weight_sync(
        self, services: Services, recorder: DumpRecorder | None
    ) -> WeightSyncController:
        engines = services.engines
        if recorder is not None:
            engines = tuple(recording(engine, "weights", recorder) for engine in engines)
        return WeightSyncController(
            train=services.train,
            engines=engines,
            config=self._config.weight,
            folder=self._folder.publications,
            tracker=self._tracker,
        )

    def _recorder(self, code_version: Mapping[str, Any]) -> DumpRecorder | None:
        dump = self._config.debug.dump
        if not dump.kinds:
            return None
        return DumpRecorder(
            self._folder.dumps,
            kinds=dump.kinds,
            every_steps=dump.every_steps,
            header={"config": self._resolved, "code_version": code_version},
            secrets=self._loaded.secrets,
        )

    def _open_store(self, incarnation: int) -> TrajectoryStore | None:
        settings = self._config.trajectory_pool.store
        if not settings.enabled:
            return None
        return TrajectoryStore(
            self._folder.store,
            run_id=self._folder.name,
            incarnation=incarnation,
            commit_every_s=settings.commit_every_s,
            commit_max_records=settings.commit_max_records,
        )

    # --- the end ------------------------------------------------------------------------------

    def _write_outcome(self) -> None:
        """Summary and report."""
        outcome = self._outcome
        summary = summarize_run(
            self._tracker,
            status=outcome.status,
            exit_reason=outcome.exit_reason,
            stages=summarize_stages(
                read_metrics(self._folder.metrics), time_shares=outcome.time_shares
            ),
            ledger=LedgerSnapshot.sum(outcome.ledgers) if outcome.ledgers else None,
        )
        write_summary(self._folder.summary, summary)
        # Drawing takes longer than a person who pressed Ctrl-C waits.
        write_report(self._folder.path, draw=outcome.status != "interrupted")

    def _print_outcome(self) -> None:
        """The last words on the screen."""
        outcome = self._outcome
        report = f"report: {self._shown_path}/{self._folder.report.name}"
        if outcome.status == "failed" and outcome.error is not None:
            print(f"\n{report}\n", file=sys.stderr)  # noqa: T201
            print(format_failure(outcome.error, secrets=self._loaded.secrets), file=sys.stderr)  # noqa: T201
        elif self._config.runtime_monitor.live != "off":
            print(f"{outcome.status}: {outcome.exit_reason}\n{report}")  # noqa: T201


@asynccontextmanager
async def _supervised(services: Services) -> AsyncIterator[None]:
    """Fails the block as soon as a service ends by itself."""
    async with asyncio.TaskGroup() as group:
        watchers = [group.create_task(child.supervise()) for child in services.children]
        yield
        for watcher in watchers:
            watcher.cancel()


def _restore(
    stage: Stage, result: StageResult, checkpoint: tuple[Path, CheckpointManifest]
) -> None:
    """Put a stage's modules where the checkpoint was taken."""
    folder, manifest = checkpoint
    if manifest.stage != stage.name:
        raise ConfigError(
            f"resume: the checkpoint is of stage {manifest.stage!r} (number {manifest.stage_index}), "
            f"the recipe has {stage.name!r} there"
        )
    state = read_state(folder)
    stage.loader.load_state_dict(state["loader"])
    stage.pool.load_state_dict(state["pool"])
    stage.trainer.load_state_dict(state["trainer"])
    result.steps = manifest.stage_step
    result.validations = state["validations"]


def _refuse_all_failed(stage: Stage, tracker: ActivityTracker) -> None:
    """A stage too short for the error policy's window is no success when all its rollouts failed."""
    ledger = stage.pool.ledger
    failed = sum(ledger.failed.values())
    if failed and failed + sum(ledger.cancelled.values()) == ledger.admitted and tracker.failures:
        worst = tracker.failures[0]
        raise RunStoppedError(
            f"all {failed} rollouts of stage {stage.name} failed; most of them: {worst}",
            failure_class=worst.first.failure_class,
        )
