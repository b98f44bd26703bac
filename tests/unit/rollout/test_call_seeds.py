"""Every inference call has a seed that depends on what it is, not on when it happens."""

from __future__ import annotations

from typing import Any

from nexrl.errors import ServiceError
from nexrl.rollout.rollout_worker import RolloutWorker
from nexrl.rollout.single_turn import SingleTurnWorker
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.makers import make_draw
from nexrl.types import Completion, Prompt, Sampling, Trajectory, derive_seed


class Listening(InstantInference):
    """Keeps the sampling parameters of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Sampling] = []

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = "actor"
    ) -> list[Completion]:
        self.calls.append(sampling)
        return await super().generate(prompt, sampling=sampling, n=n, policy=policy)


async def two_calls(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
    await worker.generate("a", n=2)
    return (await worker.generate("b"))[0].to_trajectory()


async def seeds_of(make_rollouts: Any, context: Any, step: Any = two_calls, **fields: Any) -> Any:
    await make_rollouts(step, context=context, **fields).run(make_draw("i", draw=4))
    return [s.seeds for s in context.inference.calls]


async def test_seed_is_derived_from_run_policy_item_draw_member_call_and_choice(
    make_rollouts: Any, make_context: Any
) -> None:
    seeds = await seeds_of(make_rollouts, make_context(inference=Listening()))
    first = (7, "actor", "i", 4, 0, 0)
    assert seeds == [
        (derive_seed(*first, 0), derive_seed(*first, 1)),
        (derive_seed(7, "actor", "i", 4, 0, 1),),
    ]


async def test_a_retry_draws_with_the_same_seeds(make_rollouts: Any, make_context: Any) -> None:
    attempts: list[int] = []

    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        trajectory = await two_calls(worker, item)
        attempts.append(1)
        if len(attempts) == 1:
            raise ServiceError("lost after two calls")
        return trajectory

    seeds = await seeds_of(make_rollouts, make_context(inference=Listening()), step)
    assert seeds[:2] == seeds[2:]


async def test_members_draw_with_different_seeds(make_rollouts: Any, make_context: Any) -> None:
    """FR-058."""
    context = make_context(inference=Listening())
    seeds = await seeds_of(make_rollouts, context, num_rollouts=8)
    assert len(set(seeds)) == 16


class TwoReplicas(Listening):
    """Sends calls in turn to two engines that were started with one seed."""

    def __init__(self) -> None:
        super().__init__()
        self._replicas = (InstantInference(seed=1234), InstantInference(seed=1234))

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = "actor"
    ) -> list[Completion]:
        self.calls.append(sampling)
        replica = self._replicas[len(self.calls) % 2]
        return await replica.generate(prompt, sampling=sampling, n=n, policy=policy)


async def test_two_replicas_of_one_seed_draw_differently_for_the_same_prompt(
    make_rollouts: Any, make_context: Any
) -> None:
    """FR-058: the seed is that of the call, whoever serves it; a request is copied, never changed."""
    context = make_context(inference=TwoReplicas())
    records = await make_rollouts(SingleTurnWorker, context=context, num_rollouts=2).run()
    first, second = (r.trajectories[0].rows[0] for r in records)
    assert first.token_ids[:4].tolist() == second.token_ids[:4].tolist()
    assert first.token_ids.tolist() != second.token_ids.tolist()
    assert (context.sampling.seed, context.sampling.seeds) == (None, ())


async def test_a_workers_own_seed_is_respected(make_rollouts: Any, make_context: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        return (await worker.generate("a", seed=3))[0].to_trajectory()

    context = make_context(inference=Listening())
    await seeds_of(make_rollouts, context, step)
    assert (context.inference.calls[0].seed, context.inference.calls[0].seeds) == (3, ())


async def test_provenance_has_the_last_sampling_the_first_seed_and_a_segment_for_each_call(
    make_rollouts: Any, make_context: Any
) -> None:
    rollouts = make_rollouts(two_calls, context=make_context(inference=Listening(), engine="e 1"))
    (record,) = await rollouts.run()
    provenance = record.trajectories[0].provenance
    assert provenance.seed == derive_seed(7, "actor", "i0", 0, 0, 0, 0)
    assert provenance.sampling.seeds == (derive_seed(7, "actor", "i0", 0, 0, 1),)
    assert [s.kind for s in provenance.segments] == ["inference", "inference"]
    assert provenance.engine == "e 1"
    assert provenance.started_s <= provenance.segments[0].queued_s <= provenance.finished_s


async def test_unknown_sampling_parameter_is_refused_by_name(make_rollouts: Any) -> None:
    async def step(worker: RolloutWorker, item: dict[str, Any]) -> Trajectory:
        return (await worker.generate("a", max_token=3))[0].to_trajectory()

    (record,) = await make_rollouts(step).run()
    assert "got max_token=3; sampling parameters are max_tokens" in record.failure.message
