"""SingleTurnWorker: prompt or messages, one draw, one reward."""

from __future__ import annotations

from typing import Any

import pytest

from nexrl.config.schema import DataConfig
from nexrl.rollout.single_turn import SingleTurnWorker
from nexrl.services.reward.local import make_reward_service
from nexrl.testing.char_renderer import CharRenderer
from nexrl.testing.instant_inference import InstantInference
from nexrl.testing.makers import make_completion, make_draw
from nexrl.types import Completion, Prompt, Sampling


class Answering(InstantInference):
    """Answers every call with one given completion."""

    def __init__(self, completion: Completion) -> None:
        super().__init__()
        self._answer = completion

    async def generate(
        self, prompt: Prompt, *, sampling: Sampling, n: int = 1, policy: str = "actor"
    ) -> list[Completion]:
        return [self._answer] * n


def reward_of(function: Any) -> Any:
    return make_reward_service(function, contract="reward.py:f#1", arguments={})


async def rollout(make_rollouts: Any, context: Any, row: dict[str, Any], n: int = 1) -> Any:
    rollouts = make_rollouts(SingleTurnWorker, context=context, num_rollouts=n)
    return await rollouts.run(make_draw(row=row))


async def test_prompt_is_drawn_from_scored_and_kept_as_drawn(
    make_rollouts: Any, make_context: Any
) -> None:
    def scored(completion: str, answer: str) -> dict[str, float]:
        assert (completion, answer) == ("4", "4")
        return {"right": 1.0, "short": 0.5}

    context = make_context(inference=Answering(make_completion()), reward=reward_of(scored))
    (record,) = await rollout(make_rollouts, context, {"prompt": "2+2=", "answer": "4"})
    (trajectory,) = record.trajectories
    assert trajectory.reward == 1.5
    assert trajectory.reward_parts == {"right": 1.0, "short": 0.5}
    assert (trajectory.prompt, trajectory.response) == ("2+2=", "4")
    assert trajectory.rows[0].loss_mask.tolist() == [False, False, True, True, True]
    assert trajectory.provenance.reward_contract == "reward.py:f#1"
    assert trajectory.rollout_id == record.rollout_id


async def test_messages_are_rendered_with_the_chat_template(
    make_rollouts: Any, make_context: Any
) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}]}
    (record,) = await rollout(make_rollouts, make_context(), row)
    tokens = record.trajectories[0].rows[0].token_ids
    assert CharRenderer().decode(tokens).startswith("<user>hi\n<assistant>")


async def test_prompt_becomes_a_user_message_when_asked(
    make_rollouts: Any, make_context: Any
) -> None:
    context = make_context(config={"chat_template": True, "system_prompt": "Be brief."})
    (record,) = await rollout(make_rollouts, context, {"prompt": "hi"})
    tokens = record.trajectories[0].rows[0].token_ids
    assert CharRenderer().decode(tokens).startswith("<system>Be brief.\n<user>hi\n<assistant>")


async def test_a_group_tokenises_its_prompt_once_and_shares_it(
    make_rollouts: Any, make_context: Any
) -> None:
    """FR-049: all members start from the same prompt."""
    context = make_context()
    records = await rollout(make_rollouts, context, {"prompt": "2+2="}, n=8)
    assert context.renderer.num_calls == 1
    prompts = {tuple(r.trajectories[0].rows[0].token_ids[:4]) for r in records}
    assert len(prompts) == 1


async def test_other_column_names_come_from_the_configuration(
    make_rollouts: Any, make_context: Any
) -> None:
    """FR-073."""
    context = make_context(data=DataConfig(prompt_key="question"))
    (record,) = await rollout(make_rollouts, context, {"question": "2+2?"})
    assert record.trajectories[0].prompt == "2+2?"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"question": "2+2?"}, "neither column 'prompt' (data.prompt_key) nor 'messages'"),
        ({"question": "2+2?"}, "it has: question"),
        ({"prompt": 7}, "column 'prompt' must hold a string"),
        ({"messages": [{"content": "no role"}]}, "column 'messages' must hold a string or"),
        ({"prompt": ""}, "has no tokens"),
    ],
)
async def test_a_row_without_a_usable_prompt_is_named(
    make_rollouts: Any, make_context: Any, row: dict[str, Any], named: str
) -> None:
    """FR-073: missing fields, the expected schema, and how to map columns."""
    (record,) = await rollout(make_rollouts, make_context(), row)
    assert record.reason == "user_code/DataError"
    assert named in record.failure.message


