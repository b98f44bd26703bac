"""Experimental losses by hand: sapo, vespo, topr, kimi, clip_cov, kl_cov."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.algorithms.loss_definition import PreparedStep, Settings
from nexrl.algorithms.losses import LOSSES
from nexrl.errors import ConfigError


def given(
    differences: list[list[float]], advantages: list[float], **inputs: Any
) -> tuple[Any, Any]:
    lengths = [len(row) for row in differences]
    flat = np.concatenate([np.array(row) for row in differences])
    return {"logprobs": flat - 1.0}, {
        "advantage": np.repeat(advantages, lengths),
        "proximal_logprobs": np.full(len(flat), -1.0),
        "row": np.repeat(np.arange(len(lengths)), lengths),
        **inputs,
    }


def gradient(name: str, outputs: Any, inputs: Any, config: Settings | None = None) -> Any:
    logprobs = torch.tensor(outputs["logprobs"], requires_grad=True)
    tensors = {k: torch.tensor(v) for k, v in inputs.items()}
    LOSSES[name].term({"logprobs": logprobs}, tensors, config or {}).sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.numpy()


def prepared(name: str, outputs: Any, inputs: Any, **config: Any) -> PreparedStep:
    prepare = LOSSES[name].prepare
    assert prepare is not None
    return prepare(outputs, inputs, LOSSES[name].resolve(config))


def test_sapo_is_the_policy_gradient_at_ratio_1_and_fades_away_from_it() -> None:
    outputs, inputs = given([[0.0, 1.0, -3.0]], [2.0])
    found = gradient("sapo", outputs, inputs)
    assert found[0] == pytest.approx(-2.0)
    rho = math.e
    gate = 1 / (1 + math.exp(-(rho - 1)))
    assert found[1] == pytest.approx(-4 * gate * (1 - gate) * rho * 2.0)
    assert LOSSES["sapo"].term(outputs, inputs, {})[0] == pytest.approx(-4.0)


def test_sapo_has_a_temperature_for_each_sign() -> None:
    outputs, inputs = given([[math.log(2)], [math.log(2)]], [1.0, -1.0])
    term = LOSSES["sapo"].term(outputs, inputs, {})
    for value, tau, sign in ((term[0], 1.0, -1.0), (term[1], 1.05, 1.0)):
        assert value == pytest.approx(sign * 4 / tau / (1 + math.exp(-tau)))


def test_vespo_weighs_a_row_by_its_whole_ratio() -> None:
    """W = exp(0.2 + 0.1): phi = W^2 exp(3 (1 - W)), and 1 on policy."""
    outputs, inputs = given([[0.2, 0.1], [0.0]], [2.0, -1.0])
    w = math.exp(0.3)
    phi = w**2 * math.exp(3 * (1 - w))
    np.testing.assert_allclose(gradient("vespo", outputs, inputs), [-2 * phi, -2 * phi, 1.0])


def test_vespo_shuts_out_rows_far_off_policy() -> None:
    outputs, inputs = given([[50.0] * 10, [-50.0] * 10], [1.0, -1.0])
    assert np.abs(gradient("vespo", outputs, inputs)).max() < 1e-20


def test_topr_truncates_only_what_failed() -> None:
    """Rows with W = 0.5 and W = 2, once with A = 1 and once with A = -1."""
    half, twice = [math.log(0.5), 0.0], [math.log(2), 0.0]
    outputs, inputs = given([half, twice, half, twice], [1.0, 1.0, -1.0, -1.0])
    expected = np.repeat([-1.0, -1.0, 0.5, 1.0], 2)
    np.testing.assert_allclose(gradient("topr", outputs, inputs), expected)


def test_kimi_adds_the_squared_log_ratio_of_the_row() -> None:
    """D = 0.3: the terms of a row add up to -A sum logp + tau/2 D^2."""
    outputs, inputs = given([[0.2, 0.1]], [2.0])
    total = LOSSES["kimi"].term(outputs, inputs, {"tau": 0.5}).sum()
    assert total == pytest.approx(-2.0 * (-1.7) + 0.25 * 0.09)
    found = gradient("kimi", outputs, inputs, {"tau": 0.5})
    np.testing.assert_allclose(found, [-2 + 0.5 * 0.3] * 2)


# --- covariance ---------------------------------------------------------------------------------


def covariant(n: int = 1000) -> tuple[Any, Any]:
    """Tokens whose covariances spread over [-9, 9], on policy."""
    generator = np.random.default_rng(0)
    logprobs = -generator.random(n) * 6
    return {"logprobs": logprobs}, {
        "advantage": generator.choice([-3.0, 3.0], size=n),
        "proximal_logprobs": logprobs.copy(),
        "weight": np.ones(n),
    }


def covariances(outputs: Any, inputs: Any) -> Any:
    logprobs, advantage = outputs["logprobs"], inputs["advantage"]
    return (logprobs - logprobs.mean()) * (advantage - advantage.mean())


def test_clip_cov_selects_its_share_among_tokens_of_high_covariance() -> None:
    outputs, inputs = covariant()
    selected = prepared("clip_cov", outputs, inputs, fraction=0.01).inputs["selected"]
    chosen = covariances(outputs, inputs)[selected == 1]
    assert selected.sum() == 10
    assert ((chosen > 1) & (chosen < 5)).all()


def test_clip_cov_selects_at_least_one_token_of_a_small_step() -> None:
    """As its authors' code: 2e-4 of a thousand tokens are none, and the loss would be plain ppo."""
    assert prepared("clip_cov", *covariant()).inputs["selected"].sum() == 1


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("clip_cov", {"fraction": 0.0}),
        ("clip_cov", {"fraction": 2}),
        ("clip_cov", {"covariance_low": 5.0}),
        ("clip_cov", {"seed": 1.5}),
        ("kl_cov", {"fraction": True}),
        ("kl_cov", {"penalty": -1.0}),
    ],
)
def test_settings_that_would_select_nothing_or_reward_distance_are_refused(
    name: str, config: Settings
) -> None:
    with pytest.raises(ConfigError, match=next(iter(config))):
        LOSSES[name].resolve(config)


