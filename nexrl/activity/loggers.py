"""Metrics beside metrics.jsonl: as TensorBoard event files, and in Weights & Biases.

Loggers of a `MetricSink`. tensorboardX needs no TensorFlow and no torch; `WANDB_MODE=offline` keeps
what wandb gets in the run folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

from nexrl.config.redact import redact
from nexrl.errors import ConfigError

_UPLOAD_DEADLINE_S = 120.0
"""How long the end of a run waits for wandb; what is not uploaded by then stays in the run folder,
for `wandb sync`."""


def _package(name: str, logger: str) -> Any:
    """The package of a logger, which a run without that logger does not need."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"logger: {logger} needs the package {name}, which is not installed (pip install "
            f"'nexrl[loggers]', or leave {logger} out of logger)"
        ) from error


class TensorBoardLogger:
    """A MetricLogger. The x axis is each family's own step; family `step` has no prefix.

    Invariant: after a resume, points beyond the resumed step are purged from what TensorBoard shows.
    """

    def __init__(self, folder: Path, *, resumed_step: int | None = None) -> None:
        package = _package("tensorboardX", "tensorboard")
        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer: Any = package.SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar for each metric."""
        del axis  # families differ in the first part of their metrics' names
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()


class WandbLogger:
    """A MetricLogger.

    Invariant: wandb's own counter is never set. Every family has its x axis as a metric of its own
    (`axis/<family>`), because wandb drops points whose step goes back (FR-166). The run's id lies in
    the run folder, so that a resumed run continues the same page.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        config: Mapping[str, Any],
        secrets: Collection[str] = (),
    ) -> None:
        self._wandb = _package("wandb", "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / "wandb_run_id.txt"
        run_id = id_file.read_text().strip() if id_file.exists() else token_hex(4)
        id_file.write_text(run_id + "\n")
        self._run: Any = self._wandb.init(
            project=project,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=redact(config, secrets=secrets),
            settings=self._wandb.Settings(
                silent=True, console="off", finish_timeout=_UPLOAD_DEADLINE_S
            ),
        )
        self._axes: set[str] = set()
        self._names: set[str] = set()

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of one position in one call."""
        axis_name = f"axis/{axis}"
        if axis not in self._axes:
            self._axes.add(axis)
            self._run.define_metric(axis_name)
        for name in metrics.keys() - self._names:
            self._names.add(name)
            self._run.define_metric(name, step_metric=axis_name)
        self._run.log({axis_name: step, **metrics})

    def close(self) -> None:
        """Finish the run; its file is whole on return. Idempotent."""
        if self._run is None:
            return
        self._run.finish()
        self._run = None
        if self._wandb.run is None:
            # wandb's own process writes the file's end after `finish` has returned, and an exit
            # hook waits for that, which an interrupted run does not reach.
            try:
                self._wandb.teardown()
            except SystemExit as error:  # its way to say so; the run's own exit code stands
                raise RuntimeError(f"wandb's service ended with {error.code}") from error
