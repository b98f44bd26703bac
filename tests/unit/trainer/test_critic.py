"""PPO with a critic: a second policy on the train service, trained beside the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nexrl.algorithms.metrics import METRIC_UNITS
from nexrl.checkpoint import CHECKPOINT_SCHEMA, CheckpointManifest, CheckpointStore, load_policies
from nexrl.config.schema_service import TrainServiceConfig
from nexrl.errors import ConfigError, InvariantError
from nexrl.services.train.backends.torch_backend import TorchTrainService
from nexrl.services.train.protocol import TrainService
from nexrl.testing.makers import make_batch, make_draw, make_group, make_record, make_row
from nexrl.testing.tiny_models import make_micro_model
from nexrl.testing.toy_train_service import ToyTrainService
from nexrl.testing.toy_trainer import drawn, make_toy_trainer
from nexrl.trainer.critic import CRITIC
from nexrl.types import Batch, ModelSpec, PolicyVersion, RolloutRecord

GAE: dict[str, Any] = {
    "advantage": {"name": "gae", "gae_lambda": 0.95},
    "critic": {"lr": 0.5, "grad_clip_norm": 0.0, "clip": None},
}


def batch_of(service: ToyTrainService) -> Batch:
    """Two groups of two, drawn by the toy's actor."""
    rows = drawn(service, num_groups=2, size=2)
    return make_batch([make_group((0.0, 1.0), item=i, rows=rows[2 * i].rows) for i in range(2)])


async def make_ppo(service: Any, **changes: Any) -> Any:
    trainer = make_toy_trainer(
        service, algorithm={**GAE, **changes.pop("algorithm", {})}, **changes
    )
    await trainer.setup()
    return trainer


async def test_the_critic_learns_the_returns() -> None:
    service = ToyTrainService()
    trainer = await make_ppo(service, optimizer={"lr": 0.0})
    rows = drawn(service, num_groups=8)
    metrics = [await trainer.train(rows) for _ in range(40)]
    assert metrics[-1]["values/loss"] < 0.75 * metrics[0]["values/loss"]
    assert metrics[-1]["values/explained_variance"] > metrics[0]["values/explained_variance"] == 0.0
    assert set(metrics[-1]) <= set(METRIC_UNITS)
    assert trainer.further_policies == (ModelSpec(policy=CRITIC, copy_of="actor", head="value"),)


async def test_both_policies_make_the_same_number_of_steps_with_their_own_optimizers() -> None:
    service = ToyTrainService()
    trainer = await make_ppo(service, num_optimizer_steps=2, max_chunk_bytes=1024)
    report = await trainer.train_batch(batch_of(service))
    steps = [policy for verb, policy in service.calls if verb == "optim_step"]
    assert sorted(steps) == ["actor", "actor", "critic", "critic"]
    rates = {params.lr for params in service.optim_params}
    assert rates == {trainer.config.optimizer.lr, 0.5}
    assert (report.num_optimizer_steps, report.unchanged) == (2, False)
    assert trainer.optimizer_step == 2


async def test_warm_up_trains_the_critic_alone() -> None:
    service = ToyTrainService()
    before = service.tables["actor"].copy()
    trainer = await make_ppo(service, algorithm={"critic": {**GAE["critic"], "warmup_batches": 2}})
    reports = [await trainer.train_batch(batch_of(service)) for _ in range(3)]
    assert [report.unchanged for report in reports] == [True, True, False]
    assert "loss/policy" not in reports[1].metrics
    assert reports[1].metrics["values/loss"] > 0
    assert (service.steps["actor"], service.steps[CRITIC]) == (1, 3)
    assert not np.array_equal(before, service.tables["actor"])


async def test_a_falling_learning_rate_ends_with_the_stage_though_the_critic_warmed_up_first() -> (
    None
):
    """A batch that trains the critic alone takes no step of the policy, and none of its schedule."""
    service = ToyTrainService()
    trainer = await make_ppo(
        service,
        num_steps=6,
        algorithm={"critic": {**GAE["critic"], "warmup_batches": 2}},
        optimizer={"lr": 1.0, "schedule": "linear", "grad_clip_norm": 0.0},
    )
    reports = [await trainer.train_batch(batch_of(service)) for _ in range(6)]
    rates = [report.metrics["lr"] for report in reports[2:]]
    assert rates == [1.0, 0.75, 0.5, 0.25]


async def test_any_split_into_chunks_gives_the_same_critic() -> None:
    found = []
    for num_bytes in (10**6, 1024):
        service = ToyTrainService()
        trainer = await make_ppo(service, max_chunk_bytes=num_bytes)
        metrics = [await trainer.train(drawn(service, num_groups=20)) for _ in range(2)][-1]
        found.append((service.tables[CRITIC], metrics))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-9)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6, abs=1e-9)


