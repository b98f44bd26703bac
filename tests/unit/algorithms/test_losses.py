"""What holds for every named loss: true gradients, any split, finite extremes, misuse refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.algorithms.loss_definition import LossDefinition, Settings
from nexrl.algorithms.losses import LOSSES, find_loss
from nexrl.errors import ConfigError, InvariantError
from nexrl.testing.loss_inputs import LossCase, make_loss_case

NAMES = sorted(LOSSES)
REGULARISED = [n for n in NAMES if "kl_coefficient" in LOSSES[n].config]
ALL_TERMS: Settings = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}


def tensors(arrays: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {
        name: torch.tensor(array, dtype=dtype if array.dtype.kind == "f" else torch.int64)
        for name, array in arrays.items()
    }


def gradients(case: LossCase, config: Settings) -> tuple[float, dict[str, Any]]:
    """The weighted sum and its gradient by each output, on torch in float64."""
    outputs = {name: t.requires_grad_() for name, t in tensors(case.outputs).items()}
    given = tensors(case.inputs)
    total = (case.loss.term(outputs, given, config) * given["weight"]).sum()
    total.backward()
    return float(total.detach()), {
        n: t.grad.numpy() for n, t in outputs.items() if t.grad is not None
    }


def value(case: LossCase, config: Settings) -> float:
    term = case.loss.term(case.outputs, case.inputs, config)
    return float(np.dot(term, case.inputs["weight"]))


def slopes_that_stop(loss: LossDefinition) -> bool:
    """Whether parts of the term are stop-gradient, so that differences do not give its gradient."""
    return loss.name in {"cispo", "vespo", "topr", "gspo_token", "reverse_kl"}


@pytest.mark.parametrize("name", NAMES)
def test_numpy_and_torch_compute_the_same_numbers(name: str) -> None:
    case = make_loss_case(name, rows=(3, 1, 7))
    config = ALL_TERMS if name in REGULARISED else {}
    total, _ = gradients(case, config)
    assert total == pytest.approx(value(case, config), rel=1e-12)


@pytest.mark.parametrize("name", [n for n in NAMES if not slopes_that_stop(LOSSES[n])])
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    """Central differences, away from kinks."""
    case, step = make_loss_case(name, rows=(3, 1, 4)), 1e-6
    _, found = gradients(case, {})
    for output, gradient in found.items():
        for at in np.ndindex(gradient.shape):
            difference = value(case.moved(output, at, step), {}) - value(
                case.moved(output, at, -step), {}
            )
            assert gradient[at] == pytest.approx(difference / (2 * step), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_any_split_by_rows_gives_the_same_sum_and_gradient(name: str) -> None:
    """FR-029, FR-031, FR-035: micro-batches of one row against the whole step."""
    case = make_loss_case(name, rows=(4, 1, 9, 2))
    config = ALL_TERMS if name in REGULARISED else {}
    total, whole = gradients(case, config)
    parts = [gradients(part, config) for part in case.by_row()]
    assert sum(part for part, _ in parts) == pytest.approx(total, rel=1e-12)
    for output, gradient in whole.items():
        again = np.concatenate([found[output] for _, found in parts])
        np.testing.assert_allclose(again, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    case = make_loss_case(name, rows=(4, 1, 9))
    config = ALL_TERMS if name in REGULARISED else {}
    turned = np.concatenate([np.flatnonzero(case.rows == row) for row in (2, 0, 1)])
    term = case.loss.term(case.outputs, case.inputs, config)
    again = case.at(turned)
    np.testing.assert_allclose(
        again.loss.term(again.outputs, again.inputs, config), term[turned], rtol=1e-12
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("difference", [80.0, -80.0, 0.0])
@pytest.mark.parametrize("rows", [(1,), (4096,), (3, 2)])
def test_extreme_log_differences_stay_finite_in_float32(
    name: str, difference: float, rows: tuple[int, ...]
) -> None:
    case = make_loss_case(name, rows=rows, difference=difference)
    config = {"kl_coefficient": 0.1} if name in REGULARISED else {}
    for sign in (-5.0, 5.0):
        given = tensors(case.inputs, torch.float32)
        if "advantage" in given:
            given["advantage"] = torch.full((len(case.rows),), sign)
        outputs = {n: t.requires_grad_() for n, t in tensors(case.outputs, torch.float32).items()}
        term = case.loss.term(outputs, given, config)
        (term * given["weight"]).sum().backward()
        assert torch.isfinite(term).all()
        norms = [t.grad.square().sum() for t in outputs.values() if t.grad is not None]
        assert all(torch.isfinite(norm) for norm in norms)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_train_gives_an_empty_term(name: str) -> None:
    """FR-032: all rows masked."""
    case = make_loss_case(name, rows=(3,)).at(np.zeros(0, np.int64))
    assert case.loss.term(case.outputs, case.inputs, {}).shape == (0,)


@pytest.mark.parametrize("name", REGULARISED)
def test_the_parts_add_up_and_carry_their_coefficients(name: str) -> None:
    """FR-040"""
    case = make_loss_case(name, rows=(3, 2))
    parts = case.loss.parts(case.outputs, case.inputs, ALL_TERMS)
    assert list(parts) == ["policy", "kl", "entropy"]
    np.testing.assert_allclose(parts["entropy"], -0.01 * case.outputs["entropy"])
    whole = case.loss.term(case.outputs, case.inputs, ALL_TERMS)
    np.testing.assert_allclose(sum(parts.values()), whole, rtol=1e-12)


def test_policy_loss_stands_apart_from_the_entropy_bonus() -> None:
    """FR-040: policy 0.5, entropy 2 with coefficient 0.01: total 0.48."""
    outputs = {"logprobs": np.array([-0.5]), "entropy": np.array([2.0])}
    given, config = {"advantage": np.array([1.0])}, {"entropy_coefficient": 0.01}
    parts = LOSSES["reinforce"].parts(outputs, given, config)
    assert parts["policy"] == pytest.approx([0.5])
    assert LOSSES["reinforce"].term(outputs, given, config) == pytest.approx([0.48])


def test_a_zero_advantage_leaves_the_kl_gradient() -> None:
    """FR-037: a constant group that is kept still has the gradient of the KL term, and that only."""
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    given = tensors({"advantage": np.zeros(1), "reference_logprobs": np.array([-1.5])})
    given["proximal_logprobs"] = logprobs.detach()
    config: Settings = {"kl_coefficient": 0.1, "kl_estimator": "k2"}
    LOSSES["ppo"].term({"logprobs": logprobs}, given, config).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.1 * 0.5)


def test_a_correction_multiplies_the_policy_term_only() -> None:
    """FR-038: zeroed by a correction, a token keeps its weight and its KL term."""
    given = {
        "advantage": np.array([1.0]),
        "correction": np.array([0.0]),
        "reference_logprobs": np.array([-2.0]),
    }
    config: Settings = {"kl_coefficient": 1.0, "kl_estimator": "k2"}
    term = LOSSES["reinforce"].term({"logprobs": np.array([-1.0])}, given, config)
    assert term == pytest.approx([0.5])


def test_no_gradient_flows_through_the_off_policy_weight_of_the_kl_term() -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    given = tensors(
        {
            "advantage": np.zeros(1),
            "proximal_logprobs": np.array([-1.0 - math.log(2)]),
            "reference_logprobs": np.array([-1.5]),
        }
    )
    config: Settings = {"kl_coefficient": 1.0, "kl_estimator": "k2"}
    LOSSES["importance_sampling"].term({"logprobs": logprobs}, given, config).sum().backward()
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
        find_loss("nll")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ppo", {"dual_clip": 1.0}),
        ("ppo", {"clip_low": "wide"}),
        ("bapo", {"clip_high_step": 0.0}),
        ("bapo", {"positive_share": 1.0}),
        ("value", {"clip": 0.0}),
        ("jsd_top_k", {"beta": 1.0}),
        ("sapo", {"tau_positive": 0.0}),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name: str, config: Settings) -> None:
    case = make_loss_case(name, rows=(2,))
    with pytest.raises(ConfigError, match=next(iter(config))):
        case.loss.term(case.outputs, case.inputs, config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"advantage": np.ones((3, 1))}, "arrays differ in shape"),
        ({"advantage": np.ones(1)}, "arrays differ in shape"),
        ({"proximal_logprobs": None}, r"needs the inputs \['proximal_logprobs'\]"),
    ],
)
def test_what_numpy_would_broadcast_is_refused(change: Mapping[str, Any], words: str) -> None:
    """A column [n, 1] would make [n, n] terms, and a loss of another size without a word."""
    inputs = {"advantage": np.ones(3), "proximal_logprobs": np.zeros(3), **change}
    given = {name: array for name, array in inputs.items() if array is not None}
    with pytest.raises(InvariantError, match=words):
        LOSSES["ppo"].term({"logprobs": np.zeros(3)}, given, {})
    with pytest.raises(InvariantError, match=r"needs the outputs \['entropy'\]"):
        LOSSES["ppo"].term({"logprobs": np.zeros(3)}, given, {"entropy_coefficient": 0.1})


def test_a_row_loss_without_rows_says_so() -> None:
    inputs = {"advantage": np.ones(3), "proximal_logprobs": np.zeros(3)}
    with pytest.raises(InvariantError, match=r"needs the inputs \['row'\]"):
        LOSSES["gspo"].term({"logprobs": np.zeros(3)}, inputs, {})


def test_outputs_are_asked_for_only_when_they_are_used() -> None:
    assert LOSSES["ppo"].outputs({}) == ("logprobs",)
    assert LOSSES["ppo"].outputs({"entropy_coefficient": 0.01}) == ("logprobs", "entropy")
    assert LOSSES["value"].outputs({}) == ("values",)
    top_k = LOSSES["reverse_kl_top_k"]
    assert top_k.outputs({}) == ("candidate_logprobs",)
    assert top_k.outputs({"kl_coefficient": 0.1}) == ("candidate_logprobs", "logprobs")


def test_losses_without_a_bound_on_the_ratio_say_so() -> None:
    unbounded = {"reinforce", "importance_sampling", "kl_cov", "reverse_kl"}
    assert {n for n, d in LOSSES.items() if not d.bounded} == unbounded


def test_row_losses_and_their_aggregations() -> None:
    """gspo is defined by its mean over rows; a loss that couples the tokens of a row says so."""
    rows = {n for n, d in LOSSES.items() if d.level == "row"}
    assert rows == {"gspo", "gspo_token", "luspo", "gmpo", "vespo", "topr", "kimi"}
    fixed = {n: d.aggregation for n, d in LOSSES.items() if d.aggregation}
    assert fixed == {
        **dict.fromkeys(("gspo", "gspo_token", "gmpo"), "sequence_mean_token_mean"),
        "luspo": "sequence_mean_token_sum",
    }
