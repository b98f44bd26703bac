"""TrajectoryPool: from admitted draws to batches.

Stands between the rollout runner and the trainer: `admit` bounds what may start, `end_rollout`
stores, annotates and groups what has ended, `take` hands out batches, `activate` frees slots. One
mechanism serves all modes: `sync` is a staleness threshold of zero.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from nexrl.errors import DeadlineError, InvariantError, PoolClosedError
from nexrl.pool.admission import SlotQueue, may_admit
from nexrl.pool.arrivals import Arrivals, Versions
from nexrl.pool.door import pushed_record
from nexrl.pool.dynamic_sampling import DynamicSampling, OnExhausted
from nexrl.pool.group_rules import FilterFailedError, GroupRules
from nexrl.pool.group_window import GroupWindow, HandedOut
from nexrl.pool.ledger import Ledger, Outcome
from nexrl.pool.open_group import OpenGroup
from nexrl.pool.pool_metrics import PoolMetrics
from nexrl.pool.record_keeper import RecordKeeper
from nexrl.pool.trajectory_store import TrajectoryStore
from nexrl.protocols import Annotator, GroupFilter, Tracker
from nexrl.types import Batch, Draw, LedgerSnapshot, RolloutRecord, Trajectory

STATE_SCHEMA: Final = 1


class TrajectoryPool:
    """Invariants: the ledger balances after every change; no batch holds a trained token older than
    the staleness threshold; every admitted rollout ends in exactly one outcome; batches consist of
    whole groups, in `sync` in admission order whatever the order of arrival.
    """

    def __init__(
        self,
        *,
        policy: str,
        batch_size: int,
        rollout_repeat_n: int,
        tracker: Tracker,
        mode: Literal["sync", "batch-async", "sample-async"] = "sync",
        staleness_threshold: int = 0,
        hand_out: Literal["fifo", "windowed"] = "fifo",
        window: int = 1,
        on_bound: Literal["wait", "cancel"] = "wait",
        min_group_size: int | None = None,
        filters: Sequence[GroupFilter] = (),
        refill_factor: float = 0.0,
        on_exhausted: OnExhausted = "train_short",
        needs: Sequence[str] = (),
        annotators: Sequence[Annotator] = (),
        store: TrajectoryStore | None = None,
        store_on_error: Literal["stop", "continue"] = "stop",
        first_version: int = 0,
        incarnation: int = 0,
        take_deadline_s: float = 3600.0,
        allow_mixed_prompts: bool = True,
    ) -> None:
        self._policy = policy
        self._batch_size = batch_size
        self._group_size = rollout_repeat_n
        self._threshold = staleness_threshold
        self._on_bound = on_bound
        self._incarnation = incarnation
        self._take_deadline_s = take_deadline_s
        self._rules = GroupRules(
            min_group_size=min_group_size,
            allow_mixed_prompts=allow_mixed_prompts,
            filters=tuple(filters),
        )
        self._sampling = DynamicSampling(
            batch_size=batch_size,
            refill_factor=refill_factor,
            on_exhausted=on_exhausted,
            tracker=tracker,
        )
        self._keeper = RecordKeeper(store, policy=policy, on_error=store_on_error, tracker=tracker)
        self._ledger = Ledger()
        self._metrics = PoolMetrics()
        self._versions = Versions(first_version, first_version, first_version)
        self._arrivals = Arrivals(
            policy=policy,
            incarnation=incarnation,
            is_sync=mode == "sync",
            versions=self._versions,
            annotators=annotators,
            needs=needs,
            ledger=self._ledger,
            keeper=self._keeper,
            metrics=self._metrics,
            tracker=tracker,
        )
        self._window = GroupWindow(
            batch_size=batch_size,
            num_batches=window if hand_out == "windowed" else 1,
            threshold=staleness_threshold,
            wait_for_bound=on_bound == "wait",
        )
        self._slots = SlotQueue(self._has_slot)
        self._out: dict[int, HandedOut] = {}
        self._dropped: list[OpenGroup] = []
        self._settled: list[str] = []
        self._next_admission = 0
        self._next_batch_id = 0
        self._num_trained_batches = 0
        self._taker: asyncio.Future[None] | None = None
        self._is_closed = False

    async def admit(self, draw: Draw) -> None:
        """Wait for a slot and open the draw's group; first come, first served.

        Woken by activation or by a group that ends untrained. It has no deadline of its own: how
        long it waits is how long the trainer and the weight sync take, and theirs end the run.
        """
        self._refuse_when_closed()
        if draw.key in self._arrivals:
            raise InvariantError(f"draw {draw.key} was admitted before")
        await self._slots.acquire()
        self._open(draw, size=self._group_size)

    def activate(self, version: int) -> None:
        """`version` is now the lowest that any replica serves: its slots are free."""
        self._versions.activate(version)
        self._slots.wake()

    def close_source(self) -> None:
        """No further draw will be admitted; the last batch may be short."""
        self._window.is_final = True
        self._slots.refuse()
        self._wake_taker()

    def _has_slot(self) -> bool:
        num_batches = self._num_trained_batches + len(self._out)
        return may_admit(
            started=num_batches * self._batch_size + len(self._window) + self._slots.num_reserved,
            active_version=self._versions.active - self._versions.base,
            threshold=self._threshold,
            batch_size=self._batch_size,
        )

    def _open(self, draw: Draw, *, size: int, is_pushed: bool = False) -> None:
        group = OpenGroup(
            draw=draw,
            policy=self._policy,
            size=size,
            admission=self._next_admission,
            admitted_version=self._versions.active,
            is_pushed=is_pushed,
        )
        self._next_admission += 1
        self._arrivals.open(group)
        self._window.append(group)
        self._ledger.admit(size)
        self._metrics.admitted(draw.source, size)

    def _refuse_when_closed(self) -> None:
        if self._is_closed or self._window.is_final:
            what = "the pool" if self._is_closed else "the source of draws"
            raise PoolClosedError(f"{what} is closed: nothing more is admitted")

    async def end_rollout(self, record: RolloutRecord) -> None:
        """A rollout has ended: store it, annotate it, and close its group when it is the last.

        The first end of a member counts; later ones (a late answer of an earlier attempt) are
        dropped and counted. Commits follow in the order of the calls, within
        store.commit_every_s: a mark of what became of a record is never durable before it.
        """
        group = await self._arrivals.end(record)
        if group is not None:
            self._close(group)

    async def push(self, trajectory: Trajectory) -> None:
        """Accept a trajectory that no draw asked for: a group of one, admitted on arrival.

        Returns when it is committed to the store.
        """
        self._refuse_when_closed()
        identity = trajectory.trajectory_id or f"{self._incarnation}.{self._next_admission}"
        draw = Draw(item_id=f"push/{identity}", draw=0, row={}, source="push")
        if draw.key in self._arrivals:
            self._arrivals.counts["duplicate_ends"] += 1
            return
        record = pushed_record(trajectory, draw.key)
        # Refused before it is admitted, so that nothing waits for it.
        self._arrivals.oldest_version(record)
        self._open(draw, size=1, is_pushed=True)
        self._ledger.beside["pushed"] += 1
        await self.end_rollout(record)
        await self._keeper.flush()

    def _close(self, group: OpenGroup) -> None:
        """All members have ended: the group is ready, or ends untrained."""
        self._arrivals.close(group)
        self._window.note_closed(group)
        self._metrics.mean("group/prompt_mismatch_share", float(group.has_mixed_prompts))
        try:
            reason = self._rules.reason_to_drop(group)
        except FilterFailedError as error:
            self._drop(group, "failed", error.reason)
            self._wake_taker()
            raise
        self._sampling.group_closed(reason)
        if reason is None:
            group.state = "ready"
        else:
            self._drop(group, "filtered", reason)
        self._metrics.mean("pool/kept_share", float(group.state == "ready"))
        self._wake_taker()

    def reject(self, group_key: str, reason: str) -> None:
        """Drop a group that is ready, as `filtered(reason)`; InvariantError when it is not ready."""
        group = next((g for g in self._window if g.draw.key == group_key), None)
        if group is None or group.state != "ready":
            state = group.state if group else "not open"
            raise InvariantError(f"group {group_key} cannot be rejected: it is {state}")
        self._drop(group, "filtered", reason)
        self._wake_taker()

    def _drop(self, group: OpenGroup, outcome: Outcome, reason: str) -> None:
        """A closed group ends untrained. Within the budget its slot frees at once for another one;
        beyond it the group keeps its place, so that its batch closes short. A stale group is always
        replaced: the batch that refused it must still be filled (FR-119)."""
        self._end_untrained(group, outcome, reason)
        if outcome == "stale" or self._sampling.may_replace():
            self._window.remove(group)
            self._slots.wake()

    def _end_untrained(self, group: OpenGroup, outcome: Outcome, reason: str) -> None:
        kept = group.move(self._ledger, outcome, reason)
        self._keeper.outcome(kept, outcome, reason, version=self._versions.active)
        self._metrics.dropped(kept)
        for member in kept:
            member.record = None
        self._dropped.append(group)

    async def take(self, *, version: int) -> Batch | None:
        """Wait for the batch that `version` consumes; None when the source is closed and nothing is
        left. Its groups may be none at all when every one was dropped.

        Woken by the end of a group. DeadlineError names the members that are still missing.
        """
        if self._taker is not None:
            raise InvariantError("two callers wait for a batch")
        if version < self._versions.active:
            raise InvariantError(
                f"version {version} takes a batch, but {self._versions.active} is active"
            )
        try:
            async with asyncio.timeout(self._take_deadline_s):
                while (batch := self._next_batch(version)) is None:
                    if self._window.is_exhausted:
                        return None
                    self._taker = asyncio.get_running_loop().create_future()
                    await self._taker
        except TimeoutError:
            raise DeadlineError(
                f"no batch for version {version} after {self._take_deadline_s} s: "
                f"{self._window.describe_wait()}"
            ) from None
        finally:
            self._taker = None
        return batch

    def mark_trained(self, batch: Batch) -> None:
        """The publish that ends the batch is done."""
        out = self._pop_out(batch)
        trained = [group for group in out.groups if group.state == "handed_out"]
        for group in trained:
            members = group.move(self._ledger, "trained")
            self._keeper.outcome(members, "trained", "", version=batch.version)
        self._num_trained_batches += 1
        self._settled += [g.draw.key for g in (*out.dropped, *trained) if not g.is_pushed]
        self._metrics.trained(batch)
        self._keeper.ledger(self._ledger.snapshot(), version=batch.version)

    def release(self, batch: Batch) -> None:
        """The batch was not trained: its groups are ready again, in their old places."""
        out = self._pop_out(batch)
        for group in out.groups:
            if group.state == "handed_out":
                group.move(self._ledger, "ready")
        self._window.put_back(out.groups)
        self._dropped[:0] = out.dropped
        self._sampling.put_back(out.refills)
        self._wake_taker()

    def drain_settled(self) -> list[str]:
        """Draw keys of groups that have ended for good since the last call: those trained, and
        those dropped on the way to a trained batch. A loader may mark them as consumed; all other
        draws are drawn again after a resume."""
        settled, self._settled = self._settled, []
        return settled

    def _next_batch(self, version: int) -> Batch | None:
        """The batch for `version`, or None while it cannot be made."""
        if self._is_closed:
            raise PoolClosedError("the pool is closed: no batch is handed out")
        while chosen := self._window.choose(version):
            if not self._drop_stale(chosen, version) and not self._skips(chosen):
                return self._hand_out(chosen, version)
        return None

    def _drop_stale(self, groups: Sequence[OpenGroup], version: int) -> bool:
        """The last check: no trained token is older than the bound. Whether one was."""
        bound = version - self._threshold
        stale = [g for g in groups if g.state == "ready" and g.oldest_version < bound]
        for group in stale:
            reason = (
                f"version {group.oldest_version} consumed at {version}, bound {self._threshold}"
            )
            if self._on_bound == "wait" and not group.is_pushed:
                raise InvariantError(
                    f"group {group.draw.key} is stale: {reason}; it was admitted as number "
                    f"{group.admission} at version {group.admitted_version}, batch size "
                    f"{self._batch_size}, first version {self._versions.base}"
                )
            self._drop(group, "stale", reason)
        return bool(stale)

    def _skips(self, groups: Sequence[OpenGroup]) -> bool:
        """Whether the batch is short, its refill budget spent, and another one is begun instead."""
        num_kept = sum(group.state == "ready" for group in groups)
        if num_kept == len(groups):
            return False
        if self._sampling.act_on_short(num_kept, batch_id=self._next_batch_id) != "skip":
            return False
        for group in groups:
            if group.state == "ready":
                self._end_untrained(group, "filtered", "batch_skipped")
            self._window.remove(group)
        self._sampling.start_over()
        self._slots.wake()
        return True

    def _hand_out(self, groups: Sequence[OpenGroup], version: int) -> Batch:
        kept = [group for group in groups if group.state == "ready"]
        for group in groups:
            self._window.remove(group)
        for group in kept:
            group.move(self._ledger, "handed_out")
        batch = Batch(
            batch_id=self._next_batch_id,
            policy=self._policy,
            version=version,
            groups=tuple(group.to_rollout_group() for group in kept),
            num_expected_groups=self._batch_size,
        )
        self._out[batch.batch_id] = HandedOut(
            groups=tuple(groups),
            dropped=tuple(self._dropped),
            refills=self._sampling.handed_out(),
        )
        self._metrics.handed_out(kept, version)
        self._dropped = []
        self._next_batch_id += 1
        self._versions.newest = max(self._versions.newest, version + 1)
        return batch

    def _pop_out(self, batch: Batch) -> HandedOut:
        out = self._out.pop(batch.batch_id, None)
        if out is None:
            raise InvariantError(
                f"batch {batch.batch_id} is not handed out (handed out: {sorted(self._out)})"
            )
        return out

    def _wake_taker(self) -> None:
        """Once there is something for it: a batch, the end of all draws, or the end of the pool."""
        if self._taker is None or self._taker.done():
            return
        if self._is_closed or self._window.may_choose() or self._window.is_exhausted:
            self._taker.set_result(None)

    @property
    def ledger(self) -> LedgerSnapshot:
        """Rollouts by outcome."""
        return self._ledger.snapshot()

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call; `ledger/*` and counts are of the whole stage."""
        counts = {
            **self._arrivals.counts,
            **self._ledger.beside,
            "open_groups": len(self._window),
            "closed_groups": self._window.num_closed,
        }
        return {
            **self._metrics.flush(self._ledger.snapshot()),
            **{f"pool/{name}": float(count) for name, count in counts.items()},
            **self._sampling.counts(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Counters of what has ended for good. Groups in flight, ready or handed out, and those
        dropped on the way to a batch not yet trained, are left out: their draws are not consumed
        (`not_consumed` lists them) and are drawn again, so that resuming equals not stopping."""
        groups = [*self._window, *(g for out in self._out.values() for g in out.groups)]
        dropped = [*self._dropped, *(g for out in self._out.values() for g in out.dropped)]
        again = [*dropped, *(group for group in groups if group.state != "dropped")]
        again.sort(key=lambda group: group.admission)
        members = [member for group in again for member in group.members]
        return {
            "schema": STATE_SCHEMA,
            "policy": self._policy,
            "version": self._versions.base + self._num_trained_batches,
            "next_batch_id": self._next_batch_id - len(self._out),
            "not_consumed": [group.draw.key for group in again],
            "ledger": self._ledger.to_state((m.outcome, m.reason) for m in members),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; only before anything was admitted.

        Counting starts anew at the saved version, so capacity is what an empty pool has (FR-118).
        """
        if state["schema"] != STATE_SCHEMA or state["policy"] != self._policy:
            raise InvariantError(
                f"pool state of schema {state['schema']} and policy {state['policy']!r} cannot be "
                f"loaded into one of schema {STATE_SCHEMA} and policy {self._policy!r}"
            )
        if self._next_admission:
            raise InvariantError("pool state must be loaded before the first draw is admitted")
        self._ledger.load_state(state["ledger"])
        versions = self._versions
        versions.base = versions.active = versions.newest = int(state["version"])
        self._next_batch_id = int(state["next_batch_id"])
        self._keeper.roll_back(version=versions.base)

    async def flush(self) -> None:
        """Return once everything that has happened so far is committed; for checkpoints."""
        await self._keeper.flush()

    async def aclose(self) -> None:
        """End all waits with PoolClosedError and commit what was stored; the store stays open for
        whoever made it. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._slots.refuse()
        self._wake_taker()
        await self._keeper.flush()
