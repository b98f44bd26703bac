"""Losses and metrics of preferences: numbers worked by hand, denominators, extremes, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nexrl.algorithms.metrics import METRIC_UNITS
from nexrl.algorithms.preference_losses import (
    PREFERENCE_INPUTS,
    PREFERENCE_LOSSES,
    PreferenceLoss,
    find_preference_loss,
    log_odds,
)
from nexrl.algorithms.preference_metrics import preference_metrics, share_outranked
from nexrl.errors import ConfigError, InvariantError

LOSSES = list(PREFERENCE_LOSSES.values())
LN2 = np.log(2.0)


def arrays(**values: Any) -> dict[str, Any]:
    return {name: np.atleast_1d(np.asarray(value)) for name, value in values.items()}


def random_inputs(loss: PreferenceLoss, size: int, scale: float = 1.0) -> dict[str, Any]:
    generator = np.random.default_rng(3)
    inputs: dict[str, Any] = {}
    for name in (*loss.required, *loss.optional):
        draws = generator.random(size)
        if name.endswith("lengths"):
            inputs[name] = 1 + np.floor(4 * draws)
        elif name == "desirable":
            inputs[name] = draws > 0.5
        elif name in ("labels", "margin", "z0"):
            inputs[name] = draws
        else:
            inputs[name] = (2 * draws - 1) * scale if "scores" in name else -draws * scale
    return inputs


PAIR = arrays(
    chosen_logprobs=-1.0,
    rejected_logprobs=-3.0,
    reference_chosen_logprobs=-2.0,
    reference_rejected_logprobs=-1.0,
    chosen_lengths=2,
    rejected_lengths=3,
)
"""d_w = 1, d_l = -2; mean logprobs -1/2 and -1."""


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("dpo", {"beta": 0.5}, np.log1p(np.exp(-1.5))),
        ("dpo", {"beta": 0.5, "label_smoothing": 0.2}, np.log1p(np.exp(-1.5)) + 0.2 * 1.5),
        ("dpo", {"beta": 0.5, "sft_coefficient": 3.0}, np.log1p(np.exp(-1.5)) + 3 * 0.5),
        ("ipo", {"beta": 0.25}, (3.0 - 2.0) ** 2),
        ("hinge", {"beta": 0.25}, 0.25),
        ("hinge", {"beta": 0.5}, 0.0),
        ("simpo", {"beta": 2.0, "margin": 1.0}, LN2),
        (
            "orpo",
            {"odds_coefficient": 2.0},
            0.5 + 2 * np.log1p((np.exp(0.5) - 1) / (np.exp(1.0) - 1)),
        ),
    ],
)
def test_a_pair_by_hand(name: str, settings: dict[str, float], expected: float) -> None:
    assert PREFERENCE_LOSSES[name].loss(PAIR, settings)[0] == pytest.approx(expected, rel=1e-12)


def test_labelled_responses_by_hand() -> None:
    inputs = arrays(
        logprobs=[-1.0, -1.0],
        reference_logprobs=[-4.0, -4.0],
        desirable=[True, False],
        z0=[1.0, 1.0],
    )
    settings = {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 3.0}
    above = 1 / (1 + np.exp(-1.0))  # sigma(beta (d - z0)), d = 3
    losses = PREFERENCE_LOSSES["kto"].loss(inputs, settings)
    assert losses == pytest.approx([2 * (1 - above), 3 * above])


def test_scores_by_hand() -> None:
    pair = arrays(chosen_scores=2.0, rejected_scores=0.5, margin=1.5)
    assert PREFERENCE_LOSSES["reward_model"].loss(pair, {})[0] == pytest.approx(LN2)
    del pair["margin"]
    assert PREFERENCE_LOSSES["reward_model"].loss(pair, {"margin": 1.5})[0] == pytest.approx(LN2)
    steps = arrays(scores=[0.0, 2.0, 2.0], labels=[1.0, 1.0, 0.0])
    expected = [LN2, np.log1p(np.exp(-2.0)), np.log1p(np.exp(2.0))]
    assert PREFERENCE_LOSSES["process_reward_model"].loss(steps, {}) == pytest.approx(expected)


def test_the_parts_of_a_loss_are_told_apart() -> None:
    """FR-040: a metric of one term does not contain another."""
    parts = PREFERENCE_LOSSES["orpo"].parts(PAIR, {"odds_coefficient": 0.0})
    assert (parts["preference"][0], parts["imitation"][0]) == (0.0, 0.5)
    assert set(PREFERENCE_LOSSES["dpo"].parts(PAIR, {})) == {"preference"}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_numpy_and_torch_give_the_same_numbers(loss: PreferenceLoss) -> None:
    inputs = random_inputs(loss, 8)
    tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
    np.testing.assert_allclose(loss.loss(tensors, {}).numpy(), loss.loss(inputs, {}), rtol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 80.0, 1e4])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_loss_and_gradient_are_finite_at_extremes(loss: PreferenceLoss, scale: float) -> None:
    inputs = random_inputs(loss, 16, scale)
    for name in inputs:
        if name.endswith("logprobs"):
            inputs[name][:4] = 0.0  # certain, where odds are infinite
    tensors = {
        name: torch.tensor(v) if v.dtype == bool else torch.tensor(v, dtype=torch.float32)
        for name, v in inputs.items()
    }
    live = [t.requires_grad_() for n, t in tensors.items() if "scores" in n or "logprobs" in n]
    loss.loss(tensors, {}).sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in live if t.grad is not None)


def test_the_reference_point_of_kto_carries_no_gradient() -> None:
    tensors = {k: torch.tensor(v) for k, v in random_inputs(PREFERENCE_LOSSES["kto"], 4).items()}
    z0 = tensors["z0"].requires_grad_()
    loss = PREFERENCE_LOSSES["kto"].loss({**tensors, "z0": z0}, {})
    assert not loss.requires_grad


def test_log_odds_keep_their_precision_near_certainty_and_far_from_it() -> None:
    values = log_odds(np.array([-1e-5, -LN2, -50.0]))
    assert values == pytest.approx([np.log(1 / 1e-5), 0.0, -50.0], rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_a_missing_input_and_an_unknown_setting_are_named(loss: PreferenceLoss) -> None:
    inputs = random_inputs(loss, 2)
    del inputs[loss.required[0]]
    with pytest.raises(InvariantError, match=loss.required[0]):
        loss.loss(inputs, {})
    with pytest.raises(ConfigError, match=r"no setting.*gamma"):
        loss.resolve({"gamma": 1.0})


def test_an_unknown_loss_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'dpo'.*'simpo'"):
        find_preference_loss("dpoo")


def test_every_input_is_described_and_every_metric_has_a_unit() -> None:
    used = {name for loss in LOSSES for name in (*loss.required, *loss.optional)}
    assert used == set(PREFERENCE_INPUTS)
    assert {f"loss/{loss.name}" for loss in LOSSES} <= set(METRIC_UNITS)


def test_which_losses_need_a_reference_or_scores() -> None:
    assert [x.name for x in LOSSES if x.needs_reference] == ["dpo", "ipo", "hinge", "kto"]
    assert [x.name for x in LOSSES if x.needs_scores] == ["reward_model", "process_reward_model"]


def test_accuracy_and_margin_of_pairs_come_from_implicit_rewards() -> None:
    inputs = {name: np.repeat(values, 2).astype(float) for name, values in PAIR.items()}
    inputs["rejected_logprobs"] = np.array([-3.0, 1.0])  # d_l = -2 and 2
    metrics = preference_metrics(PREFERENCE_LOSSES["dpo"], inputs, {"beta": 0.5})
    assert metrics == pytest.approx(
        {
            "accuracy": 0.5,
            "margin": 0.5 * (3.0 - 1.0) / 2,
            "reward_chosen": 0.5,
            "reward_rejected": 0.0,
            "logprob_chosen": -1.0,
            "logprob_rejected": -1.0,
        }
    )


def test_equal_rewards_are_no_success() -> None:
    scores = arrays(chosen_scores=[0.0], rejected_scores=[0.0])
    steps = arrays(scores=[0.0, 0.0], labels=[0.0, 1.0])
    for name, inputs in (("reward_model", scores), ("process_reward_model", steps)):
        assert preference_metrics(PREFERENCE_LOSSES[name], inputs, {})["accuracy"] == 0.0


def test_labelled_accuracy_is_over_all_combinations() -> None:
    assert share_outranked(np.array([1.0, 3.0]), np.array([0.0, 1.0, 2.0])) == pytest.approx(4 / 6)
    inputs = random_inputs(PREFERENCE_LOSSES["kto"], 3) | {"desirable": np.ones(3, np.bool_)}
    metrics = preference_metrics(PREFERENCE_LOSSES["kto"], inputs, {})
    assert "accuracy" not in metrics
    assert "reward_chosen" in metrics


def test_lengths_in_a_column_are_refused_instead_of_broadcast() -> None:
    inputs = {name: np.ones(2) for name in PREFERENCE_LOSSES["simpo"].required}
    with pytest.raises(InvariantError, match="inputs differ in shape"):
        PREFERENCE_LOSSES["simpo"].loss({**inputs, "chosen_lengths": np.ones((2, 1))}, {})
