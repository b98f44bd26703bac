"""LiveView: plain lines at the right times, a rich view on a terminal, nothing left pending."""

from __future__ import annotations

import asyncio
import io
from typing import Literal

from nexrl.activity.activity_tracker import ActivityTracker
from nexrl.config.schema import RuntimeMonitorConfig
from nexrl.report.live_view import LiveView
from nexrl.testing.virtual_time import virtual_time


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def make_view(
    stream: io.StringIO,
    mode: Literal["auto", "rich", "plain", "off"] = "auto",
    plain_every_s: float = 5.0,
) -> tuple[ActivityTracker, LiveView]:
    tracker = ActivityTracker(RuntimeMonitorConfig())
    return tracker, LiveView(tracker, mode=mode, plain_every_s=plain_every_s, stream=stream)


@virtual_time
async def test_where_there_is_no_terminal_a_line_follows_a_step_when_the_last_is_old_enough() -> (
    None
):
    out = io.StringIO()
    _, view = make_view(out)
    async with view:
        for step in range(1, 9):
            await asyncio.sleep(2)
            view.update(step, {"reward/mean": step / 10}, stage="grpo", num_steps=20)
    assert out.getvalue().splitlines() == [
        "[00:06] grpo step 3/20  reward 0.3",
        "[00:12] grpo step 6/20  reward 0.6",
        "[00:16] grpo step 8/20  reward 0.8",
    ]


@virtual_time
async def test_a_long_step_speaks_up_and_says_who_holds_it() -> None:
    out = io.StringIO()
    tracker, view = make_view(out, "plain")
    async with view:
        with tracker.activity("train", "batch 4"):
            await asyncio.sleep(65)
    assert out.getvalue().splitlines() == [
        "still at step 0: train 'batch 4' for 30.0 s",
        "still at step 0: train 'batch 4' for 60.0 s",
    ]


@virtual_time
async def test_a_validation_keeps_the_last_known_values_of_other_metrics() -> None:
    tracker, view = make_view(io.StringIO(), "plain")
    with tracker.activity("wait", "trainer waits for rollouts"):
        view.update(1, {"reward/mean": 0.5, "rollout/tokens_per_s": 14321.0})
        view.update(1, {"validation/accuracy": 0.875})
        line = view.plain_line()
    assert line == (
        "[00:00] step 1  reward 0.5  tok/s 14,321  accuracy 0.875  trainer waits for rollouts 0 s"
    )


@virtual_time
async def test_warnings_are_shown_in_every_mode_but_off() -> None:
    for mode in ("plain", "rich"):
        out = Terminal()
        tracker, view = make_view(out, mode)
        async with view:
            tracker.warn(f"the [canary] of {mode} is undecided")
        assert f"warning: the [canary] of {mode} is undecided" in out.getvalue()


@virtual_time
async def test_on_a_terminal_the_view_shows_progress_values_shares_and_waits() -> None:
    out = Terminal()
    tracker, view = make_view(out)
    async with view:
        with tracker.activity("wait", "trainer waits for rollouts"):
            view.update(5, {"validation/accuracy": 0.5}, stage="grpo", num_steps=10)
            await asyncio.sleep(3)
    screen = out.getvalue()
    for text in ("grpo step 5/10", "━" * 14 + "─" * 14, "accuracy", "rollout wait 100%",
                 "trainer waits for rollouts for 3 s"):  # fmt: skip
        assert text in screen, text


@virtual_time
async def test_after_the_end_no_timer_and_no_listener_is_left() -> None:
    tracker, view = make_view(Terminal(), "rich")
    async with view:
        await asyncio.sleep(1)
    assert tracker.on_warn == []
    assert view._timer is None


@virtual_time
async def test_off_says_nothing() -> None:
    out = io.StringIO()
    tracker, view = make_view(out, "off")
    async with view:
        view.update(1, {"reward/mean": 1.0})
        view.say("hello")
        tracker.warn("x")
        await asyncio.sleep(100)
    assert out.getvalue() == ""
