"""The greedy baseline: one draw for the whole group, and what its failure means."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nexrl.errors import ConfigError, ServiceError
from nexrl.rollout.single_turn import SingleTurnWorker
from nexrl.services.reward.local import make_reward_service
from nexrl.services.reward.signature import instant
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.makers import make_draw
from nexrl.testing.virtual_time import virtual_time
from nexrl.types import Completion, Prompt, Sampling, TrajectoryStatus, derive_seed


class Engine(InstantInference):
    """Answers at once but may refuse greedy calls, or never answer them."""

    def __init__(self, *, num_refusals: int = 0, hangs: bool = False) -> None:
        super().__init__()
        self.greedy: list[Sampling] = []
        self.sampled: list[Sampling] = []
        self._num_refusals = num_refusals
        self._hangs = hangs

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = "actor"
    ) -> list[Completion]:
        if sampling.temperature > 0:
            self.sampled.append(sampling)
            return await super().generate(prompt, sampling=sampling, n=n, policy=policy)
        self.greedy.append(sampling)
        await asyncio.sleep(1e9 if self._hangs else 1.0)
        if len(self.greedy) <= self._num_refusals:
            raise ServiceError("greedy call refused", status=500)
        return await super().generate(prompt, sampling=sampling, n=n, policy=policy)


@instant
def first_token(completion: str) -> float:
    return float(completion.split()[0])


@pytest.fixture
def make_greedy(make_context: Any) -> Any:
    """A context that asks for the baseline; the reward is the first token drawn."""

    def make(engine: Engine, function: Any = first_token, **fields: Any) -> Any:
        reward = make_reward_service(function, contract="f", arguments={})
        return make_context(inference=engine, reward=reward, greedy_baseline=True, **fields)

    return make


async def run(make_rollouts: Any, context: Any, n: int = 4, **fields: Any) -> Any:
    return await make_rollouts(SingleTurnWorker, context=context, num_rollouts=n, **fields).run()


def greedy_rewards(records: Any) -> set[float]:
    return {t.extra["greedy_reward"] for r in records for t in r.trajectories}


@virtual_time
async def test_a_group_draws_one_greedy_completion_and_shares_its_reward(
    make_rollouts: Any, make_greedy: Any
) -> None:
    engine = Engine()
    records = await run(make_rollouts, make_greedy(engine))
    (greedy,) = await engine.generate(
        Prompt(token_ids=records[0].trajectories[0].rows[0].token_ids[:4]),
        sampling=Sampling(max_tokens=16, temperature=0.0),
    )
    assert len(engine.sampled) == 4
    assert len(engine.greedy) == 1 + 1
    assert greedy_rewards(records) == {first_token(greedy.text)}
    assert len({t.reward for r in records for t in r.trajectories}) > 1
    assert records[0].trajectories[0].metrics == {"greedy_reward": first_token(greedy.text)}


@virtual_time
async def test_the_baseline_has_a_seed_of_its_own_and_changes_no_members_seed(
    make_rollouts: Any, make_greedy: Any, make_context: Any
) -> None:
    engine, plain = Engine(), Engine()
    await run(make_rollouts, make_greedy(engine))
    await run(make_rollouts, make_context(inference=plain))
    assert [s.seeds for s in engine.sampled] == [s.seeds for s in plain.sampled]
    assert engine.greedy[0].seeds == (derive_seed(7, "actor", "i0", 0, -1, 0),)
    assert plain.greedy == []


@virtual_time
async def test_its_calls_count_once_among_those_of_the_member_that_began_it(
    make_rollouts: Any, make_greedy: Any
) -> None:
    records = await run(make_rollouts, make_greedy(Engine()))
    records.sort(key=lambda r: r.member)
    segments = [r.trajectories[0].provenance.segments for r in records]
    plain = ["inference", "reward"]
    assert [[s.kind for s in each] for each in segments] == [plain * 2, plain, plain, plain]
    assert [s.finished_s for s in segments[0]] == [0.0, 0.0, 1.0, 1.0]


@virtual_time
async def test_a_draw_that_comes_again_after_a_resume_has_the_same_baseline(
    make_rollouts: Any, make_greedy: Any
) -> None:
    first, again = Engine(), Engine()
    before = await run(make_rollouts, make_greedy(first))
    after = await run(make_rollouts, make_greedy(again))
    assert greedy_rewards(before) == greedy_rewards(after)
    assert first.greedy == again.greedy


@virtual_time
async def test_a_baseline_that_fails_once_is_drawn_once_more_for_all_members(
    make_rollouts: Any, make_greedy: Any
) -> None:
    engine = Engine(num_refusals=1)
    records = await run(make_rollouts, make_greedy(engine))
    assert len(engine.greedy) == 2
    assert {(r.status, r.attempts) for r in records} == {(TrajectoryStatus.COMPLETED, 2)}
    assert len(greedy_rewards(records)) == 1


@virtual_time
async def test_a_baseline_that_keeps_failing_fails_the_members_as_infrastructure(
    make_rollouts: Any, make_greedy: Any
) -> None:
    engine = Engine(num_refusals=99)
    records = await run(make_rollouts, make_greedy(engine))
    assert len(engine.greedy) == 3
    assert {r.reason for r in records} == {"infrastructure/ServiceError"}
    assert {(r.failure.where, r.trajectories) for r in records} == {("inference", ())}


@virtual_time
async def test_a_baseline_past_the_deadline_fails_the_members_as_infrastructure(
    make_rollouts: Any, make_greedy: Any
) -> None:
    engine = Engine(hangs=True)
    records = await run(make_rollouts, make_greedy(engine), deadline_s=60.0)
    assert {r.reason for r in records} == {"infrastructure/DeadlineError"}
    assert {r.duration_s for r in records} == {60.0}
    assert len(asyncio.all_tasks()) == 1


@virtual_time
async def test_a_reward_function_that_raises_on_it_is_named_and_never_a_zero(
    make_rollouts: Any, make_greedy: Any
) -> None:
    @instant
    def picky(completion: str) -> float:
        calls.append(completion)
        if len(calls) == 5:
            raise KeyError("greedy")
        return 1.0

    calls: list[str] = []
    records = await run(make_rollouts, make_greedy(Engine(), picky))
    assert {(r.reason, r.failure.where) for r in records} == {("user_code/KeyError", "reward")}
    assert [r.trajectories for r in records] == [()] * 4


@virtual_time
async def test_a_baseline_that_abstains_leaves_the_key_out(
    make_rollouts: Any, make_greedy: Any
) -> None:
    @instant
    def abstains(completion: str) -> None:
        return None

    records = await run(make_rollouts, make_greedy(Engine(), abstains))
    assert [(r.status, dict(r.trajectories[0].extra)) for r in records] == [("completed", {})] * 4


@virtual_time
async def test_a_member_that_fails_alone_leaves_the_baseline_to_its_siblings(
    make_rollouts: Any, make_greedy: Any
) -> None:
    """The member that began it is the one that fails."""

    @instant
    def first_raises(completion: str) -> float:
        calls.append(completion)
        if len(calls) == 1:
            raise KeyError("first")
        return 1.0

    calls: list[str] = []
    records = await run(make_rollouts, make_greedy(Engine(), first_raises))
    assert [r.status for r in records] == ["failed", "completed", "completed", "completed"]
    assert greedy_rewards(records) == {1.0}


@virtual_time
async def test_a_cancelled_group_leaves_no_greedy_call_behind(
    make_rollouts: Any, make_greedy: Any
) -> None:
    rollouts = make_rollouts(
        SingleTurnWorker, context=make_greedy(Engine(hangs=True)), num_rollouts=2
    )
    group = asyncio.create_task(rollouts.runner.run_group(make_draw(), rollouts.on_end))
    await asyncio.sleep(10.0)
    group.cancel()
    await asyncio.wait([group])
    assert [r.status for r in rollouts.records] == ["cancelled", "cancelled"]
    assert len(asyncio.all_tasks()) == 1
    await rollouts.runner.aclose()


@virtual_time
async def test_members_that_all_fail_early_end_the_call_with_the_group(
    make_rollouts: Any, make_greedy: Any
) -> None:
    @instant
    def raises(completion: str) -> float:
        raise KeyError("always")

    engine = Engine(hangs=True)
    rollouts = make_rollouts(SingleTurnWorker, context=make_greedy(engine, raises), num_rollouts=2)
    await rollouts.runner.run_group(make_draw(), rollouts.on_end)
    await asyncio.sleep(0)
    assert [r.reason for r in rollouts.records] == ["user_code/KeyError"] * 2
    assert len(asyncio.all_tasks()) == 1
    await rollouts.runner.aclose()


@virtual_time
async def test_each_draw_has_its_own_baseline(make_rollouts: Any, make_greedy: Any) -> None:
    engine = Engine()
    rollouts = make_rollouts(SingleTurnWorker, context=make_greedy(engine), num_rollouts=2)
    await rollouts.run(make_draw(0), make_draw(1), make_draw(0, draw=1))
    assert len(engine.greedy) == 3
    assert len({s.seeds for s in engine.greedy}) == 3


def test_a_baseline_without_a_reward_function_is_refused(make_context: Any) -> None:
    with pytest.raises(ConfigError, match=r"greedy_baseline needs rollout_worker\.reward"):
        SingleTurnWorker(make_context(greedy_baseline=True))


@virtual_time
async def test_step_without_a_runner_has_a_baseline_too(make_greedy: Any) -> None:
    trajectory = await SingleTurnWorker(make_greedy(Engine())).step({"prompt": "2+2="})
    assert "greedy_reward" in trajectory.extra
