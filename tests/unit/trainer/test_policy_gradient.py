"""PolicyGradientTrainer and SftTrainer against a train service with true gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nexrl.algorithms.metrics import METRIC_UNITS
from nexrl.errors import InvariantError
from nexrl.testing.makers import RecordingTracker, make_batch, make_trajectory
from nexrl.testing.toy_train_service import ToyTrainService, bigram_logprobs
from nexrl.testing.toy_trainer import drawn, drawn_row, make_toy_trainer
from nexrl.trainer.policy_gradient import REFERENCE
from nexrl.trainer.sft import SftTrainer
from nexrl.types import (
    OptimParams,
    OptimResult,
    PolicyVersion,
    RowChunk,
    Trajectory,
    TrajectoryStatus,
    VersionSpan,
)


async def trained(settings: dict[str, Any]) -> tuple[ToyTrainService, dict[str, float]]:
    """The service and the metrics after one batch."""
    service = ToyTrainService()
    trainer = make_toy_trainer(service, **settings)
    await trainer.setup()
    metrics = await trainer.train(drawn(service, num_groups=20))
    return service, metrics


RICH = {"kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.01}, "recompute_proximal": True}
AGGREGATIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant",
    "trajectory_mean",
)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
async def test_any_split_into_chunks_gives_the_same_weights_and_metrics(aggregation: str) -> None:
    """FR-029, FR-031, FR-035: one denominator for every term of the whole optimizer step."""
    settings = {"algorithm": {**RICH, "loss": {"aggregation": aggregation}}}
    whole, metrics = await trained({**settings, "max_chunk_bytes": 10**6})
    for num_bytes in (1024, 2048):
        split, split_metrics = await trained({**settings, "max_chunk_bytes": num_bytes})
        assert len(split.chunks) > len(whole.chunks) == 1
        np.testing.assert_allclose(split.tables["actor"], whole.tables["actor"], rtol=1e-9)
        assert split_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)


async def test_a_batch_in_two_optimizer_steps_is_two_batches_of_half_the_groups() -> None:
    whole, halves = ToyTrainService(), ToyTrainService()
    rows = drawn(whole)
    await make_toy_trainer(whole, num_optimizer_steps=2).train(rows)
    for half in (rows[:6], rows[6:]):
        await make_toy_trainer(halves).train(half)
    np.testing.assert_allclose(whole.tables["actor"], halves.tables["actor"], rtol=1e-12)


async def test_all_calls_are_submitted_in_order_before_the_first_returns() -> None:
    import asyncio

    class Slow(ToyTrainService):
        async def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
            result = await super().forward_backward(*args, **kwargs)
            self.before = getattr(self, "before", len(self.calls))
            await asyncio.sleep(0)
            self.seen = len(self.calls)
            return result

    service = Slow()
    rows = drawn(service, num_groups=40)
    await make_toy_trainer(service, num_optimizer_steps=2, max_chunk_bytes=1024).train(rows)
    verbs = [verb for verb, _ in service.calls]
    assert verbs.count("forward_backward") > 2
    assert verbs.count("optim_step") == 2
    assert verbs[-1] == "optim_step"
    assert service.before == 1
    assert service.seen == len(verbs)


async def test_learning_raises_the_probability_of_what_was_rewarded() -> None:
    service = ToyTrainService()
    trainer = make_toy_trainer(service)
    rows = drawn(service)
    for _ in range(5):
        await trainer.train(rows)
    for t in rows:
        row = t.rows[0]
        chunk = RowChunk.from_rows([row.token_ids])
        after = bigram_logprobs(service.tables["actor"], chunk)[row.loss_mask].sum()
        assert row.behavior_logprobs is not None
        assert (after > row.behavior_logprobs.sum()) == (t.reward == 1.0)


async def test_on_policy_the_ratio_is_one_and_the_engine_agrees() -> None:
    """FR-017, FR-083: unchanged weights have ratio 1 for every token, at any temperature."""
    service = ToyTrainService()
    rows = [
        Trajectory(rows=(drawn_row(service, [1, 2, 3, 4], temperature=t),), reward=r, group_id="g")
        for t, r in ((1.0, 0.0), (0.6, 1.0))
    ]
    metrics = await make_toy_trainer(service).train(rows)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["mismatch/max"] == pytest.approx(0.0, abs=1e-6)
    assert {c.temperature for c in service.chunks} == {1.0, 0.6}


async def test_policy_kl_and_entropy_are_logged_apart_and_add_up_to_the_total() -> None:
    """FR-040, FR-098"""
    service = ToyTrainService()
    trainer = make_toy_trainer(service, algorithm=RICH)
    await trainer.setup()
    for _ in range(2):
        metrics = await trainer.train(drawn(service))
    parts = metrics["loss/policy"] + metrics["loss/kl"] + metrics["loss/entropy"]
    assert metrics["loss/total"] == pytest.approx(parts, rel=1e-6)
    assert metrics["kl/k3"] > 0
    assert metrics["entropy"] > 0


async def test_entropy_is_computed_only_when_asked_for() -> None:
    _, metrics = await trained({})
    assert "entropy" not in metrics
    assert "loss/kl" not in metrics


async def test_every_metric_has_a_stated_unit() -> None:
    _, metrics = await trained({"algorithm": RICH})
    assert set(metrics) <= set(METRIC_UNITS)


async def test_the_reference_is_the_policy_as_the_stage_began() -> None:
    service = ToyTrainService()
    start = service.tables["actor"].copy()
    trainer = make_toy_trainer(service, algorithm=RICH)
    await trainer.setup()
    await trainer.train(drawn(service))
    np.testing.assert_array_equal(service.tables[REFERENCE], start)
    assert [spec.policy for spec in trainer.further_policies] == [REFERENCE]


async def test_a_resume_keeps_the_checkpoints_reference_and_misses_it_when_absent() -> None:
    service = ToyTrainService()
    state = make_toy_trainer(service, algorithm=RICH).state_dict()
    resumed = make_toy_trainer(service, algorithm=RICH)
    resumed.load_state_dict(state)
    with pytest.raises(InvariantError, match="needs the reference policy"):
        await resumed.setup()
    service.tables[REFERENCE] = service.tables["actor"] + 1.0
    await resumed.setup()
    assert ("create", REFERENCE) not in service.calls


async def test_a_group_that_was_dropped_has_no_kl_either() -> None:
    """FR-037: dropping is stated and total; keeping a constant group keeps its KL term."""
    service = ToyTrainService()
    trainer = make_toy_trainer(service, algorithm=RICH)
    await trainer.setup()
    service.tables["actor"] = service.tables["actor"] + np.eye(service.vocab_size)
    constant = drawn(service, num_groups=1, reward=1.0)
    kept = await trainer.train(constant)
    assert kept["advantage/max_abs"] == 0.0
    assert kept["loss/kl"] > 0
    assert kept["grad_norm"] > 0
    assert (await trainer.train_batch(make_batch(groups=()))).unchanged


async def test_a_trajectory_of_zero_advantage_stays_in_the_denominator() -> None:
    """FR-038: what is zeroed, and not filtered, is known before the first chunk and counts."""
    service = ToyTrainService()
    rows = drawn(service, num_groups=2)
    rows = [t if t.group_id == "i0/0" else replace(t, reward=1.0) for t in rows]
    await make_toy_trainer(service).train(rows)
    tokens = sum(t.num_response_tokens for t in rows)
    weights = np.concatenate([c.inputs["weight"] for c in service.chunks])
    assert weights.max() == pytest.approx(1 / tokens)
    assert np.count_nonzero(weights) == tokens


async def test_an_abstaining_trajectory_is_in_neither_baseline_nor_denominator() -> None:
    """FR-070: rewards [1, None, 0, 1] have mean 2/3."""
    service = ToyTrainService()
    rows = drawn(service, num_groups=1, size=4)
    rewards = [1.0, None, 0.0, 1.0]
    rows = [replace(t, reward=r) for t, r in zip(rows, rewards, strict=True)]
    metrics = await make_toy_trainer(service).train(rows)
    assert metrics["reward/trained_mean"] == pytest.approx(2 / 3)
    assert metrics["reward/abstained"] == 1
    assert sum(c.num_rows for c in service.chunks) == 3


async def test_a_trajectory_of_several_rows_counts_once() -> None:
    """FR-047, FR-079: turns 2,1,2,1 and rewards 1,0,1,0 have baseline 0.5."""
    service = ToyTrainService()
    row = drawn_row(service, [1, 2, 3])
    rows = [
        Trajectory(rows=(row,) * (2 - i % 2), reward=1.0 - i % 2, group_id="g") for i in range(4)
    ]
    metrics = await make_toy_trainer(service, algorithm={"advantage": {"name": "dr_grpo"}}).train(
        rows
    )
    assert metrics["reward/trained_mean"] == 0.5
    advantage = np.concatenate([c.inputs["advantage"] for c in service.chunks])
    assert sorted(set(advantage[advantage != 0].tolist())) == [-0.5, 0.5]
    assert metrics["response_length/mean"] == 3.0


async def test_nothing_to_train_makes_no_step() -> None:
    """FR-032: everything masked gives no NaN and no optimizer step."""
    service = ToyTrainService()
    masked = [
        Trajectory(tokens=np.array([1, 2]), loss_mask=np.zeros(2, np.bool_), reward=r, group_id="g")
        for r in (0.0, 1.0)
    ]
    metrics = await make_toy_trainer(service).train(masked)
    assert ("optim_step", "actor") not in service.calls
    assert all(np.isfinite(v) for v in metrics.values())


async def test_rows_without_logprobs_are_recomputed_and_counted() -> None:
    service, known = ToyTrainService(), ToyTrainService()
    rows = drawn(service)
    bare = [
        replace(t, rows=(replace(t.rows[0], behavior_logprobs=None),)) if i % 2 else t
        for i, t in enumerate(rows)
    ]
    metrics = await make_toy_trainer(service).train(bare)
    await make_toy_trainer(known).train(rows)
    np.testing.assert_allclose(service.tables["actor"], known.tables["actor"], rtol=1e-6)
    assert 0 < metrics["mismatch/unknown_share"] < 1
    assert ("forward", "actor") in service.calls


async def test_rows_without_logprobs_are_refused_off_policy() -> None:
    bare = [
        make_trajectory(logprobs=None, reward=float(i), group_id="g", trajectory_id=f"t{i}")
        for i in range(2)
    ]
    with pytest.raises(InvariantError, match=r"'t0' .*has no usable engine logprobs"):
        await make_toy_trainer(on_policy_only=False).train(bare)


async def test_truncated_distributions_are_refused() -> None:
    """FR-083"""
    service = ToyTrainService()
    rows = drawn(service, num_groups=1)
    rows[1] = replace(rows[1], rows=(replace(rows[1].rows[0], logprob_kind="truncated"),))
    with pytest.raises(InvariantError, match=r"'t0\.1' .*was drawn with top_p"):
        await make_toy_trainer(service).train(rows)


async def test_a_recomputed_proximal_takes_the_engines_place_in_the_ratio() -> None:
    service = ToyTrainService()
    rows = drawn(service)
    service.tables["actor"] = service.tables["actor"] + np.eye(service.vocab_size)
    plain = await make_toy_trainer(service, optimizer={"lr": 0.0}).train(rows)
    again = await make_toy_trainer(
        service, optimizer={"lr": 0.0}, algorithm={"recompute_proximal": True}
    ).train(rows)
    assert plain["ratio/mean"] != pytest.approx(1.0, abs=1e-3)
    assert again["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    for name in ("mismatch/abs_mean", "mismatch/max", "mismatch/kl"):
        assert again[name] == pytest.approx(plain[name], rel=1e-5)


async def test_mismatch_of_stale_rows_is_told_apart() -> None:
    service = ToyTrainService()
    spans = (VersionSpan(start=1, end=3, version=PolicyVersion(number=2)),)
    rows = [
        replace(t, rows=(replace(t.rows[0], versions=spans),)) for t in drawn(service, num_groups=1)
    ]
    trainer = make_toy_trainer(service)
    trainer.version = 2
    assert "mismatch/stale_abs_mean" not in await trainer.train(rows)
    trainer.version = 3
    assert "mismatch/stale_abs_mean" in await trainer.train(rows)


class Exploding(ToyTrainService):
    """Its first gradient is not finite."""

    async def optim_step(self, policy: str, params: OptimParams) -> OptimResult:
        if not self.optim_params:
            self.gradients[policy] = np.full_like(self.tables[policy], np.nan)
        return await super().optim_step(policy, params)


async def test_a_gradient_that_is_not_finite_stops_the_run_by_default() -> None:
    """FR-070"""
    service = Exploding()
    before = service.tables["actor"].copy()
    with pytest.raises(InvariantError, match=r"step 1 of 1.*is not finite.*skip"):
        await make_toy_trainer(service).train(drawn(service))
    np.testing.assert_array_equal(service.tables["actor"], before)


async def test_a_gradient_that_is_not_finite_may_be_skipped_and_is_counted() -> None:
    service = Exploding()
    trainer = make_toy_trainer(service, num_optimizer_steps=2, on_nonfinite_gradient="skip")
    metrics = await trainer.train(drawn(service))
    assert metrics["optimizer/skipped"] == 1
    assert np.isfinite(metrics["loss/total"])
    assert trainer.optimizer_step == 2


async def test_a_loss_of_zero_with_a_gradient_is_explained_once() -> None:
    """FR-056"""
    service = ToyTrainService()
    trainer = make_toy_trainer(
        service, algorithm={"loss": {"aggregation": "sequence_mean_token_mean"}}
    )
    for _ in range(2):
        await trainer.train(drawn(service))
    tracker: RecordingTracker = trainer.tracker
    assert [w for w in tracker.warnings if "only the gradient carries the signal" in w] == (
        tracker.warnings
    )
    assert len(tracker.warnings) == 1


async def test_many_constant_groups_for_long_bring_advice() -> None:
    """FR-055"""
    service = ToyTrainService()
    trainer = make_toy_trainer(service)
    rows = drawn(service, reward=1.0)
    for _ in range(9):
        await trainer.train(rows)
    assert not trainer.tracker.warnings
    metrics = await trainer.train(rows)
    assert metrics["group/constant_share"] == 1.0
    assert "data.rollout_repeat_n" in trainer.tracker.warnings[0]


async def test_a_trajectory_without_a_group_is_refused() -> None:
    """FR-046: groups are explicit, never inferred."""
    with pytest.raises(InvariantError, match="no group_id"):
        await make_toy_trainer().train([make_trajectory(trajectory_id="t9")])


async def test_truncated_trajectories_are_counted() -> None:
    service = ToyTrainService()
    rows = drawn(service, num_groups=1)
    rows[0] = replace(rows[0], status=TrajectoryStatus.TRUNCATED, truncation_cause="length")
    metrics = await make_toy_trainer(service).train(rows)
    assert metrics["response_length/truncated_share"] == pytest.approx(1 / 3)


# --- supervised -------------------------------------------------------------------------------


def supervised() -> list[Trajectory]:
    rows = ([1, 2, 3], [1, 2, 3, 4, 5])
    return [
        Trajectory(tokens=np.array(ids), loss_mask=np.array([0] + [1] * (len(ids) - 1)))
        for ids in rows
    ]


async def test_supervised_loss_is_the_token_mean_of_the_negative_logprob() -> None:
    service = ToyTrainService()
    chunk = RowChunk.from_rows([np.array([1, 2, 3]), np.array([1, 2, 3, 4, 5])])
    expected = -bigram_logprobs(service.tables["actor"], chunk).sum() / 6
    metrics = await make_toy_trainer(service, kind=SftTrainer).train(supervised())
    assert metrics["loss/total"] == pytest.approx(expected, rel=1e-6)
    assert metrics["nll/token"] == pytest.approx(expected, rel=1e-6)


async def test_supervised_training_learns_the_rows() -> None:
    trainer = make_toy_trainer(kind=SftTrainer, optimizer={"lr": 5.0, "grad_clip_norm": 0.0})
    losses = [(await trainer.train(supervised()))["nll/token"] for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]


async def test_supervised_training_ignores_the_temperature_of_a_draw() -> None:
    service = ToyTrainService()
    rows = [Trajectory(rows=(drawn_row(service, [1, 2, 3], temperature=0.5),))]
    await make_toy_trainer(service, kind=SftTrainer).train(rows)
    assert {c.temperature for c in service.chunks} == {1.0}


def test_only_reinforcement_needs_rewards() -> None:
    assert make_toy_trainer().needs == ("reward",)
    assert make_toy_trainer(kind=SftTrainer).needs == ()