async def test_messages_without_a_chat_template_say_so(
    make_rollouts: Any, make_context: Any
) -> None:
    context = make_context(renderer=CharRenderer(has_chat_template=False))
    row = {"messages": [{"role": "user", "content": "hi"}]}
    (record,) = await rollout(make_rollouts, context, row)
    assert record.reason == "configuration/ConfigError"
    assert "no chat template" in record.failure.message


@pytest.mark.parametrize(("max_tokens", "cause"), [(3, "length"), (16, "context")])
async def test_a_draw_that_ends_by_length_is_truncated_with_its_cause(
    make_rollouts: Any, make_context: Any, max_tokens: int, cause: str
) -> None:
    """FR-077: the finish reason is stored per call; one word from the last bit of context is no
    valid reply."""
    context = make_context(
        inference=Answering(make_completion(finish_reason="length")),
        sampling=Sampling(max_tokens=max_tokens),
    )
    (record,) = await rollout(make_rollouts, context, {"prompt": "2+2="})
    (trajectory,) = record.trajectories
    assert (record.status, trajectory.truncation_cause) == ("truncated", cause)
    assert trajectory.rows[0].turns[0].finish_reason == "length"


async def test_a_last_token_other_than_eos_is_not_truncation(
    make_rollouts: Any, make_context: Any
) -> None:
    """FR-022: only the finish reason decides."""
    answer = make_completion((5, 6, 163585), finish_reason="stop_token")
    (record,) = await rollout(
        make_rollouts, make_context(inference=Answering(answer)), {"prompt": "2+2="}
    )
    assert record.status == "completed"


async def test_a_prompt_longer_than_the_context_fails_for_the_policys_reasons(
    make_rollouts: Any, make_context: Any
) -> None:
    context = make_context(inference=InstantInference(max_context=4))
    (record,) = await rollout(make_rollouts, context, {"prompt": "2+2="})
    assert record.reason == "policy/ContextOverflowError"


async def test_a_completion_that_the_engine_broke_off_is_drawn_again(
    make_rollouts: Any, make_context: Any
) -> None:
    context = make_context(inference=Answering(make_completion(finish_reason="abort")))
    (record,) = await rollout(make_rollouts, context, {"prompt": "2+2="})
    assert (record.reason, record.attempts) == ("infrastructure/ServiceError", 3)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        ("1", "'1' of type str"),
        ([1.0, 0.0], "2 values, expected 1"),
    ],
)
async def test_a_reward_that_is_no_reward_fails_the_rollout(
    make_rollouts: Any, make_context: Any, returned: Any, named: str
) -> None:
    """FR-061; never reward 0."""

    def nonsense(completion: str) -> Any:
        return returned

    context = make_context(reward=reward_of(nonsense))
    (record,) = await rollout(make_rollouts, context, {"prompt": "2+2="})
    assert record.reason == "user_code/RewardError"
    assert f"nonsense returned {named.removeprefix('returned ')}" in record.failure.message
    assert record.failure.where == "reward"
    assert record.trajectories == ()


async def test_a_reward_that_raises_fails_the_rollout_with_its_place(
    make_rollouts: Any, make_context: Any
) -> None:
    """FR-059, FR-070."""

    def broken(completion: str) -> float:
        return 1 / 0

    context = make_context(reward=reward_of(broken))
    (record,) = await rollout(make_rollouts, context, {"prompt": "2+2="})
    assert record.reason == "user_code/ZeroDivisionError"
    assert "broken raised ZeroDivisionError" in record.failure.message
    assert "test_single_turn.py:" in record.failure.message


async def test_an_abstaining_reward_leaves_the_trajectory_unscored(
    make_rollouts: Any, make_context: Any
) -> None:
    """FR-070: None is not 0."""
    context = make_context(reward=reward_of(lambda completion: None))
    (record,) = await rollout(make_rollouts, context, {"prompt": "2+2="})
    assert (record.status, record.trajectories[0].reward) == ("completed", None)


async def test_a_lost_connection_to_a_judge_is_retried(
    make_rollouts: Any, make_context: Any
) -> None:
    """FR-140."""
    calls: list[int] = []

    async def judge(completion: str) -> float:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("judge restarted")
        return 0.5

    context = make_context(reward=reward_of(judge))
    (record,) = await rollout(make_rollouts, context, {"prompt": "2+2="})
    assert (record.attempts, record.trajectories[0].reward) == (2, 0.5)


async def test_step_works_without_a_runner(make_context: Any) -> None:
    trajectory = await SingleTurnWorker(make_context()).step({"prompt": "2+2="})
    assert trajectory.rollout_id == ""
    assert trajectory.num_response_tokens == 8
