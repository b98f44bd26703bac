"""Learning rates: a pure function of the step."""

from __future__ import annotations

import pytest

from nexrl.algorithms.schedule import Schedule, learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.8682, 0.55, 0.2318]),
    ],
)
def test_learning_rates_by_hand(schedule: Schedule, expected: list[float]) -> None:
    rates = [
        learning_rate(
            step, peak=1.0, warmup_steps=2, total_steps=6, schedule=schedule, min_ratio=0.1
        )
        for step in range(6)
    ]
    assert rates == pytest.approx(expected, abs=1e-4)


def test_the_learning_rate_stays_at_its_minimum_beyond_the_end() -> None:
    rate = learning_rate(
        99, peak=2.0, warmup_steps=0, total_steps=6, schedule="cosine", min_ratio=0.1
    )
    assert rate == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_warm_up_of_the_whole_stage_leaves_the_minimum_and_no_step_at_the_peak(
    schedule: Schedule,
) -> None:
    rates = [
        learning_rate(
            step, peak=1.0, warmup_steps=2, total_steps=2, schedule=schedule, min_ratio=0.1
        )
        for step in (1, 2, 3)
    ]
    assert rates == pytest.approx([1.0, 0.1, 0.1])
