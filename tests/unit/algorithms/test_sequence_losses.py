"""Losses of whole rows by hand: gspo, gspo_token, luspo, gmpo."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from nexrl.algorithms.aggregation import token_weights
from nexrl.algorithms.array_namespace import row_lengths, row_mean, row_sum
from nexrl.algorithms.loss_definition import Settings
from nexrl.algorithms.losses import LOSSES
from nexrl.testing.loss_inputs import make_loss_case

WIDE: Settings = {"clip_low": 0.9, "clip_high": 9.0}


def given(differences: list[list[float]], advantages: list[float]) -> tuple[Any, Any]:
    """Rows of log ratios, one advantage each."""
    lengths = [len(row) for row in differences]
    flat = np.concatenate([np.array(row) for row in differences])
    return {"logprobs": flat - 1.0}, {
        "advantage": np.repeat(advantages, lengths),
        "proximal_logprobs": np.full(len(flat), -1.0),
        "row": np.repeat(np.arange(len(lengths)), lengths),
    }


def gradient(name: str, outputs: Any, inputs: Any, weight: Any, config: Settings) -> Any:
    logprobs = torch.tensor(outputs["logprobs"], requires_grad=True)
    tensors = {k: torch.tensor(v) for k, v in inputs.items()}
    term = LOSSES[name].term({"logprobs": logprobs}, tensors, config)
    (term * torch.tensor(weight)).sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.numpy()


def test_sums_and_means_over_rows_work_in_any_order_on_both_libraries() -> None:
    values, rows = np.array([1.0, 5.0, 2.0, 3.0]), np.array([0, 2, 0, 2])
    assert row_sum(values, rows).tolist() == [3.0, 8.0, 3.0, 8.0]
    assert row_mean(torch.tensor(values), torch.tensor(rows)).tolist() == [1.5, 4.0, 1.5, 4.0]
    assert row_lengths(rows, values).tolist() == [2.0] * 4
    assert row_mean(values[:0], rows[:0]).tolist() == []


def test_gspo_clips_the_geometric_mean_of_a_row() -> None:
    """Two rows: s = exp(0.1), clipped at 1 + 4e-4 where A > 0, free where A < 0."""
    outputs, inputs = given([[0.3, -0.1], [0.3, -0.1]], [2.0, -2.0])
    term = LOSSES["gspo"].term(outputs, inputs, {})
    s = math.exp(0.1)
    assert term == pytest.approx([-2 * (1 + 4e-4)] * 2 + [2 * s] * 2)


def test_gspo_divides_the_gradient_of_a_row_evenly_among_its_tokens() -> None:
    """The gradient of 1/R (-s A) by each logprob of a row of n tokens is -s A / (R n)."""
    outputs, inputs = given([[0.2, 0.0], [0.1, 0.1, 0.1, -0.1]], [1.0, -2.0])
    weight = np.repeat([1 / 4, 1 / 8], [2, 4])
    found = gradient("gspo", outputs, inputs, weight, WIDE)
    expected = np.repeat([-math.exp(0.1) / 4, 2 * math.exp(0.05) / 8], [2, 4])
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_gspo_token_is_gspo_when_a_row_has_one_advantage() -> None:
    case = make_loss_case("gspo", rows=(3, 1, 5))
    weight, outputs = case.inputs["weight"], case.outputs
    inputs = {k: v for k, v in case.inputs.items() if k != "correction"}
    np.testing.assert_allclose(
        LOSSES["gspo_token"].term(outputs, inputs, WIDE), LOSSES["gspo"].term(outputs, inputs, WIDE)
    )
    # One weight for all tokens of a row, as every aggregation gives.
    found = [gradient(n, outputs, inputs, weight, WIDE) for n in ("gspo", "gspo_token")]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


def test_gspo_token_gives_each_token_the_gradient_of_its_own_advantage() -> None:
    outputs, inputs = given([[0.1, 0.1]], [1.0])
    inputs["advantage"] = np.array([1.0, 3.0])
    found = gradient("gspo_token", outputs, inputs, np.ones(2), WIDE)
    np.testing.assert_allclose(found, [-math.exp(0.1), -3 * math.exp(0.1)], rtol=1e-12)


def test_luspo_counts_a_row_by_its_length() -> None:
    """Its aggregation makes a row of four tokens weigh four times a row of one."""
    outputs, inputs = given([[0.1], [0.1] * 4], [1.0, 1.0])
    weights = token_weights(np.array([1, 4]), np.arange(2), LOSSES["luspo"].aggregation or "")
    term = LOSSES["luspo"].term(outputs, inputs, WIDE) * np.repeat(weights, [1, 4])
    sums = np.bincount(inputs["row"], term)
    assert sums == pytest.approx([-math.exp(0.1) / 2, -4 * math.exp(0.1) / 2])


def test_luspo_clips_where_its_paper_does_and_not_where_gspo_does() -> None:
    outputs, inputs = given([[0.002], [0.004]], [1.0, 1.0])
    term = LOSSES["luspo"].term(outputs, inputs, {})
    assert term == pytest.approx([-math.exp(0.002), -1.0025], rel=1e-12)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (1.0, -math.exp((0.4 - 1.0) / 2)),  # only the token above the clip is held
        (-1.0, math.exp((0.9 - 0.4) / 2)),  # only the token below it
    ],
)
def test_gmpo_clips_each_token_on_the_pessimistic_side(advantage: float, expected: float) -> None:
    outputs, inputs = given([[0.9, -1.0]], [advantage])
    assert LOSSES["gmpo"].term(outputs, inputs, {}) == pytest.approx([expected] * 2)
    found = gradient("gmpo", outputs, inputs, np.ones(2), {})
    clips = LOSSES["gmpo"].clips
    assert clips is not None
    low, high = clips(outputs, inputs, LOSSES["gmpo"].resolve({}))
    assert (found == 0).tolist() == (low | high).tolist()


def test_metrics_are_told_the_ratio_of_the_row() -> None:
    outputs, inputs = given([[0.3, -0.1]], [1.0])
    ratio_of = LOSSES["gspo"].ratio_of
    assert ratio_of is not None
    assert ratio_of(outputs, inputs) == pytest.approx([math.exp(0.1)] * 2)
