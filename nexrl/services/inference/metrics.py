"""What the server tells Prometheus: running, waiting, tokens, latency and the active version."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nexrl.services.inference.engines.builtin.service import BuiltinInference

_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class ServerMetrics:
    """Counts requests and renders all numbers as Prometheus text."""

    def __init__(self, engine: BuiltinInference) -> None:
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
        engine, version = self._engine, self._engine.active_version
        label = f'{{policy="{version.policy}",incarnation="{version.incarnation}"}}'
        plain: tuple[tuple[str, str, str, float], ...] = (
            ("running", "gauge", "Choices being drawn.", engine.num_running),
            ("waiting", "gauge", "Choices without a slot.", engine.num_waiting),
            ("healthy", "gauge", "1 while the engine works.", float(engine.failure is None)),
            ("prompt_tokens_total", "counter", "Tokens prefilled.", engine.counts.prompt_tokens),
            ("drawn_tokens_total", "counter", "Tokens drawn.", engine.counts.drawn_tokens),
            ("decode_steps_total", "counter", "Decode steps.", engine.counts.steps),
            ("choices_total", "counter", "Choices asked for.", self._choices),
            ("failed_calls_total", "counter", "Calls of generate that failed.", self.failed_calls),
        )
        lines: list[str] = []
        for name, kind, text, value in plain:
            lines += _header(name, kind, text)
            lines.append(f"nexrl_inference_{name} {value:g}")
        lines += _header("policy_version", "gauge", "Number of the active version.")
        lines.append(f"nexrl_inference_policy_version{label} {version.number}")
        lines += _header("requests_total", "counter", "Requests answered.")
        for (endpoint, outcome), count in sorted(self._requests.items()):
            labels = f'{{endpoint="{endpoint}",outcome="{outcome}"}}'
            lines.append(f"nexrl_inference_requests_total{labels} {count}")
        return "\n".join([*lines, *self._latency_lines()]) + "\n"

    def _latency_lines(self) -> list[str]:
        lines = _header("request_seconds", "histogram", "Time from request to answer.")
        total = 0
        for bound, count in zip((*_BUCKETS_S, None), self._buckets, strict=True):
            total += count
            le = "+Inf" if bound is None else f"{bound:g}"
            lines.append(f'nexrl_inference_request_seconds_bucket{{le="{le}"}} {total}')
        lines.append(f"nexrl_inference_request_seconds_sum {self._seconds:g}")
        lines.append(f"nexrl_inference_request_seconds_count {total}")
        return lines


def _header(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP nexrl_inference_{name} {text}", f"# TYPE nexrl_inference_{name} {kind}"]
