"""Metrics as TensorBoard event files, through tensorboardX (no TensorFlow, no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nexrl.errors import ConfigError


class TensorBoardLogger:
    """A MetricLogger. The x axis is each family's own step; family `step` has no prefix.

    Invariant: after a resume, points beyond the resumed step are purged from what TensorBoard shows.
    """

    def __init__(self, folder: Path, *, resumed_step: int | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "logger: tensorboard needs the package tensorboardX, which is not installed "
                "(pip install 'nexrl[loggers]', or logger=[])"
            ) from error
        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, axis: str, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar for each metric."""
        del axis  # families differ in the first part of their metrics' names
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()
