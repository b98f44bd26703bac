"""Gradients of the PyTorch back end: equal however the rows are cut, laid out or computed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexrl.config.schema import TrainServiceConfig
from nexrl.errors import InvariantError, ServiceError
from nexrl.services.train.backends.hf_model import LoadedModel, load_model
from nexrl.services.train.backends.torch_policy import TorchPolicy
from nexrl.testing.contracts.train_subject import contract_chunk, single_rows
from nexrl.testing.tiny_models import make_micro_model
from nexrl.types import FloatArray, LossSpec, OptimParams, RowChunk

CPU = torch.device("cpu")
PPO = LossSpec(name="ppo")
GSPO = LossSpec(name="gspo", config={"clip_low": 0.5, "clip_high": 0.5})
TOP_K = LossSpec(name="reverse_kl_top_k", config={"entropy_coefficient": 0.1})
VALUE = LossSpec(name="value")
CROSS_ENTROPY = LossSpec(name="cross_entropy")
CONFIG = TrainServiceConfig(micro_batch_tokens=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_micro_model(tmp_path_factory.mktemp("model"), seed=0)
    loaded = load_model(str(folder), setting="test", device=CPU)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)  # away from the uniform distribution of fresh weights
    return loaded


@pytest.fixture(scope="module")
def value_model(model: LoadedModel) -> LoadedModel:
    copied = model.copied("value")
    assert copied.value_head is not None
    with torch.no_grad():
        copied.value_head.weight.copy_(torch.linspace(-1, 1, 32))
    return copied


def make_policy(model: LoadedModel, **changes: Any) -> TorchPolicy:
    return TorchPolicy(
        "actor",
        model.copied(),
        CONFIG.model_copy(update=changes),
        trainable=True,
        stop=threading.Event(),
    )


def gradient(policy: TorchPolicy) -> FloatArray:
    grads = [p.grad for p in policy.model.named_parameters().values()]
    return torch.cat([g.reshape(-1) for g in grads if g is not None]).numpy().copy()


def gradient_of(
    model: LoadedModel, chunks: Sequence[RowChunk], loss: LossSpec, **changes: Any
) -> tuple[float, FloatArray]:
    policy = make_policy(model, **changes)
    total = sum(policy.forward_backward(chunk, loss, ()).loss for chunk in chunks)
    return total, gradient(policy)


def assert_same(a: tuple[float, FloatArray], b: tuple[float, FloatArray], rtol: float) -> None:
    assert a[0] == pytest.approx(b[0], rel=rtol, abs=1e-6)
    scale = float(np.abs(a[1]).max())
    np.testing.assert_allclose(a[1], b[1], atol=rtol * scale)


def naive_logprobs(model: LoadedModel, chunk: RowChunk) -> FloatArray:
    """One row at a time, through the plain model."""
    found = np.zeros(chunk.num_tokens, np.float32)
    for start, end in zip(chunk.offsets[:-1], chunk.offsets[1:], strict=True):
        ids = torch.from_numpy(chunk.token_ids[start:end].astype(np.int64))[None]
        with torch.no_grad():
            log_p = torch.log_softmax(model.module(ids).logits[0] / chunk.temperature, -1)
        for t in range(1, end - start):
            found[start + t] = log_p[t - 1, ids[0, t]]
    return found


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_those_of_each_row_alone(
    model: LoadedModel, packing: bool, temperature: float
) -> None:
    """FR-092, FR-094: right padding, packing and temperature."""
    chunk = replace(contract_chunk((9, 2, 5, 1, 7, 3, 3)), temperature=temperature)
    policy = make_policy(model, packing=packing, micro_batch_tokens=20)
    found = policy.forward(chunk, ("logprobs",)).outputs["logprobs"]
    np.testing.assert_allclose(found, naive_logprobs(model, chunk), atol=1e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    seed=st.integers(0, 99),
    micro_batch_tokens=st.sampled_from([1, 8, 30]),
    packing=st.booleans(),
    loss=st.sampled_from([PPO, GSPO, TOP_K, VALUE]),
)
def test_no_split_changes_the_gradient(
    model: LoadedModel,
    value_model: LoadedModel,
    lengths: list[int],
    seed: int,
    micro_batch_tokens: int,
    packing: bool,
    loss: LossSpec,
) -> None:
    """FR-029, FR-035, FR-041: chunks of any size, micro-batches of any size, packed or padded;
    losses over tokens, rows, candidates and values."""
    hosted = value_model if loss is VALUE else model
    chunk = contract_chunk((*lengths, 6), seed=seed, loss=loss.name)
    whole = gradient_of(hosted, [chunk], loss)
    for chunks in ([chunk], single_rows(chunk)):
        cut = gradient_of(
            hosted, chunks, loss, micro_batch_tokens=micro_batch_tokens, packing=packing
        )
        assert_same(whole, cut, rtol=2e-4)


def test_loss_is_the_sum_that_the_weights_define(model: LoadedModel) -> None:
    """FR-029: losses 4 over 4 tokens and 3 over 1 token with weight 1/5 make 7/5, for any split."""
    chunk = contract_chunk((5, 2, 3))
    logprobs = naive_logprobs(model, chunk)
    weight = np.where(logprobs < 0, np.float32(1 / 7), 0).astype(np.float32)
    chunk = replace(chunk, inputs={"weight": weight})
    for chunks in ([chunk], single_rows(chunk)):
        loss, _ = gradient_of(model, chunks, CROSS_ENTROPY)
        assert loss == pytest.approx(-logprobs.sum() / 7, rel=1e-5)


@pytest.mark.parametrize("coefficient", ["kl_coefficient", "entropy_coefficient"])
def test_every_term_has_the_denominator_of_the_policy_term(
    model: LoadedModel, coefficient: str
) -> None:
    """FR-031: KL and entropy are weighted like the rest, so micro-batch size 1 equals full batch."""
    chunk = contract_chunk(loss="ppo")
    reference = np.full(chunk.num_tokens, -2.0, np.float32)
    chunk = replace(chunk, inputs={**chunk.inputs, "reference_logprobs": reference})
    loss = LossSpec(name="ppo", config={coefficient: 0.5})
    whole = gradient_of(model, [chunk], loss)
    assert_same(whole, gradient_of(model, [chunk], loss, micro_batch_tokens=1), rtol=1e-4)
    assert whole[0] != pytest.approx(gradient_of(model, [chunk], PPO)[0], rel=1e-3)


def naive_values(model: LoadedModel, chunk: RowChunk) -> FloatArray:
    """One row at a time: the head on the state before each token."""
    assert model.value_head is not None
    found = np.zeros(chunk.num_tokens, np.float32)
    for start, end in zip(chunk.offsets[:-1], chunk.offsets[1:], strict=True):
        ids = torch.from_numpy(chunk.token_ids[start:end].astype(np.int64))[None]
        with torch.no_grad():
            values = model.value_head(model.module(ids).last_hidden_state)[0, :, 0]
        found[start + 1 : end] = values[:-1]
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_values_equal_those_of_each_row_alone(value_model: LoadedModel, packing: bool) -> None:
    """FR-092, FR-094: a value is never read across a packed border, nor at a shifted position."""
    chunk = replace(contract_chunk((9, 2, 5, 1, 7, 3, 3)), temperature=0.5)
    policy = make_policy(value_model, packing=packing, micro_batch_tokens=20)
    found = policy.forward(chunk, ("values",)).outputs["values"]
    np.testing.assert_allclose(found, naive_values(value_model, chunk), atol=1e-5)
    assert np.count_nonzero(found) == chunk.num_tokens - chunk.num_rows


def test_ratio_of_a_row_takes_its_trained_tokens_alone(model: LoadedModel) -> None:
    """gspo, by hand: s = exp(mean log rho) over the trained tokens, loss -s A, whatever the
    untrained tokens between them hold."""
    chunk = contract_chunk((6, 4), loss="gspo")
    inputs = {name: values.copy() for name, values in chunk.inputs.items()}
    inputs["weight"][2:4] = 0.0
    inputs["proximal_logprobs"][:] = naive_logprobs(model, chunk) - 0.1
    inputs["proximal_logprobs"][2:4] = np.nan
    inputs["advantage"][:] = 1.0
    chunk = replace(chunk, inputs=inputs)
    for packing in (False, True):
        loss, _ = gradient_of(model, [chunk], GSPO, packing=packing)
        assert loss == pytest.approx(-np.exp(0.1) * inputs["weight"].sum(), rel=1e-4)


def test_named_value_loss_is_the_clipped_one(value_model: LoadedModel) -> None:
    """1/2 max((V - R)^2, (clip(V, V_old +- 0.2) - R)^2), summed with the weights."""
    chunk = contract_chunk(loss="value")
    values = naive_values(value_model, chunk).astype(np.float64)
    weight, returns, old = (chunk.inputs[n] for n in ("weight", "returns", "old_values"))
    held = np.clip(values, old - 0.2, old + 0.2)
    expected = 0.5 * np.maximum((values - returns) ** 2, (held - returns) ** 2) @ weight
    loss, _ = gradient_of(value_model, [chunk], VALUE)
    assert loss == pytest.approx(expected, rel=1e-4)


def test_value_of_zero_moves_the_head_before_the_backbone(model: LoadedModel) -> None:
    """A fresh head passes no gradient down, and trains from its first step."""
    policy = make_policy(model.copied("value"))
    policy.forward_backward(contract_chunk(loss="value"), VALUE, ("values",))
    *backbone, head = policy.model.named_parameters().values()
    assert all(p.grad is None or not p.grad.any() for p in backbone)
    assert head.grad is not None
    assert head.grad.shape == (1, 32)
    assert head.grad.any()
    assert policy.info().num_parameters == sum(p.numel() for p in (*backbone, head))


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_value_gradient_with_less_memory(
    value_model: LoadedModel, changes: dict[str, bool]
) -> None:
    chunk = contract_chunk(loss="value")
    exact, found = (
        gradient_of(value_model, [chunk], VALUE),
        gradient_of(value_model, [chunk], VALUE, **changes),
    )
    cosine = np.dot(exact[1], found[1]) / np.linalg.norm(exact[1]) / np.linalg.norm(found[1])
    assert cosine > (0.98 if "dtype" in changes else 1 - 1e-6)


def test_candidates_that_are_padding_are_not_looked_at(model: LoadedModel) -> None:
    """Ids of untrained tokens may be anything, also when the tokens are scored."""
    chunk = contract_chunk(loss="reverse_kl_top_k")
    weight, ids = chunk.inputs["weight"].copy(), chunk.inputs["candidate_ids"].copy()
    weight[2:4] = 0.0
    clean = replace(chunk, inputs={**chunk.inputs, "weight": weight})
    ids[2:4] = -1
    dirty = replace(clean, inputs={**clean.inputs, "candidate_ids": ids})
    assert_same(gradient_of(model, [clean], TOP_K), gradient_of(model, [dirty], TOP_K), rtol=1e-6)
    result = make_policy(model).forward_backward(dirty, TOP_K, ("logprobs",))
    np.testing.assert_allclose(result.outputs["logprobs"], naive_logprobs(model, chunk), atol=1e-5)


def test_gradient_of_candidates_equals_that_of_all_logits(model: LoadedModel) -> None:
    """Against log-softmax of the whole vocabulary through the plain model."""
    chunk = replace(contract_chunk((6,), loss="reverse_kl_top_k"), temperature=0.8)
    given = np.random.default_rng(3).normal(size=(6, 2)).astype(np.float32)
    given[0] = 0.0
    policy, plain = make_policy(model), model.copied().module
    policy.backward(chunk, {"candidate_logprobs": given})
    ids = torch.from_numpy(chunk.token_ids.astype(np.int64))[None]
    log_p = torch.log_softmax(plain(ids).logits[0] / 0.8, -1)
    candidates = torch.from_numpy(chunk.inputs["candidate_ids"].astype(np.int64))
    torch.autograd.backward((log_p[:-1].gather(1, candidates[1:]) * torch.tensor(given[1:])).sum())
    expected = torch.cat([p.grad.reshape(-1) for p in plain.parameters()]).numpy()
    np.testing.assert_allclose(gradient(policy), expected, atol=1e-5 * np.abs(expected).max())


def test_untrained_tokens_cannot_reach_the_loss(model: LoadedModel) -> None:
    """FR-028, FR-032: NaN advantages and missing logprobs under weight 0 change nothing."""
    chunk = contract_chunk(loss="ppo")
    weight = chunk.inputs["weight"].copy()
    weight[5:9] = 0.0
    clean = replace(chunk, inputs={**chunk.inputs, "weight": weight})
    advantage = chunk.inputs["advantage"].copy()
    advantage[5:9] = np.nan
    dirty = replace(clean, inputs={**clean.inputs, "advantage": advantage})
    assert_same(gradient_of(model, [clean], PPO), gradient_of(model, [dirty], PPO), rtol=1e-6)


def test_rows_of_weight_zero_are_scored_but_not_trained(model: LoadedModel) -> None:
    """FR-032, FR-028: fully masked rows leave loss and gradient as they are."""
    chunk = contract_chunk((5, 7, 3))
    weight = chunk.inputs["weight"].copy()
    weight[5:12] = 0.0
    chunk = replace(chunk, inputs={"weight": weight})
    policy = make_policy(model)
    result = policy.forward_backward(chunk, CROSS_ENTROPY, ("logprobs",))
    np.testing.assert_allclose(result.outputs["logprobs"], naive_logprobs(model, chunk), atol=1e-5)
    rows = single_rows(chunk)
    assert_same(
        (result.loss, gradient(policy)),
        gradient_of(model, [rows[0], rows[2]], CROSS_ENTROPY),
        rtol=1e-5,
    )


def test_unchanged_policy_has_ratio_one(model: LoadedModel) -> None:
    """FR-017: with the logprobs of the weights themselves, the PPO loss is -sum(weight x A)."""
    chunk = contract_chunk(loss="ppo")
    inputs = {**chunk.inputs, "proximal_logprobs": naive_logprobs(model, chunk)}
    loss, _ = gradient_of(model, [replace(chunk, inputs=inputs)], PPO)
    expected = -float(np.dot(chunk.inputs["weight"], chunk.inputs["advantage"]))
    assert loss == pytest.approx(expected, rel=1e-4)


def test_kl_term_pulls_towards_the_reference(model: LoadedModel) -> None:
    """FR-097: with the KL term alone, one step brings the policy nearer."""
    chunk = contract_chunk((8, 8), loss="reinforce")
    target = naive_logprobs(model, chunk) - 0.5
    target[chunk.offsets[:-1]] = 0.0
    chunk = replace(
        chunk,
        inputs={
            "weight": chunk.inputs["weight"],
            "advantage": np.zeros(16, np.float32),
            "reference_logprobs": target,
        },
    )
    policy = make_policy(model)
    loss = LossSpec(name="reinforce", config={"kl_coefficient": 1.0, "kl_estimator": "k2"})
    before = policy.forward_backward(chunk, loss, ()).loss
    policy.optim_step(OptimParams(lr=1e-4))
    assert policy.forward_backward(chunk, loss, ()).loss < before


def test_gradient_of_entropy_and_logprobs_together(model: LoadedModel) -> None:
    """`backward` accepts gradients of every output at once."""
    chunk = contract_chunk(loss="reinforce")
    weight, advantage = chunk.inputs["weight"], chunk.inputs["advantage"]
    loss = LossSpec(name="reinforce", config={"entropy_coefficient": 0.3})
    chunk = replace(chunk, inputs={"weight": weight, "advantage": advantage})
    policy = make_policy(model)
    policy.backward(chunk, {"logprobs": -weight * advantage, "entropy": -np.float32(0.3) * weight})
    _, named = gradient_of(model, [chunk], loss)
    np.testing.assert_allclose(gradient(policy), named, atol=1e-5 * np.abs(named).max())


def test_checkpointing_recomputes_the_same_gradient(model: LoadedModel) -> None:
    chunk = contract_chunk(loss="ppo")
    plain = gradient_of(model, [chunk], PPO)
    assert_same(plain, gradient_of(model, [chunk], PPO, gradient_checkpointing=True), rtol=1e-6)


def test_autocast_is_near_float32_and_keeps_float32_masters(model: LoadedModel) -> None:
    chunk = contract_chunk(loss="ppo")
    _, exact = gradient_of(model, [chunk], PPO)
    policy = make_policy(model, dtype="bfloat16")
    policy.forward_backward(chunk, PPO, ())
    rough = gradient(policy)
    assert rough.dtype == np.float32
    cosine = np.dot(exact, rough) / np.linalg.norm(exact) / np.linalg.norm(rough)
    assert 0.98 < cosine < 1.0 - 1e-7
    assert policy.info().dtype == "bfloat16"


def test_entropy_is_that_of_the_tempered_distribution(model: LoadedModel) -> None:
    chunk = replace(contract_chunk((4,)), temperature=1e3)
    found = make_policy(model).forward(chunk, ("entropy",)).outputs["entropy"]
    np.testing.assert_allclose(found[1:], np.log(model.vocab_size), atol=1e-3)


def test_first_token_of_a_row_is_never_trained(model: LoadedModel) -> None:
    """A pushed row with mask 1 everywhere: nothing predicts its first token."""
    chunk = contract_chunk()
    weight = chunk.inputs["weight"].copy()
    weight[chunk.offsets[:-1]] = 5.0
    other = replace(chunk, inputs={"weight": weight})
    assert_same(
        gradient_of(model, [chunk], CROSS_ENTROPY),
        gradient_of(model, [other], CROSS_ENTROPY),
        rtol=1e-6,
    )


def test_temperature_zero_has_no_logprobs(model: LoadedModel) -> None:
    with pytest.raises(InvariantError, match=r"temperature.*0\.0"):
        make_policy(model).forward(replace(contract_chunk(), temperature=0.0), ("logprobs",))


def test_gradient_cut_off_by_closing_is_not_stepped_on(model: LoadedModel) -> None:
    stop = threading.Event()
    policy = TorchPolicy("actor", model.copied(), CONFIG, trainable=True, stop=stop)
    policy.forward_backward(contract_chunk(), CROSS_ENTROPY, ())
    stop.set()
    with pytest.raises(ServiceError, match="closing"):
        policy.forward_backward(contract_chunk(), CROSS_ENTROPY, ())
    with pytest.raises(InvariantError, match=r"incomplete.*closing"):
        policy.optim_step(OptimParams(lr=1.0))
    np.testing.assert_array_equal(
        policy.model.module.lm_head.weight.detach(), model.module.lm_head.weight.detach()
    )


def test_seconds_are_counted_by_kind(model: LoadedModel) -> None:
    policy = make_policy(model)
    policy.forward_backward(contract_chunk(), CROSS_ENTROPY, ())
    policy.optim_step(OptimParams(lr=1e-3))
    seconds = policy.info().seconds
    assert all(seconds[kind] > 0 for kind in ("forward", "backward", "optimizer"))


def test_model_folder_is_untouched_by_a_copy(model: LoadedModel, tmp_path: Path) -> None:
    policy = make_policy(model)
    policy.forward_backward(contract_chunk(), CROSS_ENTROPY, ())
    copied = policy.model.copied()
    assert all(p.grad is None for p in copied.module.parameters())
    assert policy.pending.exists
    assert np.abs(gradient(policy)).max() > 0
