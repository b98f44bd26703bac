"""The PyTorch back end as a service: checkpoints, copies, determinism, closing."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.config.schema import TrainServiceConfig
from nexrl.errors import ConfigError, InvariantError, ServiceError
from nexrl.services.train.backends.adamw import AdamW
from nexrl.services.train.backends.hf_model import load_value_model, row_values
from nexrl.services.train.backends.torch_backend import TorchTrainService
from nexrl.testing.contracts.train_subject import CROSS_ENTROPY, STEP, contract_chunk
from nexrl.testing.tiny_models import make_micro_model
from nexrl.types import FloatArray, LossSpec, ModelSpec, OptimParams, PolicyVersion


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(make_micro_model(folder, vocab="chat", chat_template=True))


@asynccontextmanager
async def hosting(
    model: str, *, deterministic: bool = False, **config: Any
) -> AsyncIterator[TorchTrainService]:
    service = TorchTrainService(TrainServiceConfig(**config), deterministic=deterministic)
    try:
        await service.create(ModelSpec(path=model))
        yield service
    finally:
        await service.aclose()


async def train(service: TorchTrainService, *seeds: int) -> None:
    for seed in seeds:
        await service.forward_backward("actor", contract_chunk(seed=seed), CROSS_ENTROPY)
        await service.optim_step("actor", STEP)


async def checksum(service: TorchTrainService, folder: Path) -> str:
    version = PolicyVersion(number=1)
    return (await service.publish_weights("actor", version, str(folder))).checksum


async def test_state_folder_is_a_model_that_transformers_loads(model: str, tmp_path: Path) -> None:
    """FR-136, FR-137: weights, tokenizer, template and generation config; equal logprobs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    async with hosting(model) as service:
        await train(service, 0)
        await service.save_state("actor", str(tmp_path / "state"))
        chunk = contract_chunk((6,))
        found = (await service.forward("actor", chunk)).outputs["logprobs"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "state" / "hf")
    ids = torch.from_numpy(chunk.token_ids.astype(np.int64))
    with torch.no_grad():
        log_p = torch.log_softmax(loaded(ids[None]).logits[0, :-1], -1)
    np.testing.assert_allclose(found[1:], log_p.gather(1, ids[1:, None])[:, 0], atol=1e-5)
    assert loaded.generation_config.eos_token_id is not None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "state" / "hf")
    messages = [{"role": "user", "content": "2+2"}]
    assert "2+2" in tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("file", ["optimizer.safetensors", "rng.safetensors", "state.json"])
async def test_damage_to_a_state_folder_is_named_and_changes_nothing(
    file: str, model: str, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    async with hosting(model) as service:
        await train(service, 0)
        await service.save_state("actor", str(path))
        (path / file).write_bytes((path / file).read_bytes()[:20])
        await train(service, 1)
        before = await checksum(service, tmp_path / "before")
        with pytest.raises(InvariantError, match=file):
            await service.load_state("actor", str(path))
        assert await checksum(service, tmp_path / "after") == before


async def test_state_of_another_model_or_a_newer_schema_is_refused(
    model: str, tmp_path: Path
) -> None:
    other = make_micro_model(tmp_path / "other", vocab="chat", layers=3)
    async with hosting(str(other)) as service:
        await service.save_state("actor", str(tmp_path / "state"))
    async with hosting(model) as service:
        with pytest.raises(ConfigError, match="another model"):
            await service.load_state("actor", str(tmp_path / "state"))
        file = tmp_path / "state" / "state.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": 99}))
        with pytest.raises(ConfigError, match="schema version 99"):
            await service.load_state("actor", str(tmp_path / "state"))


async def test_random_numbers_go_on_where_the_state_was_saved(model: str, tmp_path: Path) -> None:
    async with hosting(model) as service:
        await service.save_state("actor", str(tmp_path / "state"))
        expected = torch.rand(3)
        await service.load_state("actor", str(tmp_path / "state"))
        assert torch.equal(torch.rand(3), expected)


async def test_two_deterministic_runs_end_with_the_same_bits(model: str, tmp_path: Path) -> None:
    found = []
    try:
        for name in ("a", "b"):
            async with hosting(model, deterministic=True, micro_batch_tokens=8) as service:
                await train(service, 0, 1, 2)
                found.append(await checksum(service, tmp_path / name))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0] == found[1]


