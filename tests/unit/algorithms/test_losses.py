"""Losses: numbers by hand, true gradients, finite at extremes, refused when misused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.algorithms.kl import k1, k2, k3
from nexrl.algorithms.losses import LOSSES, Settings, loss_definition
from nexrl.errors import ConfigError


def inputs_for(name: str, n: int, *, seed: int = 0, **given: Any) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    known = {
        "weight": np.full(n, 0.5),
        "advantage": generator.normal(size=n),
        "proximal_logprobs": -generator.random(n),
        **{k: np.asarray(v, np.float64) for k, v in given.items()},
    }
    wanted = {*LOSSES[name].required, *given}
    return {k: v for k, v in known.items() if k in wanted}


def term(name: str, logprobs: list[float], config: Settings | None = None, **inputs: Any) -> Any:
    given = inputs_for(name, len(logprobs), **inputs)
    return LOSSES[name].term(np.array(logprobs), given, config or {})


def test_numbers_by_hand() -> None:
    assert term("cross_entropy", [-0.5, -2.0]).tolist() == [0.5, 2.0]
    assert term("reinforce", [-0.5], advantage=[3.0]).tolist() == [1.5]
    half = term(
        "importance_sampling", [-1.0], advantage=[2.0], proximal_logprobs=[-1 + math.log(2)]
    )
    assert half == pytest.approx([-1.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 1.0, -1.28),  # beyond the upper clip: bounded
        (1.5, -1.0, 1.5),  # pushed back: not clipped
        (0.5, -1.0, 0.8),  # beyond the lower clip: bounded
        (0.5, 1.0, -0.5),  # pushed back: not clipped
        (9.0, -1.0, 9.0),  # the side that dual clip is for
    ],
)
def test_ppo_takes_the_pessimistic_side(ratio: float, advantage: float, expected: float) -> None:
    result = term("ppo", [-1.0 + math.log(ratio)], advantage=[advantage], proximal_logprobs=[-1.0])
    assert result == pytest.approx([expected])


def test_dual_clip_bounds_only_negative_advantages() -> None:
    logprobs = [-1 + math.log(9.0)] * 2
    given = {"advantage": [-1.0, 1.0], "proximal_logprobs": [-1.0, -1.0]}
    result = term("ppo", logprobs, {"dual_clip": 3.0}, **given)
    assert result == pytest.approx([3.0, -1.28])


def test_kl_estimators_by_hand() -> None:
    d = math.log(2.0)
    one, other = np.array([d - 1]), np.array([-1.0])
    assert k1(one, other) == pytest.approx([d])
    assert k2(one, other) == pytest.approx([d * d / 2])
    assert k3(one, other) == pytest.approx([0.5 - 1 + d])


def test_the_parts_add_up_and_the_policy_part_stands_alone() -> None:
    """FR-040: pg 0.5, entropy 2 with coefficient 0.01."""
    given = inputs_for("reinforce", 1, advantage=[1.0])
    config = {"entropy_coefficient": 0.01}
    parts = LOSSES["reinforce"].parts(np.array([-0.5]), given, config, np.array([2.0]))
    assert parts["policy"] == pytest.approx([0.5])
    assert parts["entropy"] == pytest.approx([-0.02])
    total = LOSSES["reinforce"].term(np.array([-0.5]), given, config, np.array([2.0]))
    assert total == pytest.approx([0.48])


def test_every_additive_term_is_multiplied_by_the_same_weight() -> None:
    """FR-031: policy, KL and entropy share the denominator, for any split."""
    n, config = 12, {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    generator = np.random.default_rng(3)
    logprobs, entropy = -generator.random(n), generator.random(n)
    given = inputs_for("ppo", n, reference_logprobs=-generator.random(n))
    whole = float(np.sum(LOSSES["ppo"].term(logprobs, given, config, entropy) * given["weight"]))
    parts = 0.0
    for i in range(n):
        one = {k: v[i : i + 1] for k, v in given.items()}
        value = LOSSES["ppo"].term(logprobs[i : i + 1], one, config, entropy[i : i + 1])
        parts += float(np.sum(value * one["weight"]))
    assert parts == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_step_down_the_kl_gradient_brings_the_policy_nearer_the_reference(estimator: str) -> None:
    """FR-097: the sign of the KL term."""
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.zeros(3, dtype=torch.float64), -1)
    config: Settings = {"kl_coefficient": 1.0, "kl_estimator": estimator}
    zeros = torch.zeros(3, dtype=torch.float64)
    for _ in range(2):
        logprobs = torch.log_softmax(logits, -1)
        given = {"advantage": zeros, "reference_logprobs": reference}
        probabilities = logprobs.exp().detach()
        loss = (LOSSES["reinforce"].term(logprobs, given, config) * probabilities).sum()
        kl = float((logprobs.exp() * (logprobs - reference)).sum().detach())
        loss.backward()
        assert logits.grad is not None
        logits = (logits - 0.5 * logits.grad).detach().requires_grad_()
    after = torch.log_softmax(logits.detach(), -1)
    assert float((after.exp() * (after - reference)).sum()) < kl


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    """Finite differences away from kinks, numpy against torch."""
    n, step = 20, 1e-6
    given = inputs_for(name, n, seed=4)
    logprobs = -np.random.default_rng(5).random(n)
    tensor = torch.tensor(logprobs, requires_grad=True)
    tensors = {k: torch.tensor(v) for k, v in given.items()}
    value = LOSSES[name].term(tensor, tensors, {})
    value.sum().backward()
    numeric = (
        LOSSES[name].term(logprobs + step, given, {})
        - LOSSES[name].term(logprobs - step, given, {})
    ) / (2 * step)
    assert tensor.grad is not None
    np.testing.assert_allclose(value.detach(), LOSSES[name].term(logprobs, given, {}), rtol=1e-12)
    np.testing.assert_allclose(tensor.grad, numeric, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("difference", [80.0, -80.0, 0.0])
def test_extreme_log_differences_stay_finite_in_float32(name: str, difference: float) -> None:
    for advantage in (-5.0, 5.0):
        logprobs = torch.full((3,), -100.0 + difference, requires_grad=True)
        given = {
            k: torch.full((3,), v)
            for k, v in {
                "weight": 1.0,
                "advantage": advantage,
                "proximal_logprobs": -100.0,
                "reference_logprobs": -100.0,
            }.items()
        }
        config = {"kl_coefficient": 0.1} if "kl_coefficient" in LOSSES[name].config else {}
        value = LOSSES[name].term(logprobs, given, config)
        value.sum().backward()
        assert logprobs.grad is not None
        assert torch.isfinite(value).all()
        assert torch.isfinite(logprobs.grad.square().sum())


def test_a_correction_multiplies_the_policy_term_only() -> None:
    given = {"correction": [0.0], "reference_logprobs": [-2.0], "advantage": [1.0]}
    result = term("reinforce", [-1.0], {"kl_coefficient": 1.0, "kl_estimator": "k2"}, **given)
    assert result == pytest.approx([0.5])


def test_no_gradient_flows_through_the_off_policy_weight_of_the_kl_term() -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    given = {
        "advantage": torch.zeros(1),
        "proximal_logprobs": torch.tensor([-1.0 - math.log(2)], dtype=torch.float64),
        "reference_logprobs": torch.tensor([-1.5], dtype=torch.float64),
    }
    config: Settings = {"kl_coefficient": 1.0, "kl_estimator": "k2"}
    LOSSES["importance_sampling"].term(logprobs, given, config).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(2.0 * 0.5)


def test_misuse_is_refused_in_words() -> None:
    ppo = LOSSES["ppo"]
    with pytest.raises(ConfigError, match="clip_low"):
        ppo.resolve({"cliplow": 0.1})
    with pytest.raises(ConfigError, match="k1 is zero"):
        ppo.resolve({"kl_estimator": "k1"})
    with pytest.raises(ConfigError, match="proximal_logprobs"):
        ppo.check_inputs(["weight", "advantage"], {})
    with pytest.raises(ConfigError, match="reference_logprobs"):
        ppo.check_inputs(["weight", "advantage", "proximal_logprobs"], {"kl_coefficient": 0.1})
    with pytest.raises(ConfigError, match="does not use"):
        LOSSES["cross_entropy"].check_inputs(["weight", "advantage"], {})
    with pytest.raises(ConfigError, match="cross_entropy"):
        loss_definition("nll")


def test_entropy_is_asked_for_only_when_it_has_a_coefficient() -> None:
    assert not LOSSES["ppo"].needs_entropy({})
    assert LOSSES["ppo"].needs_entropy({"entropy_coefficient": 0.01})
    assert not LOSSES["cross_entropy"].needs_entropy({})


def test_only_clipped_losses_call_themselves_bounded() -> None:
    assert {n for n, d in LOSSES.items() if d.bounded} == {"ppo", "cross_entropy"}
