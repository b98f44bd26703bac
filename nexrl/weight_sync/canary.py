"""The canary: do an engine's logprobs of a few fixed rows follow the trainer's?

An acknowledgement is the engine's word; a logprob is a fact. The controller keeps probe rows with
the trainer's logprobs at an older version. After a load it compares three numbers per token, old
trainer, new trainer, engine: where the trainer moved most, the engine must be nearer the new
version, and over all tokens it must be near it. Pure arithmetic and a small memory, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nexrl.types import FloatArray, RowChunk, TokenRow

MAX_PROBE_TOKENS = 256
"""Tokens kept of a probe row: enough to see a change, cheap to score."""
NUM_MOVED_TOKENS = 32
"""Tokens judged for old against new: those where the trainer moved most."""
NOISE_FACTOR = 2.0
"""A move below this many times the measured noise cannot tell old from new."""
MIN_NOISE = 2e-5
"""Nats by which two float32 forwards of the same weights may differ on their worst tokens."""
NO_OP_TOLERANCE = 1e-3
"""Nats per token by which logprobs may differ after the same weights were loaded twice."""
SYNTHETIC_ROWS = 4
SYNTHETIC_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Rows whose logprobs are compared."""

    chunk: RowChunk
    """What trainer and engine score, at temperature 1."""
    logprobs: FloatArray
    """[N] the trainer's, at the version that the rows were adopted in."""
    synthetic: bool = False
    """Made-up tokens, used until real rows exist: unlikely ones, whose rounding is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the canary says of one engine."""

    distance: float
    """Mean |engine - new trainer| over all scored tokens, in nats."""
    noise: float
    """The same over the tokens that differ most, so comparable with a move of the trainer."""
    decided: bool
    """The trainer's move is large enough, against the measured noise, to tell old from new."""
    fault: str | None
    """Why the engine cannot be believed, or None."""


class Canary:
    """The probe in use, the noise it is judged against, and how long it has been undecided.

    Invariant: noise is measured only where the engine is known to hold the trainer's weights, so
    an engine that lags cannot raise it; while undecided the probe keeps its old logprobs, so that
    the moves of several versions add up until they tell.
    """

    def __init__(self, *, tolerance: float, num_rows: int) -> None:
        self._tolerance = tolerance
        self._num_rows = num_rows
        self._noise = MIN_NOISE
        self.probe: Probe | None = None
        self.num_undecided = 0

    def candidate(self, rows: Sequence[TokenRow]) -> RowChunk | None:
        """A probe from rows just trained, spread evenly over them; None when none is usable."""
        usable = [row for row in rows if row.num_tokens > 1]
        if not usable:
            return None
        picks = np.linspace(0, len(usable) - 1, min(self._num_rows, len(usable))).round()
        return RowChunk.from_rows([usable[int(i)].token_ids[:MAX_PROBE_TOKENS] for i in picks])

    def judge(self, new: FloatArray, engine: FloatArray) -> Verdict:
        """Compare [N] logprobs of the probe: the trainer's now and the engine's."""
        assert self.probe is not None
        scored = _scored_positions(self.probe.chunk)
        before = self.probe.logprobs[scored].astype(np.float64)
        now, served = new[scored].astype(np.float64), engine[scored].astype(np.float64)
        moves, distances = np.abs(now - before), np.abs(served - now)
        top = np.argsort(-moves, kind="stable")[:NUM_MOVED_TOKENS]
        move, distance = float(moves[top].mean()), float(distances.mean())
        decided = move > NOISE_FACTOR * self._noise * self._scale(new)
        tolerance = self._tolerance * self._scale(new)
        fault = None
        if decided and not distances[top].mean() < np.abs(served - before)[top].mean():
            fault = (
                f"where the trainer's logprobs moved by {move:.3g} nats, the engine's are "
                "nearer the old weights than the new: it still serves the old ones"
            )
        elif not distance <= tolerance:
            fault = (
                f"its logprobs differ from the trainer's by {distance:.3g} nats per token "
                f"(weight.canary_tolerance accepts {tolerance:.3g}): it serves other weights "
                "or computes differently"
            )
        noise = float(np.sort(distances)[-NUM_MOVED_TOKENS:].mean())
        return Verdict(distance=distance, noise=noise, decided=decided, fault=fault)

    def reload_fault(
        self, before: FloatArray, after: FloatArray, trainer: FloatArray
    ) -> str | None:
        """Why [N] logprobs of an engine before and after it loaded the same weights again differ
        too much, or None; at most as they differ from the trainer's is noise."""
        assert self.probe is not None
        scored = _scored_positions(self.probe.chunk)
        first = before[scored].astype(np.float64)
        difference = float(np.abs(first - after[scored]).mean())
        noise = NOISE_FACTOR * float(np.abs(first - trainer[scored]).mean())
        if difference <= max(NO_OP_TOLERANCE, noise):
            return None
        return (
            f"loading the same weights again changed its logprobs by {difference:.3g} nats per "
            "token; its loader does not start from the published tensors"
        )

    def settle(self, verdicts: Sequence[Verdict], new: FloatArray, *, unchanged: bool) -> None:
        """Remember what verified engines showed; `new` is the trainer's answer for the probe."""
        assert self.probe is not None
        if unchanged or all(v.decided for v in verdicts):
            self.num_undecided = 0
            measured = max((v.noise for v in verdicts), default=0.0) / self._scale(new)
            self._noise = max(MIN_NOISE, measured)
        else:
            self.num_undecided += 1

    def adopt(self, probe: Probe) -> None:
        """Compare these rows next time, unless the present ones have not told yet."""
        if self.num_undecided == 0:
            self.probe = probe

    def _scale(self, logprobs: FloatArray) -> float:
        """Rounding grows with the size of a logprob; real rows are held to the plain tolerance."""
        assert self.probe is not None
        return max(1.0, float(np.abs(logprobs).mean())) if self.probe.synthetic else 1.0


def synthetic_chunk(vocab_size: int) -> RowChunk:
    """Rows of fixed pseudo-random token ids, for a run that has drawn nothing yet."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, vocab_size, (SYNTHETIC_ROWS, SYNTHETIC_TOKENS), np.int32)
    return RowChunk.from_rows(list(ids))


def join(first: RowChunk, second: RowChunk | None) -> RowChunk:
    """One chunk of both, so that one forward answers for both."""
    if second is None:
        return first
    return replace(
        first,
        lengths=np.concatenate([first.lengths, second.lengths]),
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
    )


def _scored_positions(chunk: RowChunk) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    scored = np.ones(chunk.num_tokens, np.bool_)
    scored[chunk.offsets[:-1]] = False
    return scored