async def test_rows_in_another_order_of_chunks_give_other_bits_but_the_same_gradient(
    model: str,
) -> None:
    """What determinism does not promise: another order of addition."""
    async with hosting(model) as service:
        norms = []
        for seeds in ((0, 1), (1, 0)):
            for seed in seeds:
                await service.forward_backward("actor", contract_chunk(seed=seed), CROSS_ENTROPY)
            norms.append((await service.optim_step("actor", OptimParams(lr=0.0))).grad_norm)
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


async def test_event_loop_runs_while_torch_works(model: str) -> None:
    async with hosting(model) as service:
        ticks = 0
        call = asyncio.ensure_future(
            service.forward("actor", contract_chunk(tuple([20] * 200)), outputs=("entropy",))
        )
        while not call.done():
            ticks += 1
            await asyncio.sleep(0)
        assert ticks > 10


async def test_call_cancelled_before_its_turn_has_no_effect(model: str) -> None:
    async with hosting(model) as service:
        await train(service, 0)
        long = asyncio.ensure_future(service.forward("actor", contract_chunk(tuple([20] * 100))))
        doomed = asyncio.ensure_future(service.optim_step("actor", STEP))
        await asyncio.sleep(0)
        doomed.cancel()
        await long
        assert (await service.info("actor")).optimizer_step == 1


async def test_closing_ends_the_thread_and_refuses_further_calls(model: str) -> None:
    async with hosting(model, micro_batch_tokens=1) as service:
        running = asyncio.ensure_future(service.forward("actor", contract_chunk(tuple([9] * 500))))
        queued = asyncio.ensure_future(service.info("actor"))
        await asyncio.sleep(0)
        await service.aclose()
        results = await asyncio.gather(running, queued, return_exceptions=True)
        assert [type(r) for r in results] == [ServiceError, ServiceError]
        with pytest.raises(ServiceError, match="closed"):
            await service.info("actor")
    assert not [t for t in threading.enumerate() if t.name.startswith("train-service")]


@pytest.mark.parametrize("device", ["cuda:7", "gpu"])
def test_device_that_is_not_here_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"train_service\.device.*{device}"):
        TorchTrainService(TrainServiceConfig(device=device))


