"""All engines of a policy under one hand: one call to each, at once, within a deadline.

Every failure comes back as a WeightSyncError that names phase, engine and version, with the
engine's own text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from nexrl.errors import DeadlineError, NexRLError, WeightSyncError, innermost_cause
from nexrl.services.inference.protocol import EngineControl
from nexrl.types import PolicyVersion, WeightManifest

T = TypeVar("T")
ChecksumRule = Literal["required", "if_echoed", "ignored"]


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

    def __init__(self, controls: Sequence[EngineControl], *, control_deadline_s: float) -> None:
        self.engines = [Engine(c, f"engine {i}") for i, c in enumerate(controls)]
        self._deadline_s = control_deadline_s

    async def learn_names(self, version: PolicyVersion) -> None:
        """Add the engine's own name to `engine 0`, `engine 1` ..."""
        infos = await self.each("info", version, lambda e: e.control.info())
        for index, (engine, info) in enumerate(zip(self.engines, infos, strict=True)):
            engine.name = f"engine {index} ({info.name} {info.build})"

    async def pause(self, version: PolicyVersion) -> None:
        """Stop drawing everywhere; a running request would need its cache anew (FR-106)."""
        await self.each("pause", version, lambda e: e.control.pause("recompute"))

    async def load(
        self, manifest: WeightManifest, *, checksum: ChecksumRule, deadline_s: float
    ) -> None:
        """Load everywhere; the acknowledgement must name the version and match its checksum."""

        async def load_one(engine: Engine) -> None:
            engine.in_doubt = True
            ack = await engine.control.load_weights(manifest)
            if ack.version != manifest.version:
                raise WeightSyncError(f"acknowledged version {ack.version}")
            if not ack.checksum and checksum == "required":
                raise WeightSyncError(
                    "echoes no checksum, so weight.verify: checksum proves nothing (accepted: full)"
                )
            if checksum != "ignored" and ack.checksum not in ("", manifest.checksum):
                raise WeightSyncError(
                    f"holds weights that hash to {ack.checksum}, the manifest says "
                    f"{manifest.checksum}"
                )

        await self.each("load", manifest.version, load_one, deadline_s=deadline_s)

    async def activate(self, version: PolicyVersion) -> None:
        """Stamp tokens with this version everywhere."""
        await self.each("activate", version, lambda e: e.control.activate(version))
        for engine in self.engines:
            engine.in_doubt = False

    async def resume(self, version: PolicyVersion) -> None:
        """Draw tokens again everywhere."""
        await self.each("resume", version, lambda e: e.control.resume())

    async def retreat(
        self, previous: WeightManifest | None, *, checksum: ChecksumRule, deadline_s: float
    ) -> list[str]:
        """After a failed sync: engines go back to the previous version, or stay paused.

        Returns a line for each engine that stays paused. Resuming one whose weights are in doubt
        would draw tokens under a wrong version, so it is resumed only once it is verified back.
        """
        paused: list[str] = []
        for engine in self.engines:
            alone = EngineSet((), control_deadline_s=self._deadline_s)
            alone.engines = [engine]
            try:
                if not engine.answering:
                    raise WeightSyncError("it did not answer")
                if engine.in_doubt:
                    if previous is None:
                        raise WeightSyncError("no earlier version was verified")
                    await alone.load(previous, checksum=checksum, deadline_s=deadline_s)
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
        deadline = self._deadline_s if deadline_s is None else deadline_s
        results = await asyncio.gather(
            *(self._call(phase, version, engine, call, deadline) for engine in self.engines),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    @staticmethod
    async def _call(
        phase: str,
        version: PolicyVersion,
        engine: Engine,
        call: Callable[[Engine], Awaitable[T]],
        deadline_s: float,
    ) -> T:
        where = f"sync {version}: {phase} on {engine.name}"
        try:
            async with asyncio.timeout(deadline_s):
                return await call(engine)
        except (TimeoutError, DeadlineError) as error:
            engine.answering = False
            own = f" ({error})" if str(error) else ""
            raise WeightSyncError(f"{where}: no answer within {deadline_s:g} s{own}") from error
        except NexRLError as error:
            raise WeightSyncError(f"{where}: {error}") from error
        except Exception as error:
            cause = innermost_cause(error)
            raise WeightSyncError(f"{where}: {type(cause).__name__}: {cause}") from error