def test_clip_cov_depends_on_its_seed_and_on_nothing_else() -> None:
    outputs, inputs = covariant()
    first, again, other = (
        prepared("clip_cov", outputs, inputs, fraction=0.01, seed=seed).inputs["selected"].tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_clip_cov_draws_the_same_tokens_in_any_order_of_rows() -> None:
    outputs, inputs = covariant()
    order = np.random.default_rng(1).permutation(1000)
    selected = prepared("clip_cov", outputs, inputs, fraction=0.01).inputs["selected"]
    shuffled = ({k: v[order] for k, v in arrays.items()} for arrays in (outputs, inputs))
    again = prepared("clip_cov", *shuffled, fraction=0.01).inputs["selected"]
    assert again.tolist() == selected[order].tolist()


def test_clip_cov_takes_no_token_that_ppo_clips_already() -> None:
    outputs, inputs = covariant()
    inputs["proximal_logprobs"] = outputs["logprobs"] - np.sign(inputs["advantage"])
    assert prepared("clip_cov", outputs, inputs, fraction=0.5).inputs["selected"].sum() == 0


def test_kl_cov_selects_the_highest_covariances() -> None:
    outputs, inputs = covariant()
    selected = prepared("kl_cov", outputs, inputs, fraction=0.002).inputs["selected"]
    values = covariances(outputs, inputs)
    assert sorted(values[selected == 1]) == sorted(values)[-2:]


def test_a_selected_token_loses_its_gradient_or_pays_for_its_distance() -> None:
    marked = {"selected": np.array([1.0, 0.0])}
    outputs, inputs = given([[0.1, 0.1]], [1.0], **marked)
    ratio = math.exp(0.1)
    assert gradient("clip_cov", outputs, inputs) == pytest.approx([0.0, -ratio])
    assert gradient("kl_cov", outputs, inputs) == pytest.approx([1.0 - ratio, -ratio])
    term = LOSSES["kl_cov"].term(outputs, inputs, {})
    assert term == pytest.approx([0.1 - ratio, -ratio])


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_step_without_tokens_selects_none(name: str) -> None:
    empty = {k: v[:0] for k, v in covariant()[1].items()}
    assert len(prepared(name, {"logprobs": np.zeros(0)}, empty).inputs["selected"]) == 0


def test_what_is_not_certified_is_labelled() -> None:
    names = {"luspo", "gmpo", "sapo", "vespo", "topr", "kimi", "clip_cov", "kl_cov"}
    assert {n for n, d in LOSSES.items() if d.experimental} == names