async def test_bfloat16_service_publishes_bfloat16_and_saves_float32(
    model: str, tmp_path: Path
) -> None:
    from safetensors import safe_open

    async with hosting(model, dtype="bfloat16") as service:
        manifest = await service.publish_weights("actor", PolicyVersion(), str(tmp_path / "v0"))
        await service.save_state("actor", str(tmp_path / "state"))
    assert {t.dtype for t in manifest.tensors} == {"BF16"}
    with safe_open(tmp_path / "state" / "hf" / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.norm.weight").dtype == torch.float32


# --- a critic beside the actor ----------------------------------------------------------------------

VALUE = LossSpec(name="value", config={"clip": None})


async def train_critic(service: TorchTrainService, *seeds: int) -> None:
    for seed in seeds:
        chunk = contract_chunk(seed=seed, loss="value")
        await service.forward_backward("critic", chunk, VALUE, outputs=("values",))
        await service.optim_step("critic", STEP)


async def critic_values(service: TorchTrainService, policy: str = "critic") -> FloatArray:
    found = await service.forward(policy, contract_chunk(), outputs=("values",))
    return found.outputs["values"]


@pytest.mark.parametrize("source", ["state", "state/hf", "publication"])
async def test_head_is_found_in_every_folder_that_a_value_policy_leaves(
    source: str, model: str, tmp_path: Path
) -> None:
    async with hosting(model) as service:
        await service.create(ModelSpec(policy="critic", copy_of="actor", head="value"))
        await train_critic(service, 0, 1)
        await service.save_state("critic", str(tmp_path / "state"))
        version = PolicyVersion(policy="critic")
        manifest = await service.publish_weights("critic", version, str(tmp_path / "publication"))
        assert "value_head.weight" in [t.name for t in manifest.tensors]
        spec = ModelSpec(policy="again", path=str(tmp_path / source), head="value")
        await service.create(spec)
        np.testing.assert_array_equal(
            await critic_values(service, "again"), await critic_values(service)
        )
    scorer = load_value_model(str(tmp_path / source))
    assert row_values(scorer, [np.array([3, 4], np.int32)])[0] != 0.0


async def test_critic_resumes_bit_by_bit_with_the_moments_of_its_head(
    model: str, tmp_path: Path
) -> None:
    async with hosting(model) as service:
        critic = ModelSpec(policy="critic", path=model, head="value")
        await service.create(critic)
        await train_critic(service, 0)
        await service.save_state("critic", str(tmp_path / "state"))
        await train_critic(service, 1, 2)
        straight = await critic_values(service)
        await service.create(critic)
        await service.load_state("critic", str(tmp_path / "state"))
        await train_critic(service, 1, 2)
        np.testing.assert_array_equal(await critic_values(service), straight)


async def test_actor_and_critic_have_gradients_and_optimizers_of_their_own(model: str) -> None:
    async with hosting(model) as service:
        await service.create(ModelSpec(policy="critic", copy_of="actor", head="value"))
        alone = []
        for with_critic in (False, True):
            await service.create(ModelSpec(path=model))
            await service.forward_backward("actor", contract_chunk(), CROSS_ENTROPY)
            if with_critic:
                await train_critic(service, 0)
            alone.append((await service.optim_step("actor", STEP)).grad_norm)
        assert alone[0] == alone[1]
        assert (await service.info("critic")).optimizer_step == 1


async def test_dropped_policy_frees_its_weights_and_moments(model: str) -> None:
    async with hosting(model) as service:
        await service.create(ModelSpec(policy="critic", copy_of="actor", head="value"))
        await train_critic(service, 0)
        hosted = service._policies["critic"]
        parts = [
            weakref.ref(part) for part in (hosted.model.module, *hosted.optimizer.state().values())
        ]
        del hosted
        await service.drop("critic")
        assert [part() for part in parts] == [None] * len(parts)


async def test_state_written_before_there_were_heads_is_a_language_model(
    model: str, tmp_path: Path
) -> None:
    async with hosting(model) as service:
        await train(service, 0)
        await service.save_state("actor", str(tmp_path / "state"))
        file = tmp_path / "state" / "state.json"
        state = json.loads(file.read_text())
        assert state.pop("head") == "lm"
        file.write_text(json.dumps(state))
        assert (await service.load_state("actor", str(tmp_path / "state"))).optimizer_step == 1


# --- AdamW --------------------------------------------------------------------------------------


def make_parameters() -> dict[str, torch.nn.Parameter]:
    return {
        "matrix": torch.nn.Parameter(torch.ones(2, 2)),
        "vector": torch.nn.Parameter(torch.ones(2)),
    }


def set_gradients(parameters: dict[str, torch.nn.Parameter], value: float) -> None:
    for p in parameters.values():
        p.grad = torch.full_like(p, value)


def test_weight_decay_is_decoupled_and_on_matrices_only() -> None:
    parameters = make_parameters()
    set_gradients(parameters, 0.0)
    AdamW(parameters).step(OptimParams(lr=0.1, weight_decay=0.5))
    torch.testing.assert_close(parameters["matrix"].detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(parameters["vector"].detach(), torch.ones(2))


def test_clipping_reports_the_norm_before_it() -> None:
    parameters = make_parameters()
    set_gradients(parameters, 2.0)
    clipped = AdamW(parameters)
    norm, applied = clipped.step(OptimParams(lr=0.0, grad_clip_norm=1.0))
    assert norm == pytest.approx(2.0 * 6**0.5)
    assert applied
    moments = torch.cat([m.reshape(-1) for n, m in clipped.state().items() if "exp_avg/" in n])
    torch.testing.assert_close(moments.norm() / 0.1, torch.tensor(1.0), rtol=1e-4, atol=1e-4)


def test_settings_of_each_step_are_used_as_given() -> None:
    """AdamW by its formula for one step after another learning rate."""
    parameters = make_parameters()
    optimizer = AdamW(parameters)
    for lr in (0.0, 0.25):
        set_gradients(parameters, 3.0)
        optimizer.step(OptimParams(lr=lr, betas=(0.5, 0.5), eps=1e-12))
    # Both moments are unbiased, so the step is lr x g / |g|.
    torch.testing.assert_close(parameters["vector"].detach(), torch.full((2,), 0.75))


def test_optimizer_state_of_another_model_is_refused() -> None:
    first, second = AdamW(make_parameters()), AdamW({"odd": torch.nn.Parameter(torch.ones(3))})
    second.step(OptimParams(lr=0.1))
    with pytest.raises(InvariantError, match="another model"):
        first.load_state(second.state(), 1)


async def test_optimizer_reset_keeps_weights_and_count(model: str, tmp_path: Path) -> None:
    async with hosting(model) as service:
        await train(service, 0)
        before = await checksum(service, tmp_path / "before")
        await service.reset_optimizer("actor")
        assert await checksum(service, tmp_path / "after") == before
        step = await service.optim_step("actor", replace(STEP, lr=0.1))
        assert (step.optimizer_step, step.grad_norm) == (2, 0.0)
        assert await checksum(service, tmp_path / "idle") == before
