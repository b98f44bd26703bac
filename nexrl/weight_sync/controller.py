"""WeightSyncController: trained weights become the weights that engines serve.

    publish -> pause -> load -> verify -> activate -> resume

Stands between the trainer, whose batch has just ended, and the pool, which admits rollouts again
once `sync` has returned. Consumes one policy's publications; produces one active version on every
engine. What a phase does to engines is in `engine_set.py`, what is believed of them in `canary.py`.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nexrl.config.schema import WeightConfig
from nexrl.errors import ConfigError, WeightSyncError
from nexrl.protocols import Tracker
from nexrl.services.inference.protocol import EngineControl
from nexrl.services.train.protocol import TrainService
from nexrl.types import (
    DEFAULT_POLICY,
    FloatArray,
    PolicyVersion,
    RowChunk,
    TokenRow,
    WeightManifest,
)
from nexrl.weight_sync.canary import Canary, Probe, Verdict, join, synthetic_chunk
from nexrl.weight_sync.engine_set import Engine, EngineSet, within

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What the trainer says at the version being published."""

    logprobs: FloatArray
    """[N] for the probe in use."""
    next_probe: Probe
    """Rows for the sync after this one, with the trainer's logprobs now."""


class WeightSyncController:
    """Publishes the weights of one policy and makes every engine serve them, verified.

    Invariants: one sync at a time; a version is activated only when every engine's acknowledgement
    named it, its checksum (where echoed) equals the manifest's, and the engine's logprobs follow
    the trainer's; every phase ends within its deadline; after a failed sync no engine draws tokens
    with weights in doubt. Without engines (a run that trains a reward model) it only publishes.
    """

    def __init__(
        self,
        *,
        train: TrainService,
        engines: Sequence[EngineControl],
        config: WeightConfig,
        folder: Path,
        policy: str = DEFAULT_POLICY,
        tracker: Tracker,
    ) -> None:
        if config.mode != "sync":
            raise ConfigError(f"weight.mode must be 'sync' in this version, got {config.mode!r}")
        self._train = train
        self._config = config
        self._folder = folder
        self._policy = policy
        self._tracker = tracker
        self._engines = EngineSet(engines, config)
        self._canary = Canary(tolerance=config.canary_tolerance, num_rows=config.num_canary_rows)
        self._lock = asyncio.Lock()
        self._active: WeightManifest | None = None
        self._seconds: dict[str, float] = {}

    @property
    def active(self) -> WeightManifest | None:
        """The publication that every engine serves; None before `start`."""
        return self._active

    async def start(self, version: PolicyVersion) -> dict[str, float]:
        """Publish the present weights, make every engine serve them, and test the path itself;
        returns sync/*.

        The test loads the same weights again and expects unchanged logprobs: a loader that
        processes weights twice would corrupt every later rollout in silence (FR-110).
        """
        async with self._alone(version):
            await self._engines.learn_names(version)
            if self._config.verify == "full" and self._engines.engines:
                self._canary.probe = await self._first_probe(version)
            return await self._run(version, unchanged=False, starting=True)

    async def sync(
        self,
        version: PolicyVersion,
        *,
        probe_rows: Sequence[TokenRow] = (),
        unchanged: bool = False,
    ) -> dict[str, float]:
        """Make every engine serve the trainer's present weights as `version`; returns sync/*.

        `probe_rows` are rows of the batch just trained, for the next canary; `unchanged` says that
        no optimizer step was applied. Raises WeightSyncError that names phase, engine and version.
        """
        async with self._alone(version):
            if self._active is None:
                raise WeightSyncError(f"sync {version}: `start` has not been called")
            return await self._run(version, unchanged=unchanged, probe_rows=probe_rows)

    @asynccontextmanager
    async def _alone(self, version: PolicyVersion) -> AsyncIterator[None]:
        """One sync at a time (FR-104); how long the second waits is measured."""
        if version.policy != self._policy:
            raise WeightSyncError(f"sync {version}: this controller syncs {self._policy!r}")
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self._lock:
            self._seconds = {"wait": loop.time() - asked}
            yield

    @asynccontextmanager
    async def _timed(self, phase: str) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + loop.time() - started

    async def _run(
        self,
        version: PolicyVersion,
        *,
        unchanged: bool,
        probe_rows: Sequence[TokenRow] = (),
        starting: bool = False,
    ) -> dict[str, float]:
        """All phases in order; whatever fails before activation sends the engines back."""
        async with self._timed("publish"):
            manifest = await self._publish(version, unchanged=unchanged)
        answer = await self._ask_trainer(version, probe_rows)
        verdicts: list[Verdict] = []
        async with self._timed("pause"):
            try:
                await self._engines.pause(version)
                await self._load(manifest)
                if answer is not None:
                    verdicts = await self._verify(version, answer)
                    if starting:
                        await self._test_no_op(manifest, answer)
                await self._engines.activate(version)
            except WeightSyncError:
                for line in await self._engines.retreat(self._active):
                    self._tracker.warn(line)
                raise
            self._active = manifest
            await self._engines.resume(version)
        if answer is not None:
            self._remember(version, verdicts, answer, unchanged=unchanged or starting)
        await asyncio.to_thread(
            _delete_old, self._folder, self._policy, keep=self._config.keep_publications
        )
        return self._metrics(manifest, verdicts)

    async def _publish(self, version: PolicyVersion, *, unchanged: bool) -> WeightManifest:
        self._folder.mkdir(parents=True, exist_ok=True)
        # One folder a version: policies and a resumed run share a parent without meeting.
        name = f"{version.policy}-{version.incarnation:04d}-{version.number:08d}"
        path = (self._folder / name).absolute()
        manifest = await within(
            self._config.publish_deadline_s,
            f"sync {version}: publish on the train service",
            self._train.publish_weights(self._policy, version, str(path), unchanged=unchanged),
        )
        if manifest.version != version:
            raise WeightSyncError(
                f"sync {version}: publish: the train service published {manifest.version}"
            )
        return manifest

    async def _load(self, manifest: WeightManifest) -> None:
        async with self._timed("load"):
            await self._engines.load(manifest)

    async def _first_probe(self, version: PolicyVersion) -> Probe:
        info = await self._ask(version, self._train.info(self._policy))
        chunk = synthetic_chunk(info.vocab_size)
        logprobs = await self._forward(version, chunk)
        return Probe(chunk=chunk, logprobs=logprobs, synthetic=True)

    async def _ask_trainer(
        self, version: PolicyVersion, probe_rows: Sequence[TokenRow]
    ) -> _Answer | None:
        """The trainer's logprobs for the present probe and the next, in one forward; None when
        engines are not probed."""
        probe = self._canary.probe
        if probe is None:
            return None
        async with self._timed("verify"):
            candidate = self._canary.candidate(probe_rows)
            logprobs = await self._forward(version, join(probe.chunk, candidate))
        now, following = logprobs[: probe.chunk.num_tokens], logprobs[probe.chunk.num_tokens :]
        if candidate is None:
            next_probe = Probe(chunk=probe.chunk, logprobs=now, synthetic=probe.synthetic)
        else:
            next_probe = Probe(chunk=candidate, logprobs=following)
        return _Answer(logprobs=now, next_probe=next_probe)

    async def _forward(self, version: PolicyVersion, chunk: RowChunk) -> FloatArray:
        output = await self._ask(version, self._train.forward(self._policy, chunk))
        return output.outputs["logprobs"]

    async def _ask(self, version: PolicyVersion, call: Awaitable[T]) -> T:
        where = f"sync {version}: verify on the train service"
        return await within(self._config.verify_deadline_s, where, call)

    async def _verify(self, version: PolicyVersion, answer: _Answer) -> list[Verdict]:
        """One verdict for each engine; raises for the first that cannot be believed."""
        async with self._timed("verify"):
            scores = await self._score(version)
        verdicts = [self._canary.judge(answer.logprobs, score) for score in scores]
        for engine, verdict in zip(self._engines.engines, verdicts, strict=True):
            if verdict.fault is not None:
                raise WeightSyncError(f"sync {version}: verify on {engine.name}: {verdict.fault}")
        return verdicts

    async def _score(self, version: PolicyVersion) -> list[FloatArray]:
        assert self._canary.probe is not None
        chunk = self._canary.probe.chunk

        async def score(engine: Engine) -> FloatArray:
            scores = await engine.control.score(chunk, policy=self._policy)
            if len(scores) != chunk.num_tokens:
                raise WeightSyncError(f"it scored {len(scores)} tokens of {chunk.num_tokens}")
            return scores

        return await self._engines.each("verify", version, score)

    async def _test_no_op(self, manifest: WeightManifest, answer: _Answer) -> None:
        """Load what is loaded already; the engine's logprobs must stay as they are."""
        before = await self._score(manifest.version)
        await self._load(manifest)
        after = await self._score(manifest.version)
        for engine, first, second in zip(self._engines.engines, before, after, strict=True):
            fault = self._canary.reload_fault(first, second, answer.logprobs)
            if fault is not None:
                where = f"sync {manifest.version}: self-test on {engine.name}"
                raise WeightSyncError(f"{where}: {fault}")

    def _remember(
        self,
        version: PolicyVersion,
        verdicts: Sequence[Verdict],
        answer: _Answer,
        *,
        unchanged: bool,
    ) -> None:
        """What this sync taught the canary; an alarm when it has told nothing for long."""
        self._canary.settle(verdicts, answer.logprobs, unchanged=unchanged)
        self._canary.adopt(answer.next_probe)
        undecided, bound = self._canary.num_undecided, self._config.max_undecided
        if undecided and undecided % bound == 0:
            self._tracker.warn(
                f"the last {undecided} weight syncs up to {version} moved the probe's logprobs by "
                "less than the engine's noise, so old and new weights cannot be told apart. Do "
                "optimizer steps change the weights (learning rate, grad_norm)?"
            )

    def _metrics(self, manifest: WeightManifest, verdicts: Sequence[Verdict]) -> dict[str, float]:
        metrics = {f"sync/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        metrics["sync/bytes"] = float(manifest.num_bytes)
        if verdicts:
            metrics["sync/undecided"] = float(self._canary.num_undecided)
            metrics["sync/canary_abs_mean"] = max(v.distance for v in verdicts)
        return metrics


def _delete_old(parent: Path, policy: str, *, keep: int) -> None:
    """Delete all but the newest `keep` publications of a policy."""
    pattern = re.compile(re.escape(policy) + r"-\d+-\d+")
    found = sorted(folder for folder in parent.iterdir() if pattern.fullmatch(folder.name))
    for folder in found[:-keep]:
        shutil.rmtree(folder)
