"""Group filters by name."""

from __future__ import annotations

import pytest

from nexrl.algorithms.filters import GROUP_FILTERS, all_truncated, constant_reward
from nexrl.testing.makers import make_draw, make_group, make_record, make_trajectory
from nexrl.types import RolloutGroup


def group(*statuses: str) -> RolloutGroup:
    draw = make_draw()
    return make_group(
        records=[make_record(draw, i, status=status) for i, status in enumerate(statuses)]
    )


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        (("truncated", "truncated"), "all_truncated"),
        (("truncated", "completed"), None),
        (("completed", "completed"), None),
    ],
)
def test_a_group_without_a_finished_trajectory_is_dropped(
    statuses: tuple[str, ...], reason: str | None
) -> None:
    assert all_truncated(group(*statuses)) == reason


def test_rewards_that_are_equal_but_for_rounding_are_constant() -> None:
    assert constant_reward(make_group((1e9, 1e9 + 1.0))) == "constant_reward"
    assert constant_reward(make_group((0.1 + 0.2, 0.3))) == "constant_reward"
    assert constant_reward(make_group((1e-3, 2e-3))) is None


def test_a_filter_answers_with_its_own_name() -> None:
    """The ledger then says which filter it was."""
    truncated = group("truncated", "truncated")
    assert {name: ask(truncated) for name, ask in GROUP_FILTERS.items()} == {
        name: name for name in GROUP_FILTERS
    }


def test_constant_groups_are_dropped_one_by_one() -> None:
    """FR-050, FR-052: groups arrive singly and are judged by their own spread."""
    groups = [make_group((1.0, 1.0)), make_group((0.0, 0.0)), make_group((1.0, 0.0))]
    assert [constant_reward(g) for g in groups] == ["constant_reward", "constant_reward", None]


def test_abstaining_members_do_not_count_and_all_abstaining_is_constant() -> None:
    """FR-070"""
    assert constant_reward(make_group((1.0, None, 0.0))) is None
    assert constant_reward(make_group((1.0, None, 1.0))) == "constant_reward"
    assert constant_reward(make_group((None, None))) == "constant_reward"


def test_roles_are_compared_apart() -> None:
    """FR-046: solver and judge of one item have baselines of their own."""
    draw = make_draw()

    def record(member: int, solver: float, judge: float):  # type: ignore[no-untyped-def]
        return make_record(
            draw,
            member,
            trajectories=[
                make_trajectory(reward=solver, group_id="i0/0/solver"),
                make_trajectory(reward=judge, group_id="i0/0/judge"),
            ],
        )

    assert constant_reward(make_group(records=[record(0, 1, 0), record(1, 1, 0)]))
    assert constant_reward(make_group(records=[record(0, 1, 0), record(1, 1, 1)])) is None
