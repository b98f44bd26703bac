"""Spans of in-flight work: who is doing what, since when, and where the wall clock went.

Consumed by `ActivityTracker`, which opens them for every module and reads them when something
hangs, for the terminal view and for time shares. A span costs about a microsecond.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

WAIT_KINDS = frozenset({"wait", "rollout_wait"})
"""Kinds that do no work themselves: they say who waits for whom."""

SHARES = ("train", "sync", "validation", "rollout_wait", "other")
"""Where wall time goes; each instant belongs to the first of these that is open."""

_SHARE_OF_KIND = {
    "train": 0,
    "sync": 1,
    "validation": 2,
    "rollout": 3,
    "rollout_wait": 3,
    "wait": 3,
}
_NUM_SLOWEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """A span as seen by people: open, or one of the slowest that ended."""

    kind: str
    """rollout, train, sync, validation, wait ..."""
    name: str
    """What exactly; for waits `who -> whom`."""
    seconds: float
    """Age of an open span, duration of an ended one."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} for {self.seconds:.1f} s"


class _Kind:
    """One kind of span, and how many of it are open."""

    __slots__ = ("name", "num_open", "share")

    def __init__(self, name: str) -> None:
        self.name = name
        self.share = _SHARE_OF_KIND.get(name)
        self.num_open = 0


class Span:
    """One piece of work; a context manager that may be entered once."""

    __slots__ = ("_spans", "kind", "name", "since")

    def __init__(self, spans: SpanTable, kind: _Kind, name: str) -> None:
        self._spans = spans
        self.kind = kind
        self.name = name
        self.since = 0.0

    def __enter__(self) -> None:
        self._spans.open(self)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._spans.close(self, failed=error_type is not None)


class SpanTable:
    """All open spans and the totals of the ended ones.

    Invariant: the shares of `SHARES` add up to the time since construction, because every instant
    is booked on exactly one of them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[Span, None] = {}
        self._kinds: dict[str, _Kind] = {}
        self._share_s = [0.0] * len(SHARES)
        self._share_open = [0] * (len(SHARES) - 1)
        self._share = len(SHARES) - 1
        self._share_since = self.started = clock()
        self.progressed = self.started
        """When work last ended well; waits do not count, nor does what ended in an error."""
        self._slowest: list[tuple[float, int, str, str]] = []
        self._slow_bar = 0.0
        self._num_slow = 0

    def span(self, kind: str, name: str) -> Span:
        """A span to enter with `with`."""
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _Kind(kind)
        return Span(self, known, name)

    def open(self, span: Span) -> None:
        """Called by `Span` on entry."""
        kind = span.kind
        span.since = now = self._clock()
        self._open[span] = None
        kind.num_open += 1
        if kind.num_open == 1 and kind.share is not None:
            self._share_open[kind.share] += 1
            self._book(now)

    def close(self, span: Span, *, failed: bool) -> None:
        """Called by `Span` on exit."""
        kind, now = span.kind, self._clock()
        del self._open[span]
        seconds = now - span.since
        kind.num_open -= 1
        if kind.num_open == 0 and kind.share is not None:
            self._share_open[kind.share] -= 1
            self._book(now)
        if kind.name not in WAIT_KINDS:
            if not failed:
                self.progressed = now
            if seconds > self._slow_bar:
                self._note_slow(seconds, kind.name, span.name)

    def _book(self, now: float) -> None:
        """Book the time since the last change of share, then find the share that is on now."""
        self._share_s[self._share] += now - self._share_since
        self._share_since = now
        for index, num_open in enumerate(self._share_open):
            if num_open:
                self._share = index
                return
        self._share = len(SHARES) - 1

    def _note_slow(self, seconds: float, kind: str, name: str) -> None:
        self._num_slow += 1
        entry = (seconds, self._num_slow, kind, name)
        if len(self._slowest) < _NUM_SLOWEST:
            heapq.heappush(self._slowest, entry)
        else:
            heapq.heapreplace(self._slowest, entry)
            self._slow_bar = self._slowest[0][0]

    def open_activities(self, limit: int | None = None) -> list[Activity]:
        """Open spans, oldest first."""
        return self._seen(list(self._open)[:limit])

    def open_counts(self) -> dict[str, int]:
        """Number of open spans by kind, where there are any."""
        return {k.name: k.num_open for k in self._kinds.values() if k.num_open}

    def waits(self) -> list[Activity]:
        """Who waits for whom, one line for each distinct wait, longest first."""
        oldest: dict[tuple[str, str], Span] = {}
        for span in self._open:
            if span.kind.name in WAIT_KINDS:
                oldest.setdefault((span.kind.name, span.name), span)
        return self._seen(oldest.values())

    def _seen(self, spans: Iterable[Span]) -> list[Activity]:
        now = self._clock()
        return [Activity(kind=s.kind.name, name=s.name, seconds=now - s.since) for s in spans]

    def slowest(self) -> list[Activity]:
        """The longest pieces of work that ended, longest first."""
        ended = sorted(self._slowest, reverse=True)
        return [Activity(kind=kind, name=name, seconds=s) for s, _, kind, name in ended]

    def share_seconds(self) -> dict[str, float]:
        """Seconds of wall time by share since construction."""
        self._book(self._clock())
        return dict(zip(SHARES, self._share_s, strict=True))
