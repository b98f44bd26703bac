"""LiveView: the run on a terminal while it runs; plain lines where there is no terminal.

Consumes step metrics through `update` and reads the ActivityTracker. In rich mode a loop timer
redraws a few times a second; in plain mode a line follows a step when the last line is old enough,
and a timer speaks up when a step takes long, saying who waits for whom.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Literal, Self

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.activity.spans import SHARES

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

_REFRESH_S = 0.25
_LONG_STEP_S = 30.0
_BAR_WIDTH = 28
_SHOWN = {
    "reward": ("reward/mean", "validation/reward"),
    "accuracy": ("validation/accuracy",),
    "loss": ("loss/total", "nll/token"),
    "grad norm": ("grad_norm",),
    "response length": ("response_length/mean",),
    "trajectories/s": ("rollout/trajectories_per_s",),
    "tokens/s": ("rollout/tokens_per_s",),
}
_SHORT = {"response length": "length", "trajectories/s": "traj/s", "tokens/s": "tok/s"}


class LiveView:
    """An async context that shows a run.

    Invariant: between entry and exit at most one timer is pending, and after exit none is.
    """

    def __init__(
        self,
        tracker: ActivityTracker,
        *,
        mode: Literal["auto", "rich", "plain", "off"] = "auto",
        plain_every_s: float = 5.0,
        stream: IO[str] | None = None,
    ) -> None:
        self._tracker = tracker
        self._stream = stream or sys.stdout
        if mode == "auto":
            mode = "rich" if self._stream.isatty() else "plain"
        self._mode = mode
        self._plain_every_s = plain_every_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._live: Live | None = None
        self._values: dict[str, float] = {}
        self._step = 0
        self._num_steps = 0
        self._stage = ""
        self._printed_at = self._loop.time()
        self._updated_at = self._loop.time()

    async def __aenter__(self) -> Self:
        if self._mode == "off":
            return self
        self._tracker.on_warn.append(self._show_warning)
        if self._mode == "rich":
            self._start_rich()
        self._arm()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._mode == "off":
            return
        self._tracker.on_warn.remove(self._show_warning)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._live is not None:
            self._live.update(self._render())
            self._live.stop()
            self._live = None
        elif self._step and self._updated_at > self._printed_at:
            self._print_line()

    def update(
        self, step: int, metrics: Mapping[str, float], *, stage: str = "", num_steps: int = 0
    ) -> None:
        """A step of a stage ended, or its validation: show these metrics."""
        self._step, self._stage, self._num_steps = step, stage, num_steps
        self._updated_at = self._loop.time()
        for label, names in _SHOWN.items():
            value = next((metrics[name] for name in names if name in metrics), None)
            if value is not None:
                self._values[label] = value
        if self._mode == "plain" and self._due(self._plain_every_s):
            self._print_line()

    def say(self, message: str, *, style: str | None = None) -> None:
        """A line that stays on the screen: stage borders, warnings, where the run folder lies."""
        if self._live is not None:
            self._live.console.print(message, style=style, markup=False, highlight=False)
        elif self._mode == "plain":
            print(message, file=self._stream, flush=True)

    # --- timers -------------------------------------------------------------------------------

    def _arm(self) -> None:
        delay = _REFRESH_S if self._mode == "rich" else max(self._plain_every_s, _LONG_STEP_S)
        self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
        elif self._due(_LONG_STEP_S):
            waits = "; ".join(str(a) for a in self._tracker.spans.open_activities(3))
            self.say(f"still at step {self._step}: {waits or 'nothing is running'}")
            self._printed_at = self._loop.time()
        self._arm()

    def _due(self, interval_s: float) -> bool:
        return self._loop.time() - self._printed_at >= interval_s

    # --- plain --------------------------------------------------------------------------------

    def _print_line(self) -> None:
        self._printed_at = self._loop.time()
        self.say(self.plain_line())

    def plain_line(self) -> str:
        """The state in one line."""
        parts = [self._position()]
        parts += [f"{_SHORT.get(k, k)} {_number(v)}" for k, v in self._values.items()]
        if waits := self._tracker.spans.waits():
            parts.append(f"{waits[0].name} {waits[0].seconds:.0f} s")
        return "  ".join(parts)

    def _position(self) -> str:
        of = f"/{self._num_steps}" if self._num_steps else ""
        stage = f"{self._stage} " if self._stage else ""
        return f"[{_duration(self._tracker.wall_s)}] {stage}step {self._step}{of}"

    def _show_warning(self, message: str) -> None:
        self.say(f"warning: {message}", style="yellow")

    # --- rich ---------------------------------------------------------------------------------

    def _start_rich(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            self._render(), console=Console(file=self._stream), auto_refresh=False, transient=False
        )
        self._live.start()

    def _render(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        for label, value in self._values.items():
            grid.add_row(Text(label, style="dim"), Text(_number(value), style="bold"))
        lines: list[Text | Table] = [Text(self._headline(), style="bold"), Text(self._bar())]
        if self._values:
            lines.append(grid)
        if counts := self._tracker.spans.open_counts():
            doing = ", ".join(f"{n} {kind}" for kind, n in counts.items())
            lines.append(Text(f"running: {doing}", style="dim"))
        waits = self._tracker.spans.waits()[:3]
        lines.extend(Text(f"{w.name} for {w.seconds:.0f} s", style="dim") for w in waits)
        return Group(*lines)

    def _headline(self) -> str:
        failed = sum(kind.count for kind in self._tracker.failures)
        ended = self._tracker.rollouts.num_rollouts
        tail = f"  {ended} rollouts" + (f", {failed} failed" if failed else "") if ended else ""
        return self._position() + tail

    def _bar(self) -> str:
        share = min(self._step / self._num_steps, 1.0) if self._num_steps else 0.0
        full = round(share * _BAR_WIDTH)
        shares = self._tracker.stage_time_share()
        spent = "  ".join(
            f"{n.replace('_', ' ')} {shares[n]:.0%}" for n in SHARES if shares[n] >= 0.005
        )
        return "━" * full + "─" * (_BAR_WIDTH - full) + "  " + spent


def _number(value: float) -> str:
    """Three significant digits, whole numbers from a hundred up."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
