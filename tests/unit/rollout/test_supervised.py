"""SupervisedWorker: answer tokens are trained, prompt tokens are not, nothing is sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nexrl.errors import DataError
from nexrl.rollout.supervised import SupervisedWorker
from nexrl.testing.char_renderer import EOS, CharRenderer
from nexrl.types import IntArray

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


class StripsThinking(CharRenderer):
    """A template that renders a finished conversation otherwise than its own prompt (FR-001)."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> IntArray:
        rendered = super().render(messages, add_generation_prompt=add_generation_prompt)
        return rendered if add_generation_prompt else rendered[1:]


def worker(make_context: Any, **config: Any) -> SupervisedWorker:
    return SupervisedWorker(make_context(inference=None, config=config))


def trained(trajectory: Any) -> str:
    row = trajectory.rows[0]
    return CharRenderer().decode(row.token_ids[row.loss_mask], skip_special_tokens=False)


async def test_answer_and_its_end_are_trained_and_the_prompt_is_not(make_context: Any) -> None:
    """FR-026."""
    trajectory = await worker(make_context).step({"prompt": "2+2=", "answer": "4"})
    assert trained(trajectory) == "4</s>"
    assert trajectory.rows[0].loss_mask.tolist() == [False] * 4 + [True] * 2
    assert (trajectory.prompt, trajectory.response, trajectory.reward) == ("2+2=", "4", None)


async def test_nothing_counts_as_sampled(make_context: Any) -> None:
    row = (await worker(make_context).step({"prompt": "2+2=", "answer": "4"})).rows[0]
    assert (row.sampled, row.behavior_logprobs, row.versions) == (None, None, ())


async def test_no_end_token_when_add_eos_is_off(make_context: Any) -> None:
    trajectory = await worker(make_context, add_eos=False).step({"prompt": "2+2=", "answer": 4})
    assert trained(trajectory) == "4"


async def test_last_assistant_message_is_trained_up_to_its_end_marker(make_context: Any) -> None:
    """FR-016: neither the role header nor the newline after the end marker."""
    trajectory = await worker(make_context).step({"messages": MESSAGES})
    assert trained(trajectory) == "yo</s>"
    assert trajectory.rows[0].token_ids[-1] == EOS


async def test_only_the_last_of_several_assistant_messages_is_trained(make_context: Any) -> None:
    trajectory = await worker(make_context).step({"messages": [*MESSAGES, *MESSAGES]})
    assert trained(trajectory) == "yo</s>"
    assert trajectory.rows[0].loss_mask.sum() == 3


async def test_messages_with_an_answer_column_are_a_prompt(make_context: Any) -> None:
    row = {"messages": MESSAGES[:1], "answer": "hey"}
    assert trained(await worker(make_context).step(row)) == "hey</s>"


async def test_an_item_drawn_again_is_not_tokenised_again(make_context: Any) -> None:
    supervised = worker(make_context)
    first = await supervised.step({"prompt": "2+2=", "answer": "4"})
    calls = supervised.renderer.num_calls  # type: ignore[attr-defined]
    again = await supervised.step({"prompt": "2+2=", "answer": "4"})
    assert again.rows[0] is first.rows[0]
    assert supervised.renderer.num_calls == calls  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "item", [{"prompt": "2+2=", "answer": "4"}, {"messages": MESSAGES}], ids=["text", "messages"]
)
async def test_nor_is_it_when_thousands_of_others_were_drawn_between(
    make_context: Any, item: dict[str, Any]
) -> None:
    """More than there are prompts remembered, and fewer than rows."""
    supervised = worker(make_context)
    first = await supervised.step(item)
    for number in range(5000):
        await supervised.step({"prompt": f"{number}", "answer": "4"})
    calls = supervised.renderer.num_calls  # type: ignore[attr-defined]
    again = await supervised.step(item)
    assert (again.prompt, again.rows[0] is first.rows[0]) == (first.prompt, True)
    assert supervised.renderer.num_calls == calls  # type: ignore[attr-defined]


async def test_a_template_that_does_not_continue_its_prompt_is_refused(make_context: Any) -> None:
    """FR-001, FR-007: no silently wrong mask; the first differing index is named."""
    supervised = SupervisedWorker(make_context(inference=None, renderer=StripsThinking()))
    with pytest.raises(DataError, match=r"differs from the prompt at token 0 of"):
        await supervised.step({"messages": MESSAGES})


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "2+2="}, "column 'answer'.*the row has: prompt"),
        ({"prompt": "2+2=", "answer": ""}, "got ''"),
        ({"prompt": "2+2=", "answer": 0.5}, "got 0.5"),
        ({"messages": MESSAGES[:1]}, "must end with an assistant message.*'user'"),
        ({"answer": "4"}, "neither column 'prompt'"),
    ],
)
async def test_a_row_that_cannot_be_imitated_is_named(
    make_context: Any, row: dict[str, Any], named: str
) -> None:
    with pytest.raises(DataError, match=named):
        await worker(make_context).step(row)


async def test_it_needs_no_inference(make_rollouts: Any, make_context: Any) -> None:
    assert SupervisedWorker.uses_inference is False
    (record,) = await make_rollouts(SupervisedWorker, context=make_context(inference=None)).run()
    assert record.status == "completed"
