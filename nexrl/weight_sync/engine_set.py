"""All engines of a policy under one hand: one call to each, at once, within a deadline.

Every failure comes back as a WeightSyncError that names phase, engine and version, with the
engine's own text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nexrl.config.schema import WeightConfig
from nexrl.errors import DeadlineError, NexRLError, WeightSyncError, innermost_cause
from nexrl.services.inference.protocol import EngineControl
from nexrl.types import LoadAck, PolicyVersion, WeightManifest

T = TypeVar("T")


@dataclass(slots=True)
class Engine:
    """One engine and what is known of it."""

    control: EngineControl
    name: str
    in_doubt: bool = False
    """A load was attempted since the last activation: what it holds is not known."""
    answering: bool = True
    """False once a call to it has reached its deadline."""


class EngineSet:
    """Engines that always hold one version together.

    Invariant: `in_doubt` is set before a load is attempted and cleared only when every engine has
    activated a verified version, or this one was verified back on the previous.
    """

    def __init__(self, controls: Sequence[EngineControl], config: WeightConfig) -> None:
        self.engines = [Engine(c, f"engine {i}") for i, c in enumerate(controls)]
        self._config = config

    async def learn_names(self, version: PolicyVersion) -> None:
        """Add the engine's own name to `engine 0`, `engine 1` ..."""
        infos = await self.each("info", version, lambda e: e.control.info())
        for index, (engine, info) in enumerate(zip(self.engines, infos, strict=True)):
            engine.name = f"engine {index} ({info.name} {info.build})"

    async def pause(self, version: PolicyVersion) -> None:
        """Stop drawing everywhere; a running request would need its cache anew (FR-106)."""
        await self.each("pause", version, lambda e: e.control.pause("recompute"))

    async def load(self, manifest: WeightManifest) -> None:
        """Load everywhere; the acknowledgement must name the version and match its checksum."""

        async def load_one(engine: Engine) -> None:
            engine.in_doubt = True
            _check_ack(await engine.control.load_weights(manifest), manifest, self._config.verify)

        deadline_s = self._config.load_deadline_s
        await self.each("load", manifest.version, load_one, deadline_s=deadline_s)

    async def activate(self, version: PolicyVersion) -> None:
        """Stamp tokens with this version everywhere."""
        await self.each("activate", version, lambda e: e.control.activate(version))
        for engine in self.engines:
            engine.in_doubt = False

    async def resume(self, version: PolicyVersion) -> None:
        """Draw tokens again everywhere."""
        await self.each("resume", version, lambda e: e.control.resume())

    async def retreat(self, previous: WeightManifest | None) -> list[str]:
        """After a failed sync: engines go back to the previous version, or stay paused.

        Returns a line for each engine that stays paused. Resuming one whose weights are in doubt
        would draw tokens under a wrong version, so it is resumed only once it is verified back.
        """
        paused: list[str] = []
        for engine in self.engines:
            alone = EngineSet((), self._config)
            alone.engines = [engine]
            try:
                if not engine.answering:
                    raise WeightSyncError("it did not answer")
                if engine.in_doubt:
                    if previous is None:
                        raise WeightSyncError("no earlier version was verified")
                    await alone.load(previous)
                    await alone.activate(previous.version)
                await alone.resume(previous.version if previous else PolicyVersion())
            except WeightSyncError as error:
                paused.append(f"{engine.name} stays paused, its weights are in doubt: {error}")
        return paused

    async def each(
        self,
        phase: str,
        version: PolicyVersion,
        call: Callable[[Engine], Awaitable[T]],
        *,
        deadline_s: float | None = None,
    ) -> list[T]:
        """One call to every engine at once; all have ended when the first failure is raised."""

        async def call_one(engine: Engine) -> T:
            where = f"sync {version}: {phase} on {engine.name}"
            try:
                return await within(
                    deadline_s or self._config.verify_deadline_s, where, call(engine)
                )
            except WeightSyncError as error:
                if isinstance(error.__cause__, TimeoutError | DeadlineError):
                    engine.answering = False
                raise

        calls = [asyncio.ensure_future(call_one(engine)) for engine in self.engines]
        await asyncio.gather(*calls, return_exceptions=True)
        return [call.result() for call in calls]


async def within(deadline_s: float, where: str, call: Awaitable[T]) -> T:
    """The call's answer; a failure or a missed deadline is a WeightSyncError that says where."""
    try:
        async with asyncio.timeout(deadline_s):
            return await call
    except (TimeoutError, DeadlineError) as error:
        own = f" ({error})" if str(error) else ""
        raise WeightSyncError(f"{where}: no answer within {deadline_s:g} s{own}") from error
    except NexRLError as error:
        raise WeightSyncError(f"{where}: {error}") from error
    except Exception as error:
        cause = innermost_cause(error)
        raise WeightSyncError(f"{where}: {type(cause).__name__}: {cause}") from error


def _check_ack(ack: LoadAck, manifest: WeightManifest, verify: str) -> None:
    """`verify` is `weight.verify`: whether a checksum is needed, compared if there, or ignored."""
    if ack.version != manifest.version:
        raise WeightSyncError(f"acknowledged version {ack.version}")
    if not ack.checksum and verify == "checksum":
        raise WeightSyncError(
            "echoes no checksum, so weight.verify: checksum proves nothing (accepted: full)"
        )
    if verify != "off" and ack.checksum not in ("", manifest.checksum):
        raise WeightSyncError(
            f"holds weights that hash to {ack.checksum}, the manifest says {manifest.checksum}"
        )
