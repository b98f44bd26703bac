"""Workers of offline data: pairs, labelled responses and judged steps become rows."""

from __future__ import annotations

from typing import Any

import pytest

from nexrl.errors import ConfigError, DataError
from nexrl.rollout.build import build_worker
from nexrl.testing.char_renderer import CharRenderer
from nexrl.testing.makers import make_draw
from nexrl.types import Trajectory

PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "22"}
STEPS = {"prompt": "2+2=", "steps": ["2+2", "=4"], "label": [True, 0.25]}


@pytest.fixture
def step(make_context: Any, tmp_path: Any) -> Any:
    """(type, row, settings of the worker) -> what its step returns."""

    async def call(kind: str, row: dict[str, Any], **config: Any) -> Any:
        context = make_context(inference=None, config={"type": kind, **config})
        worker: Any = build_worker(context, tmp_path)
        return await worker.step(row)

    return call


def trained(trajectory: Trajectory) -> str:
    row = trajectory.rows[0]
    return CharRenderer().decode(row.token_ids[row.loss_mask], skip_special_tokens=False)


async def test_a_pair_is_two_supervised_rows_with_roles(step: Any) -> None:
    chosen, rejected = await step("preference", PAIR)
    assert (chosen.role, trained(chosen)) == ("chosen", "4</s>")
    assert (rejected.role, trained(rejected)) == ("rejected", "22</s>")
    assert chosen.extra == rejected.extra == {}
    assert chosen.reward is None


async def test_a_pair_may_name_its_margin(step: Any) -> None:
    chosen, _ = await step("preference", {**PAIR, "margin": 2})
    assert chosen.extra == {"margin": 2.0}


async def test_both_sides_keep_their_roles_in_a_rollout(
    make_rollouts: Any, make_context: Any
) -> None:
    from nexrl.rollout.preference_rows import PreferenceWorker

    rollouts = make_rollouts(PreferenceWorker, context=make_context(inference=None))
    (record,) = await rollouts.run(make_draw(row=PAIR))
    assert [t.group_id.rpartition("/")[2] for t in record.trajectories] == ["chosen", "rejected"]
    assert {t.item_id for t in record.trajectories} == {record.trajectories[0].item_id}


async def test_messages_are_a_prompt_too(step: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chosen, _ = await step("preference", {**PAIR, "prompt": None, "messages": messages})
    assert CharRenderer().decode(chosen.rows[0].token_ids).startswith("<user>hi")
    assert trained(chosen) == "4</s>"


@pytest.mark.parametrize("label", [True, False, 0, 1])
async def test_a_labelled_response_carries_its_label(step: Any, label: Any) -> None:
    labelled = await step("labelled", {"prompt": "2+2=", "answer": "4", "label": label})
    assert (trained(labelled), labelled.extra) == ("4</s>", {"desirable": bool(label)})


async def test_step_ends_are_borders_between_tokens(step: Any) -> None:
    judged = await step("process", STEPS, arguments={"step_separator": ";"})
    assert judged.extra == {"step_ends": [8, 11], "step_labels": [1.0, 0.25]}
    assert trained(judged) == "2+2;=4;"
    ids = judged.rows[0].token_ids
    assert [CharRenderer().decode(ids[end - 1 : end]) for end in (8, 11)] == [";", ";"]


@pytest.mark.parametrize(
    ("kind", "row", "named"),
    [
        ("preference", {**PAIR, "rejected": "4"}, "same response.*'4'"),
        ("preference", {**PAIR, "chosen": ""}, "'chosen' .data.chosen_key.*got ''"),
        ("preference", {"prompt": "2", "chosen": "4"}, "'rejected'.*the row has: chosen, prompt"),
        ("preference", {**PAIR, "chosen": ["4"]}, r"non-empty string, got \['4'\]"),
        ("preference", {**PAIR, "margin": "big"}, "margin must be a finite number"),
        ("labelled", {"prompt": "2", "answer": "4"}, "'label' .data.label_key.*nothing"),
        ("labelled", {"prompt": "2", "answer": "4", "label": "yes"}, "true .*or false, got 'yes'"),
        ("labelled", {"prompt": "2", "label": True}, "'answer' .data.answer_key"),
        ("process", {**STEPS, "steps": []}, "'steps' .data.steps_key.*non-empty list"),
        ("process", {**STEPS, "steps": ["2", ""]}, r"steps\[1\] must be a non-empty string"),
        ("process", {**STEPS, "label": [True]}, "each of the 2 steps"),
        ("process", {**STEPS, "label": [True, 1.5]}, r"label\[1\] must be .* in \[0, 1\]"),
    ],
)
async def test_a_row_that_cannot_be_used_is_named(
    step: Any, kind: str, row: dict[str, Any], named: str
) -> None:
    with pytest.raises(DataError, match=named):
        await step(kind, row)


async def test_an_unknown_argument_of_the_process_worker_is_refused(step: Any) -> None:
    with pytest.raises(ConfigError, match=r"separator.*accepted: step_separator"):
        await step("process", STEPS, arguments={"separator": ";"})
