"""What the server tells Prometheus: running, waiting, tokens, latency and the active version."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nexrl.services.inference.engines.builtin.engine import Engine

_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class ServerMetrics:
    """Counts requests and renders all numbers as Prometheus text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: Counter[tuple[str, str]] = Counter()
        self._choices = 0
        self.failed_calls = 0
        self._buckets = [0] * (len(_BUCKETS_S) + 1)
        self._seconds = 0.0

    @contextmanager
    def request(self, endpoint: str, num_choices: int) -> Iterator[None]:
        """Time one request; an exception counts it as an error."""
        loop = asyncio.get_running_loop()
        started, outcome = loop.time(), "error"
        try:
            yield
            outcome = "ok"
        finally:
            seconds = loop.time() - started
            self._requests[endpoint, outcome] += 1
            self._choices += num_choices
            self._buckets[bisect_left(_BUCKETS_S, seconds)] += 1
            self._seconds += seconds

    def text(self) -> str:
        """The exposition format, version 0.0.4."""
        engine, counts, version = self._engine, self._engine.counts, self._engine.active_version
        of_version = f'{{policy="{version.policy}",incarnation="{version.incarnation}"}}'
        requests = {
            f'{{endpoint="{endpoint}",outcome="{outcome}"}}': count
            for (endpoint, outcome), count in sorted(self._requests.items())
        }
        totals = list(accumulate(self._buckets))
        bounds = (*(f"{bound:g}" for bound in _BUCKETS_S), "+Inf")
        seconds: dict[str, float] = {
            f'_bucket{{le="{bound}"}}': total for bound, total in zip(bounds, totals, strict=True)
        }
        seconds |= {"_sum": self._seconds, "_count": totals[-1]}
        families: tuple[tuple[str, str, str, float | Mapping[str, float]], ...] = (
            ("running", "gauge", "Choices being drawn.", engine.num_running),
            ("waiting", "gauge", "Choices without a slot.", engine.num_waiting),
            ("healthy", "gauge", "1 while the engine works.", int(engine.failure is None)),
            ("prompt_tokens_total", "counter", "Tokens prefilled.", counts.prompt_tokens),
            ("drawn_tokens_total", "counter", "Tokens drawn.", counts.drawn_tokens),
            ("decode_steps_total", "counter", "Decode steps.", counts.steps),
            ("choices_total", "counter", "Choices asked for.", self._choices),
            ("failed_calls_total", "counter", "Calls of generate that failed.", self.failed_calls),
            ("policy_version", "gauge", "The active version.", {of_version: version.number}),
            ("requests_total", "counter", "Requests answered.", requests),
            ("request_seconds", "histogram", "Time from request to answer.", seconds),
        )
        lines = []
        for name, kind, text, values in families:
            name = f"nexrl_inference_{name}"
            by_label = values if isinstance(values, Mapping) else {"": values}
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            # Written out to the last digit: a rounded counter stands still, then jumps.
            lines += [f"{name}{label} {value}" for label, value in by_label.items()]
        return "\n".join(lines) + "\n"
