"""Any advantage, loss, correction, KL placement and entropy term, in one trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.losses import LOSSES
from nexrl.algorithms.metrics import METRIC_UNITS
from nexrl.errors import ConfigError, InvariantError
from nexrl.testing.makers import make_batch
from nexrl.testing.toy_train_service import ToyTrainService, bigram_logprobs
from nexrl.testing.toy_trainer import drawn, drawn_row, make_toy_trainer
from nexrl.types import (
    BackwardOutput,
    Column,
    PolicyVersion,
    RowChunk,
    Trajectory,
    TrajectoryStatus,
    Turn,
)

POLICY_LOSSES = [name for name, loss in LOSSES.items() if "advantage" in loss.required]


async def trained(
    service: ToyTrainService, rows: list[Trajectory], **settings: Any
) -> tuple[Any, dict[str, float]]:
    """The trainer and its metrics after one batch."""
    trainer = make_toy_trainer(service, **settings)
    await trainer.setup()
    return trainer, await trainer.train(rows)


def loss_settings(name: str) -> dict[str, Any]:
    """A loss with the aggregation that it is defined for."""
    fixed = LOSSES[name].aggregation
    return {"name": name, **({"aggregation": fixed} if fixed else {})}


@pytest.mark.parametrize("loss", POLICY_LOSSES)
async def test_every_policy_loss_trains_and_its_parts_add_up_under_any_split(loss: str) -> None:
    """FR-031, FR-040: each additive term has one denominator, whatever the chunks."""
    algorithm = {
        "loss": loss_settings(loss),
        "kl": {"coefficient": 0.1, "estimator": "k2"},
        "entropy": {"coefficient": 0.01},
        "correction": {"action": "truncate", "high": 2.0},
    }
    found = []
    for num_bytes in (10**6, 1024):
        service = ToyTrainService()
        rows = drawn(service, num_groups=8)
        service.tables["actor"] = service.tables["actor"] + np.eye(service.vocab_size)
        _, metrics = await trained(
            service,
            rows,
            algorithm=algorithm,
            max_chunk_bytes=num_bytes,
            num_optimizer_steps=2,
            optimizer={"lr": 0.01, "grad_clip_norm": 0.0},
        )
        parts = metrics["loss/policy"] + metrics["loss/kl"] + metrics["loss/entropy"]
        assert metrics["loss/total"] == pytest.approx(parts, rel=1e-5, abs=1e-7)
        assert set(metrics) <= set(METRIC_UNITS)
        found.append((service.tables["actor"], metrics))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k1+", "k3+"])
async def test_a_step_on_the_kl_term_alone_lowers_the_kl(estimator: str) -> None:
    """FR-097: no policy gradient, coefficient 1; FR-098: the name says which estimator."""
    service = ToyTrainService()
    algorithm = {"kl": {"coefficient": 1.0, "estimator": estimator}}
    trainer = make_toy_trainer(service, algorithm=algorithm, optimizer={"lr": 0.05})
    await trainer.setup()
    service.tables["actor"] = service.tables["actor"] + np.eye(service.vocab_size)
    rows = drawn(service, reward=1.0)
    first = await trainer.train(rows)
    second = await trainer.train(rows)
    assert first["advantage/max_abs"] == 0.0
    assert abs(second[f"kl/{estimator}"]) < abs(first[f"kl/{estimator}"])


async def test_kl_in_the_reward_prefers_what_the_reference_prefers() -> None:
    """FR-097, FR-098: the penalty lowers rewards where the policy has left the reference."""
    service = ToyTrainService()
    kl = {"coefficient": 0.5, "estimator": "k1", "placement": "reward"}
    trainer = make_toy_trainer(
        service, algorithm={"kl": kl, "advantage": {"name": "dr_grpo"}}, optimizer={"lr": 0.0}
    )
    await trainer.setup()
    reference = service.tables["actor"].copy()
    service.tables["actor"] = reference + np.eye(service.vocab_size)
    rows = drawn(service, num_groups=1, size=2, reward=1.0)
    metrics = await trainer.train(rows)
    penalties = []
    for t in rows:
        chunk = RowChunk.from_rows([t.rows[0].token_ids])
        policy, frozen = (
            bigram_logprobs(x, chunk).astype(np.float64)
            for x in (service.tables["actor"], reference)
        )
        penalties.append(float((policy - frozen)[t.rows[0].loss_mask].sum()))
    expected = -0.5 * (penalties[0] - np.mean(penalties))
    advantage = service.chunks[0].inputs["advantage"]
    assert advantage[advantage != 0][0] == pytest.approx(expected, rel=1e-4)
    tokens = sum(t.num_response_tokens for t in rows)
    assert metrics["kl/k1"] == pytest.approx(sum(penalties) / tokens, rel=1e-4)
    assert "loss/kl" not in metrics
    assert "reference_logprobs" not in service.chunks[0].inputs


async def test_a_correction_zeroes_tokens_and_keeps_the_denominator() -> None:
    """FR-038: what a mask zeroes stays counted, so the weight of the others does not rise."""
    service = ToyTrainService()
    rows = drawn(service)
    service.tables["actor"] = service.tables["actor"] + 2 * np.eye(service.vocab_size)
    settings = {"correction": {"action": "mask", "high": 1.05, "low": 0.95}}
    _, metrics = await trained(service, rows, algorithm=settings)
    (chunk,) = service.chunks
    tokens = sum(t.num_response_tokens for t in rows)
    trained_at = chunk.inputs["weight"] != 0
    masked = (chunk.inputs["correction"] == 0)[trained_at]
    assert 0 < masked.mean() < 1
    assert chunk.inputs["weight"].max() == pytest.approx(1 / tokens)
    assert metrics["correction/masked_share"] == pytest.approx(masked.mean())
    assert metrics["ratio/mean"] == pytest.approx(1.0)  # proximal is recomputed


@pytest.mark.parametrize(("level", "warned"), [("sequence", True), ("geometric", False)])
async def test_a_correction_that_masks_most_of_a_batch_raises_an_alarm(
    level: str, warned: bool
) -> None:
    """FR-088: 300 tokens, 0.005 nats apart on each: the product is 4.48, the mean is 1.005."""
    service = ToyTrainService()
    ids = np.random.default_rng(0).integers(0, service.vocab_size, 301)
    row = drawn_row(service, ids.tolist())
    assert row.behavior_logprobs is not None
    shift = np.where(row.loss_mask, np.float32(0.005), np.float32(0.0))
    shifted = replace(row, behavior_logprobs=row.behavior_logprobs - shift)
    rows = [Trajectory(rows=(shifted,), reward=float(i), group_id="g") for i in range(2)]
    settings = {"correction": {"level": level, "action": "mask", "high": 3.0}}
    trainer, metrics = await trained(service, rows, algorithm=settings)
    assert metrics["correction/masked_share"] == float(warned)
    assert any("correction/masked_share" in w for w in trainer.tracker.warnings) == warned


async def test_mismatch_is_logged_without_a_correction_and_by_position() -> None:
    service = ToyTrainService()
    rows = drawn(service)
    service.tables["actor"] = service.tables["actor"] + np.eye(service.vocab_size)
    _, metrics = await trained(service, rows)
    assert metrics["mismatch/abs_mean"] > 0
    assert metrics["mismatch/abs_mean_to_64"] == pytest.approx(metrics["mismatch/abs_mean"])
    assert "correction/ess" not in metrics


async def test_with_a_learning_rate_of_zero_the_mismatch_does_not_grow() -> None:
    """FR-091: rows get longer batch after batch, weights do not move, and neither does the gap."""
    service = ToyTrainService()
    trainer = make_toy_trainer(service, optimizer={"lr": 0.0})
    found = []
    for length in range(4, 24):
        ids = np.random.default_rng(length).integers(0, service.vocab_size, (2, length))
        rows = [
            Trajectory(rows=(drawn_row(service, row.tolist()),), reward=float(i), group_id="g")
            for i, row in enumerate(ids)
        ]
        found.append((await trainer.train(rows))["mismatch/abs_mean"])
    slope = np.polyfit(np.arange(len(found)), found, 1)[0]
    assert abs(slope) < 1e-8
    assert max(found) < 1e-6


async def test_raw_and_processed_logprobs_of_a_tempered_draw_train_alike() -> None:
    """FR-095, FR-089: logprobs of another distribution are recomputed, never used as they are."""
    tables = []
    for kind in ("tempered", "raw"):
        service = ToyTrainService()
        rows = []
        for i, ids in enumerate(([1, 2, 3, 4], [5, 6, 7])):
            row = drawn_row(service, ids, temperature=0.7)
            if kind == "raw":
                plain = drawn_row(service, ids)
                logprobs = plain.behavior_logprobs
                row = replace(row, behavior_logprobs=logprobs, logprob_kind="raw")
            rows.append(Trajectory(rows=(row,), reward=float(i), group_id="g"))
        await trained(service, rows)
        tables.append(service.tables["actor"])
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-6)


# --- shaping, entropy, baselines ----------------------------------------------------------------


async def test_masked_truncated_trajectories_leave_loss_and_denominator_and_stay_in_the_baseline() -> (
    None
):
    """FR-032: the others weigh as if alone; all masked makes no step and no NaN."""
    service = ToyTrainService()
    rows = drawn(service, num_groups=1, size=3)
    cut: dict[str, Any] = {"status": TrajectoryStatus.TRUNCATED, "truncation_cause": "length"}
    rows[2] = replace(rows[2], **cut)
    settings = {"shaping": {"mask_truncated": True}, "advantage": {"name": "dr_grpo"}}
    _, metrics = await trained(service, rows, algorithm=settings)
    (chunk,) = service.chunks
    tokens = sum(t.num_response_tokens for t in rows[:2])
    assert chunk.num_rows == 2
    assert chunk.inputs["weight"].max() == pytest.approx(1 / tokens)
    assert np.unique(chunk.inputs["advantage"]).tolist() == pytest.approx([-1 / 3, 0, 2 / 3])
    assert (metrics["reward/masked"], metrics["reward/trained_mean"]) == (1, 0.5)
    _, nothing = await trained(service, [replace(t, **cut) for t in rows], algorithm=settings)
    assert all(np.isfinite(value) for value in nothing.values())
    assert len(service.chunks) == 1


async def test_length_penalties_reach_advantages_and_not_the_reward_metrics() -> None:
    service = ToyTrainService()
    rows = drawn(service, num_groups=1, size=2, reward=1.0)
    settings = {"shaping": {"length_penalty": 0.1}, "advantage": {"name": "dr_grpo"}}
    _, metrics = await trained(service, rows, algorithm=settings)
    assert metrics["reward/trained_mean"] == 1.0
    assert metrics["reward/shaped_mean"] < 1.0
    assert metrics["advantage/max_abs"] == pytest.approx(0.05)
    assert metrics["group/constant_share"] == 0.0


async def test_what_shaping_takes_is_a_reward_part_of_its_own_for_gdpo() -> None:
    service = ToyTrainService()
    rows = drawn(service, num_groups=1, size=2, reward=1.0, reward_parts={"answer": 1.0})
    settings = {
        "shaping": {"length_penalty": 0.1},
        "advantage": {"name": "gdpo", "whiten": False, "part_weights": {"shaping": 3.0}},
    }
    _, metrics = await trained(service, rows, algorithm=settings)
    assert metrics["advantage/max_abs"] == pytest.approx(3.0 / 2**0.5, rel=1e-4)


async def test_the_entropy_coefficient_rises_below_its_target_and_falls_above() -> None:
    service = ToyTrainService()
    entropy = {"coefficient": 0.002, "target": 100.0, "rate": 0.001}
    trainer = make_toy_trainer(service, algorithm={"entropy": entropy})
    rows = drawn(service)
    used = [(await trainer.train(rows))["entropy/coefficient"] for _ in range(3)]
    assert used == pytest.approx([0.002, 0.003, 0.004])
    low = make_toy_trainer(service, algorithm={"entropy": {**entropy, "target": 1e-6}})
    used = [(await low.train(rows))["entropy/coefficient"] for _ in range(4)]
    assert used == pytest.approx([0.002, 0.001, 0.0, 0.0])


class Overflowing(ToyTrainService):
    """No entropy and no gradient of its is a number, as when logits overflow."""

    async def forward_backward(self, policy: str, *args: Any, **kwargs: Any) -> BackwardOutput:
        found = await super().forward_backward(policy, *args, **kwargs)
        self.gradients[policy] = np.full_like(self.tables[policy], np.nan)
        broken = np.full_like(found.outputs["entropy"], np.nan)
        return replace(found, outputs={**found.outputs, "entropy": broken})


async def test_a_skipped_step_without_an_entropy_leaves_the_coefficient_where_it_is() -> None:
    entropy = {"coefficient": 0.002, "target": 1.0}
    service = Overflowing()
    trainer = make_toy_trainer(
        service, algorithm={"entropy": entropy}, on_nonfinite_gradient="skip"
    )
    metrics = await trainer.train(drawn(service))
    assert metrics["optimizer/skipped"] == 1
    assert trainer.state_dict()["entropy_coefficient"] == 0.002


async def test_entropy_coefficient_and_moving_baseline_survive_a_resume() -> None:
    algorithm = {
        "entropy": {"target": 100.0},
        "advantage": {"name": "reinforce", "baseline": "moving"},
        "loss": {"name": "reinforce"},
    }
    services = [ToyTrainService(), ToyTrainService()]
    whole, first = (make_toy_trainer(s, algorithm=algorithm) for s in services)
    batches = [drawn(services[0], reward=reward) for reward in (0.0, 1.0, 3.0)]
    for rows in batches:
        await whole.train(rows)
    for rows in batches[:2]:
        await first.train(rows)
    second = make_toy_trainer(services[1], algorithm=algorithm)
    second.load_state_dict(first.state_dict())
    await second.train(batches[2])
    assert second.state_dict() == whole.state_dict()
    assert whole.state_dict()["moving_baseline"] not in (None, 0.0)
    np.testing.assert_array_equal(services[0].tables["actor"], services[1].tables["actor"])


# --- what an estimator needs ----------------------------------------------------------------------


async def test_remax_subtracts_the_greedy_reward_and_misses_it_by_name() -> None:
    service = ToyTrainService()
    rows = drawn(service, num_groups=1, size=2, reward=2.0, extra={"greedy_reward": 0.5})
    settings = {"advantage": {"name": "remax"}}
    trainer, metrics = await trained(service, rows, algorithm=settings)
    assert metrics["advantage/mean"] == 1.5
    assert trainer.needs == ("reward", "greedy_reward")
    rows[1] = replace(rows[1], extra={})
    with pytest.raises(InvariantError, match=r"'t0\.1' .*greedy_reward.*greedy_baseline"):
        await trainer.train(rows)


def turns_of(*rewards: float | None, anchor: str = "") -> tuple[Turn, ...]:
    """Turns of one token each, behind a prompt of one."""
    return tuple(
        Turn(start=i + 1, end=i + 2, reward=reward, anchor=anchor and f"{anchor}{i}")
        for i, reward in enumerate(rewards)
    )


async def test_rewards_of_turns_are_returned_to_the_turns_before() -> None:
    service = ToyTrainService()
    rows = [
        Trajectory(
            rows=(drawn_row(service, [1, 2, 3], turns=turns_of(None, 1.0)),),
            reward=0.0,
            group_id="g",
            trajectory_id="t0",
        )
    ]
    settings = {"advantage": {"name": "step_returns", "gamma": 0.5}}
    trainer, _ = await trained(service, rows, algorithm=settings)
    assert len(service.chunks) == 1
    bare = replace(rows[0], rows=(drawn_row(service, [1, 2, 3], turns=turns_of(None, None)),))
    with pytest.raises(InvariantError, match=r"'t0' .*no turn with a reward"):
        await trainer.train([bare])


async def test_gigpo_needs_anchor_states() -> None:
    service = ToyTrainService()
    settings = {"advantage": {"name": "gigpo"}}

    def made(anchor: str) -> list[Trajectory]:
        return [
            Trajectory(
                rows=(drawn_row(service, [1, 2, 3], turns=turns_of(float(i), 0.0, anchor=anchor)),),
                reward=float(i),
                group_id="g",
                trajectory_id=f"t{i}",
            )
            for i in range(2)
        ]

    trainer, metrics = await trained(service, made("s"), algorithm=settings)
    assert metrics["advantage/max_abs"] > 0
    with pytest.raises(InvariantError, match=r"'t0' .*anchor"):
        await trainer.train(made(""))


async def test_reward_parts_that_only_some_have_are_missed_by_name() -> None:
    service = ToyTrainService()
    rows = drawn(service, num_groups=1, size=2, reward_parts={"format": 1.0})
    rows[1] = replace(rows[1], reward_parts={})
    settings = {"advantage": {"name": "gdpo"}}
    with pytest.raises(InvariantError, match=r"'t0\.1' .*no reward part \['format'\]"):
        await trained(service, rows, algorithm=settings)


# --- distillation -----------------------------------------------------------------------------------


async def teacher_folder(service: ToyTrainService, folder: Path) -> str:
    """A teacher on disk, other than the policy."""
    keep = service.tables["actor"]
    service.tables["actor"] = keep + np.random.default_rng(9).normal(size=keep.shape)
    await service.publish_weights("actor", PolicyVersion(number=0), str(folder))
    service.tables["actor"] = keep
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize(
    "loss", ["reverse_kl", "reverse_kl_top_k", "forward_kl_top_k", "jsd_top_k"]
)
async def test_distillation_approaches_the_teacher_without_any_reward(
    tmp_path: Path, loss: str
) -> None:
    service = ToyTrainService()
    path = await teacher_folder(service, tmp_path / "teacher")
    settings = {"loss": {"name": loss}, "teacher": {"path": path, "top_k": 4}}
    trainer = make_toy_trainer(
        service,
        algorithm=settings,
        max_chunk_bytes=2048,
        optimizer={"lr": 5.0, "grad_clip_norm": 0.0},
    )
    await trainer.setup()
    assert trainer.needs == ()
    losses = [
        (await trainer.train(drawn(service, num_groups=8, reward=None)))["loss/policy"]
        for _ in range(30)
    ]
    assert losses[-1] < 0.7 * losses[0]


async def test_the_distill_advantage_reads_the_teachers_column_of_rows() -> None:
    service = ToyTrainService()
    row = drawn_row(service, [1, 2, 3], teacher_logprobs=[0.0, -0.5, -0.25])
    rows = [Trajectory(rows=(row,), group_id="g", trajectory_id="t7")]
    settings = {"advantage": {"name": "distill"}, "loss": {"name": "importance_sampling"}}
    trainer, _ = await trained(service, rows, algorithm=settings)
    assert trainer.needs == ("teacher",)
    assert row.behavior_logprobs is not None
    expected = np.array([-0.5, -0.25]) - row.behavior_logprobs[1:]
    np.testing.assert_allclose(service.chunks[0].inputs["advantage"][1:], expected, rtol=1e-5)
    with pytest.raises(InvariantError, match=r"'t7' .*no column 'teacher_logprobs'"):
        await trainer.train([replace(rows[0], rows=(drawn_row(service, [1, 2, 3]),))])


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss": {"name": "nonsense"}}, "no loss is named 'nonsense'"),
        ({"loss": {"name": "reinforce", "clip_low": 0.1}}, "has no setting"),
        ({"loss": {"name": "gspo", "aggregation": "token_mean"}}, "is defined for"),
        (
            {"loss": {"name": "cross_entropy"}, "correction": {"action": "mask", "high": 2.0}},
            r"correction\.action: loss 'cross_entropy' takes no correction, got 'mask'",
        ),
        ({"loss": {"name": "forward_kl_top_k"}}, "teacher.path"),
        ({"advantage": {"name": "nonsense"}}, "no advantage estimator"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, "k1"),
    ],
)
def test_impossible_combinations_are_refused_before_training(
    algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_toy_trainer(algorithm=algorithm)


async def test_only_groups_with_signal_arrive_and_nothing_arriving_changes_nothing() -> None:
    """FR-050: the pool's filter sees [1, 1], [0, 0], [1, 0] one by one; the trainer an empty batch
    when none is left."""
    from nexrl.algorithms.filters import constant_reward
    from nexrl.testing.makers import make_group

    groups = [make_group(rewards, item=i) for i, rewards in enumerate(([1, 1], [0, 0], [1, 0]))]
    assert [constant_reward(group) for group in groups] == ["constant_reward"] * 2 + [None]
    assert (await make_toy_trainer().train_batch(make_batch(groups=()))).unchanged


async def test_a_loss_that_prepares_sees_each_whole_step_at_the_weights_it_starts_from() -> None:
    """Two steps, several chunks each: forward of all, then backward of all, then the next step."""
    service = ToyTrainService()
    _, metrics = await trained(
        service,
        drawn(service, num_groups=40),
        algorithm={"loss": {"name": "bapo"}},
        num_optimizer_steps=2,
        max_chunk_bytes=1024,
    )
    verbs = [verb for verb, _ in service.calls]
    ends = [i for i, verb in enumerate(verbs) if verb == "optim_step"]
    for calls in (verbs[: ends[0]], verbs[ends[0] + 1 : ends[1]]):
        assert calls == sorted(calls)  # every forward stands before every forward_backward
        assert min(calls.count("forward"), calls.count("forward_backward")) > 1
    assert metrics["loss/clip_high"] >= 0.2


@pytest.mark.parametrize(
    "column",
    [
        Column(values=np.zeros((3, 1), np.float32)),
        Column(values=np.zeros(3, np.float32), alignment="state_at_token"),
    ],
)
async def test_a_column_that_is_no_number_about_each_token_is_refused(column: Column) -> None:
    """A wider one would be stretched over all tokens, one about states is shifted by a token."""
    service = ToyTrainService()
    bare = drawn_row(service, [1, 2, 3])
    rows = (replace(bare, columns={"teacher_logprobs": column}),)
    trainer = make_toy_trainer(service, algorithm={"loss": {"name": "reverse_kl"}})
    with pytest.raises(InvariantError, match=r"'t7' .*column 'teacher_logprobs' has shape"):
        await trainer.train([Trajectory(rows=rows, group_id="g", trajectory_id="t7")])
    assert not service.chunks


@pytest.mark.parametrize("advantage", ADVANTAGES)
async def test_a_batch_in_which_nothing_is_scored_trains_nothing(advantage: str) -> None:
    """FR-070: None is no 0, also when there is nothing else."""
    service = ToyTrainService()
    column = Column(values=np.zeros(3, np.float32))
    row = replace(drawn_row(service, [1, 2, 3]), columns={"teacher_logprobs": column})
    settings = {"advantage": {"name": advantage, "task_coefficient": 1.0}}
    rows = [Trajectory(rows=(row,), group_id="g", trajectory_id=f"t{i}") for i in range(2)]
    _, metrics = await trained(service, rows, algorithm=settings)
    assert metrics == {"reward/abstained": 2.0}
    assert not service.chunks


async def test_a_greedy_reward_may_be_any_real_number() -> None:
    """What the pool has let in (`door.py`) is not refused here."""
    service = ToyTrainService()
    rows = drawn(service, extra={"greedy_reward": np.float32(0.5)})
    _, metrics = await trained(service, rows, algorithm={"advantage": {"name": "remax"}})
    assert metrics["advantage/max_abs"] == 0.5


async def test_a_teacher_of_another_vocabulary_is_said(tmp_path: Path) -> None:
    path = await teacher_folder(ToyTrainService(20), tmp_path / "teacher")
    algorithm = {"advantage": {"name": "distill"}, "teacher": {"path": path}}
    trainer, _ = await trained(service := ToyTrainService(), drawn(service), algorithm=algorithm)
    assert "the teacher's vocabulary has 20 ids, the policy's 16" in trainer.tracker.warnings[0]
