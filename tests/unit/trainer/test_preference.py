"""PreferenceTrainer and RewardModelTrainer against a train service with true gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.algorithms.metrics import METRIC_UNITS
from nexrl.algorithms.preference_losses import PREFERENCE_LOSSES
from nexrl.config.schema import TrainerConfig
from nexrl.errors import ConfigError, InvariantError
from nexrl.testing.makers import RecordingTracker
from nexrl.testing.toy_train_service import ToyTrainService
from nexrl.trainer.batching import flatten
from nexrl.trainer.offline_trainer import OfflineTrainer
from nexrl.trainer.preference import REFERENCE, PreferenceTrainer, mismatched_rows
from nexrl.trainer.reward_model import RewardModelTrainer
from nexrl.trainer.trainer import TrainerContext
from nexrl.types import ModelSpec, TokenRow, Trajectory

VOCAB = 12
LOGPROB_LOSSES = [x.name for x in PREFERENCE_LOSSES.values() if not x.needs_scores]
SCORE_LOSSES = [x.name for x in PREFERENCE_LOSSES.values() if x.needs_scores]


async def make_trainer(
    name: str, service: ToyTrainService | None = None, *, preference: Any = None, **settings: Any
) -> Any:
    """A trainer that is set up; of a value policy where its loss needs one."""
    service = service or ToyTrainService(vocab_size=VOCAB)
    scores = PREFERENCE_LOSSES[name].needs_scores
    if scores:
        await service.create(ModelSpec(head="value"))
    settings.setdefault("optimizer", {"lr": 0.5, "grad_clip_norm": 0.0})
    algorithm = {"preset": name, "loss": {"name": name}, "preference": preference or {}}
    kind: type[OfflineTrainer] = RewardModelTrainer if scores else PreferenceTrainer
    trainer = kind(
        TrainerContext(
            train_service=service,
            config=TrainerConfig.model_validate({"algorithm": algorithm, **settings}),
            tracker=RecordingTracker(),
        )
    )
    await trainer.setup()
    return trainer


def row(ids: Sequence[int], prompt: int) -> TokenRow:
    return TokenRow(token_ids=np.array(ids, np.int32), loss_mask=np.arange(len(ids)) >= prompt)


def side(item: int, role: str, ids: Sequence[int], *, prompt: int = 2, **fields: Any) -> Trajectory:
    return Trajectory(
        rows=(row(ids, prompt),),
        role=role,
        item_id=f"i{item}",
        trajectory_id=f"i{item}-{role}",
        **fields,
    )


def offline(name: str, num_items: int = 6) -> list[Trajectory]:
    """Rows of uneven lengths: good responses use tokens 0 to 5, bad ones 6 to 11."""
    generator = np.random.default_rng(1)
    made: list[Trajectory] = []
    for item in range(num_items):
        prompt = generator.integers(0, VOCAB, 2).tolist()
        good = generator.integers(0, 6, 2 + item % 3).tolist()
        bad = generator.integers(6, VOCAB, 1 + item % 4).tolist()
        rows = PREFERENCE_LOSSES[name].rows
        if rows == "pair":
            made += [side(item, "chosen", prompt + good), side(item, "rejected", prompt + bad)]
        elif rows == "labelled":
            is_good = item % 2 == 0
            ids = prompt + (good if is_good else bad)
            made.append(side(item, "", ids, extra={"desirable": is_good}))
        else:
            ends = [2 + len(good), 2 + len(good) + len(bad)]
            facts = {"step_ends": ends, "step_labels": [1.0, 0.0]}
            made.append(side(item, "", prompt + good + bad, extra=facts))
    return made


def assert_same_weights(trainer: Any, other: Any) -> None:
    tables = [t.train_service.tables["actor"] for t in (trainer, other)]
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-9)


async def after_two_batches(name: str, **settings: Any) -> tuple[ToyTrainService, dict[str, float]]:
    """Two, so that policy and reference differ."""
    trainer = await make_trainer(name, num_optimizer_steps=2, **settings)
    await trainer.train(offline(name, num_items=160))
    return trainer.train_service, await trainer.train(offline(name, num_items=160))


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
async def test_any_split_into_chunks_gives_the_same_weights_and_metrics(name: str) -> None:
    """FR-029: pairs are coupled across calls, and the denominator is that of the whole step."""
    whole, metrics = await after_two_batches(name)
    split, split_metrics = await after_two_batches(name, max_chunk_bytes=1024)
    backward = [service.calls.count(("backward", "actor")) for service in (whole, split)]
    assert backward[0] == 4 < backward[1]
    np.testing.assert_allclose(split.tables["actor"], whole.tables["actor"], rtol=1e-9)
    assert split_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
    assert set(metrics) <= set(METRIC_UNITS)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
async def test_two_optimizer_steps_are_two_batches_of_half_the_items(name: str) -> None:
    whole, halves = await make_trainer(name, num_optimizer_steps=2), await make_trainer(name)
    rows = offline(name)
    await whole.train(rows)
    middle = len(rows) // 2
    for half in (rows[:middle], rows[middle:]):
        await halves.train(half)
    assert_same_weights(whole, halves)


async def test_the_gradient_is_that_of_the_whole_loss_through_the_model() -> None:
    trainer = await make_trainer("dpo", preference={"beta": 0.7, "sft_coefficient": 0.3})
    rows = offline("dpo")
    start = torch.tensor(trainer.train_service.tables["actor"], requires_grad=True)
    logprobs = torch.log_softmax(start, -1)
    sums = [
        torch.stack([logprobs[a, b] for a, b in itertools.pairwise(ids[1:])]).sum()
        for ids in (t.rows[0].token_ids.tolist() for t in rows)
    ]
    chosen, rejected = torch.stack(sums[::2]), torch.stack(sums[1::2])
    lengths = torch.tensor([t.num_response_tokens for t in rows[::2]])
    margin = 0.7 * (chosen - chosen.detach() - rejected + rejected.detach())
    loss = (-torch.nn.functional.logsigmoid(margin) - 0.3 * chosen / lengths).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    await trainer.train(rows)
    assert start.grad is not None
    expected = (start - 0.5 * start.grad).detach().numpy()
    np.testing.assert_allclose(trainer.train_service.tables["actor"], expected, atol=1e-7)


RATES = {"dpo": 5.0, "ipo": 0.01, "hinge": 5.0, "simpo": 20.0, "orpo": 5.0, "kto": 20.0}


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
async def test_a_few_batches_raise_accuracy_and_margin(name: str) -> None:
    optimizer = {"lr": RATES.get(name, 2.0), "grad_clip_norm": 0.0}
    preference = {"beta": 2.0} if name == "simpo" else {}
    trainer = await make_trainer(name, optimizer=optimizer, preference=preference)
    rows = offline(name, num_items=12)
    before = await trainer.evaluate(rows)
    for _ in range(8):
        await trainer.train(rows)
    after = await trainer.evaluate(rows)
    assert after["accuracy"] > max(0.9, before["accuracy"])
    assert after["margin"] > before["margin"]
    assert after["loss"] < before["loss"]


async def test_evaluation_trains_nothing_and_needs_no_second_reference() -> None:
    trainer = await make_trainer("dpo")
    service, before = trainer.train_service, trainer.train_service.tables["actor"].copy()
    metrics = await trainer.evaluate(offline("dpo"))
    assert {verb for verb, _ in service.calls} == {"create", "forward"}
    assert (service.tables["actor"] == before).all()
    assert metrics["loss"] == pytest.approx(np.log(2.0))
    assert trainer.optimizer_step == 0


async def test_the_reference_is_a_frozen_copy_of_the_policy_as_the_stage_began() -> None:
    trainer = await make_trainer("dpo")
    tables = trainer.train_service.tables
    start = tables["actor"].copy()
    await trainer.train(offline("dpo"))
    assert (tables[REFERENCE] == start).all()
    assert not (tables["actor"] == start).all()
    [spec] = trainer.further_policies
    assert (spec.policy, spec.copy_of, spec.trainable) == (REFERENCE, "actor", False)


async def test_losses_without_a_reference_make_none() -> None:
    for name in ("simpo", "orpo", *SCORE_LOSSES):
        trainer = await make_trainer(name)
        assert trainer.further_policies == ()
        assert REFERENCE not in trainer.train_service.tables


async def test_a_resume_keeps_the_checkpoints_reference() -> None:
    service = ToyTrainService(vocab_size=VOCAB)
    first = await make_trainer("dpo", service)
    kept = service.tables[REFERENCE]
    await first.train(offline("dpo"))
    resumed = type(first)(first._context)
    resumed.load_state_dict(first.state_dict())
    await resumed.setup()
    assert service.tables[REFERENCE] is kept
    del service.tables[REFERENCE]
    with pytest.raises(InvariantError, match="needs the reference policy of the checkpoint"):
        await resumed.setup()


# --- pairs ------------------------------------------------------------------------------------


async def test_a_pair_with_a_missing_side_is_named() -> None:
    trainer = await make_trainer("dpo")
    with pytest.raises(InvariantError, match=r"item 'i5'.* is chosen and its other side is"):
        await trainer.train(offline("dpo")[:-1])


@pytest.mark.parametrize("role", ["", "chosen", "judge"])
async def test_a_trajectory_of_another_role_is_named(role: str) -> None:
    rows = offline("dpo")
    rows[1] = side(0, role, [1, 2, 3])
    trainer = await make_trainer("dpo")
    with pytest.raises(InvariantError, match=f"item 'i0'.* has the role '{role}'"):
        await trainer.train(rows)


async def test_a_response_without_trained_tokens_is_named() -> None:
    rows = offline("dpo")
    rows[3] = side(1, "rejected", [1, 2], prompt=2)
    trainer = await make_trainer("dpo")
    with pytest.raises(InvariantError, match=r"item 'i1'.*no response token"):
        await trainer.train(rows)


async def test_the_order_of_trajectories_does_not_matter() -> None:
    straight, mixed = await make_trainer("dpo"), await make_trainer("dpo")
    await straight.train(offline("dpo"))
    await mixed.train(offline("dpo")[::-1])
    assert_same_weights(straight, mixed)


async def test_rows_are_trained_at_temperature_one_whatever_drew_them() -> None:
    drawn, plain = await make_trainer("dpo"), await make_trainer("dpo")
    await plain.train(offline("dpo"))
    await drawn.train(
        [replace(t, rows=(replace(t.rows[0], temperature=0.0),)) for t in offline("dpo")]
    )
    assert_same_weights(drawn, plain)


@pytest.mark.parametrize(
    ("kind", "loss", "accepted"),
    [(PreferenceTrainer, "reward_model", "dpo, ipo"), (RewardModelTrainer, "dpo", "reward_model")],
)
async def test_a_loss_that_does_not_fit_the_trainer_is_refused(
    kind: type[OfflineTrainer], loss: str, accepted: str
) -> None:
    """No rule of the configuration does it for a custom trainer."""
    config = TrainerConfig.model_validate({"algorithm": {"loss": {"name": loss}}})
    context = TrainerContext(
        train_service=ToyTrainService(), config=config, tracker=RecordingTracker()
    )
    with pytest.raises(ConfigError, match=f"loss.name: {kind.__name__} .*accepted: {accepted}"):
        kind(context)


async def test_a_setting_that_the_loss_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"label_smoothing is 0.1, and ipo has no such setting"):
        await make_trainer("ipo", preference={"label_smoothing": 0.1})


# --- kto --------------------------------------------------------------------------------------


def test_mismatched_rows_have_the_response_of_the_next_row() -> None:
    rows = [side(0, "", [1, 2, 3, 4]), side(1, "", [5, 6, 7]), side(2, "", [8, 9, 10, 11])]
    table = flatten(rows)
    mismatched = mismatched_rows(table, np.arange(3), max_tokens=100)
    parts = np.split(mismatched.token_ids, np.cumsum(mismatched.lengths)[:-1])
    assert [p.tolist() for p in parts] == [[1, 2, 7], [5, 6, 10, 11], [8, 9, 3, 4]]
    assert mismatched.num_trained.tolist() == [1, 2, 2]
    cut = mismatched_rows(table, np.arange(3), max_tokens=3)
    assert cut.lengths.tolist() == [3, 3, 3]
    assert mismatched_rows(table, np.arange(1), max_tokens=100).num_rows == 0


def test_a_row_is_never_matched_with_an_answer_to_its_own_prompt() -> None:
    rows = [side(0, "", [1, 2, 3]), side(1, "", [1, 2, 4]), side(2, "", [8, 9, 5])]
    mismatched = mismatched_rows(flatten(rows), np.arange(3), max_tokens=100)
    made = np.split(mismatched.token_ids, np.cumsum(mismatched.lengths)[:-1])
    assert [m.tolist() for m in made] == [[1, 2, 5], [1, 2, 5], [8, 9, 3]]


async def test_z0_is_the_mean_move_of_mismatched_pairs_and_never_negative() -> None:
    trainer = await make_trainer("kto", optimizer={"lr": 0.0, "grad_clip_norm": 0.0})
    rows = [side(i, "", [i, i, 5 + i], extra={"desirable": i == 0}) for i in range(2)]
    # The mismatched rows are [0, 0, 6] and [1, 1, 5].
    tables = trainer.train_service.tables
    for sign in (1.0, -1.0):
        tables["actor"] = np.zeros((VOCAB, VOCAB))
        tables[REFERENCE] = np.zeros((VOCAB, VOCAB))
        tables["actor"][0, 6] = 2.0 * sign
        moved = 2.0 * sign - np.log((11 + np.exp(2.0 * sign)) / 12)
        metrics = await trainer.train(rows)
        assert metrics["kto/z0"] == pytest.approx(max(0.0, moved / 2), rel=1e-5)


async def test_a_step_of_one_row_has_z0_of_0_and_says_so() -> None:
    trainer = await make_trainer("kto")
    metrics = await trainer.train(offline("kto")[:1])
    assert metrics["kto/z0"] == 0.0
    assert "single prompt" in trainer.tracker.warnings[0]
    assert "preference/accuracy" not in metrics


# --- scores -----------------------------------------------------------------------------------


async def test_a_reward_model_needs_a_value_head() -> None:
    config = TrainerConfig.model_validate({"algorithm": {"loss": {"name": "reward_model"}}})
    context = TrainerContext(
        train_service=ToyTrainService(), config=config, tracker=RecordingTracker()
    )
    with pytest.raises(ConfigError, match=r"outputs .*logprobs.*accepted: .*head value"):
        await RewardModelTrainer(context).setup()


async def test_a_response_is_scored_by_the_state_after_its_last_token() -> None:
    trainer = await make_trainer("reward_model")
    trainer.train_service.tables["actor"] = np.arange(VOCAB, dtype=np.float64)
    pair = [side(0, "chosen", [1, 2, 9]), side(0, "rejected", [1, 2, 7, 4])]
    metrics = await trainer.evaluate(pair)
    assert (metrics["reward_chosen"], metrics["reward_rejected"]) == (9.0, 4.0)
    assert metrics["loss"] == pytest.approx(np.log1p(np.exp(-5.0)), rel=1e-6)


async def test_a_pair_without_a_margin_takes_the_configured_one() -> None:
    trainer = await make_trainer("reward_model", preference={"margin": 2.0})
    pairs = [
        side(0, "chosen", [1, 2, 3], extra={"margin": 1.0}),
        side(0, "rejected", [1, 2, 4]),
        side(1, "chosen", [1, 2, 3]),
        side(1, "rejected", [1, 2, 4]),
    ]
    metrics = await trainer.evaluate(pairs)
    assert metrics["loss"] == pytest.approx(np.logaddexp(0, [1.0, 2.0]).mean(), rel=1e-6)


async def test_steps_are_scored_by_the_states_after_their_ends() -> None:
    trainer = await make_trainer("process_reward_model")
    trainer.train_service.tables["actor"] = np.arange(VOCAB, dtype=np.float64) - 5.0
    facts = {"step_ends": [3, 5], "step_labels": [1.0, 0.0]}
    metrics = await trainer.evaluate([side(0, "", [1, 2, 9, 7, 4], extra=facts)])
    assert (metrics["reward_chosen"], metrics["reward_rejected"]) == (4.0, -1.0)
    assert (metrics["accuracy"], metrics["margin"]) == (1.0, 5.0)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({}, "no extra.'step_ends'.*process"),
        ({"step_ends": [3, 3], "step_labels": [1.0, 1.0]}, "must ascend"),
        ({"step_ends": [3, 9], "step_labels": [1.0, 1.0]}, r"within \(0, 5\]"),
        ({"step_ends": [3], "step_labels": [1.0, 1.0]}, "each of its 2 labels"),
    ],
)
async def test_steps_that_do_not_fit_their_row_are_named(facts: Any, named: str) -> None:
    trainer = await make_trainer("process_reward_model")
    with pytest.raises(InvariantError, match=f"item 'i0'.*{named}"):
        await trainer.train([side(0, "", [1, 2, 9, 7, 4], extra=facts)])


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
async def test_rows_as_long_as_the_model_takes_are_trained(name: str) -> None:
    """The sentinel behind a scored row is never fed, so it costs no position."""
    rows = offline(name)
    longest = max(t.rows[0].num_tokens for t in rows)
    service = ToyTrainService(vocab_size=VOCAB, max_positions=longest)
    metrics = await (await make_trainer(name, service)).train(rows)
    assert metrics[f"loss/{name}"] > 0