async def test_the_clip_holds_values_near_those_before_the_batch() -> None:
    service = ToyTrainService()
    trainer = await make_ppo(
        service, num_optimizer_steps=4, algorithm={"critic": {"lr": 5.0, "clip": 0.01}}
    )
    metrics = await trainer.train(drawn(service, num_groups=8))
    assert 0 < metrics["values/clip_share"] < 1


async def test_a_resume_without_the_critic_is_refused() -> None:
    trainer = make_toy_trainer(algorithm=GAE)
    trainer.load_state_dict(trainer.state_dict())
    with pytest.raises(InvariantError, match="needs the critic policy of the checkpoint"):
        await trainer.setup()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
async def test_a_critic_whose_gradient_is_not_finite_is_named() -> None:
    critic = {**GAE["critic"], "lr": 1e200}
    trainer = await make_ppo(ToyTrainService(), num_optimizer_steps=2, algorithm={"critic": critic})
    with pytest.raises(InvariantError, match="gradient of policy 'critic' in optimizer step 2"):
        await trainer.train(drawn(trainer.train_service))


# --- resume equals not stopping -------------------------------------------------------------------


def micro_batch(number: int) -> Batch:
    """Rows over the micro model's vocabulary; other ones for each batch."""
    generator = np.random.default_rng(number)

    def record(item: int, member: int) -> RolloutRecord:
        ids = generator.integers(3, 12, 4).tolist()
        rows = (make_row(prompt_ids=(3, 4), response_ids=ids),)
        return make_record(make_draw(item), member, reward=float(member), rows=rows)

    groups = [
        make_group(item=item, records=[record(item, member) for member in range(2)])
        for item in range(2)
    ]
    return make_batch(groups, version=number)


def manifest() -> CheckpointManifest:
    return CheckpointManifest(
        schema=CHECKPOINT_SCHEMA,
        stage="main",
        stage_index=0,
        stage_step=2,
        global_step=2,
        stage_done=False,
        version="actor@0.2",
        fingerprint="f",
        config={},
        code_version={},
    )


async def weights(service: TrainService, folder: Path) -> dict[str, str]:
    """Checksums of the actor's tensors."""
    found = await service.publish_weights("actor", PolicyVersion(number=9), str(folder))
    return {tensor.name: tensor.checksum for tensor in found.tensors}


RICH = {
    **GAE,
    "critic": {"lr": 1e-2, "warmup_batches": 1},
    "kl": {"coefficient": 0.1},
    "recompute_proximal": True,
}


async def test_resume_equals_not_stopping_for_policy_critic_and_reference(tmp_path: Path) -> None:
    """Weights and moments of both optimizers, the warm-up count and the reference come back."""
    model = str(make_micro_model(tmp_path / "model"))

    async def begin(folder: Path | None) -> tuple[TorchTrainService, Any]:
        service = TorchTrainService(TrainServiceConfig(num_threads=1), deterministic=True)
        trainer = make_toy_trainer(service, algorithm=RICH, optimizer={"lr": 1e-2})  # type: ignore[arg-type]
        if folder is None:
            await service.create(ModelSpec(path=model))
        else:
            trainer.load_state_dict(state)
            actor = ModelSpec(path=model)
            await load_policies(folder, service, [actor, *trainer.further_policies])
        await trainer.setup()
        return service, trainer

    state: dict[str, Any] = {}
    service, trainer = await begin(None)
    for number in range(2):
        await trainer.train_batch(micro_batch(number))
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    folder = await store.save(manifest(), {}, service, further_policies=trainer.further_policies)
    state = trainer.state_dict()
    ends = []
    for number, run in enumerate(((service, trainer), await begin(folder))):
        metrics = [(await run[1].train_batch(micro_batch(i))).metrics for i in (2, 3)]
        ends.append((await weights(run[0], tmp_path / f"out{number}"), metrics))
        await run[0].aclose()
    assert ends[0] == ends[1]
    assert ends[0][1][-1]["values/loss"] > 0


async def test_a_policy_that_the_checkpoint_does_not_hold_is_named(tmp_path: Path) -> None:
    """A resume with a KL term that was not there before."""
    service = ToyTrainService()
    folder = await CheckpointStore(tmp_path, keep_last=1).save(manifest(), {}, service)
    reference = ModelSpec(policy="reference", copy_of="actor", trainable=False)
    with pytest.raises(ConfigError, match=r"holds no policy 'reference' \(it holds: actor\)"):
        await load_policies(folder, service, [reference])
