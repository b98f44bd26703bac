"""The ledger: every admitted rollout has exactly one outcome."""

import pytest

from nexrl.errors import InvariantError
from nexrl.pool.ledger import Ledger
from nexrl.testing.makers import make_record


def test_admitted_equals_the_sum_of_outcomes_after_every_move() -> None:
    ledger = Ledger()
    ledger.admit(4)
    ledger.move("in_flight", "ready", 3)
    ledger.move("in_flight", "failed", 1, "infrastructure/ServiceError")
    ledger.move("ready", "filtered", 1, "constant_reward")
    ledger.move("ready", "handed_out", 2)
    ledger.move("handed_out", "trained", 2)
    snapshot = ledger.snapshot()
    assert snapshot.balanced
    assert (snapshot.admitted, snapshot.trained) == (4, 2)
    assert snapshot.failed == {"infrastructure/ServiceError": 1}
    assert snapshot.filtered == {"constant_reward": 1}


def test_a_move_that_was_not_there_to_make_stops_with_every_number() -> None:
    ledger = Ledger()
    ledger.admit(1)
    with pytest.raises(InvariantError, match=r"admitted 1, in_flight 1, ready -1.*trained 1"):
        ledger.move("ready", "trained")


def test_a_count_changed_behind_the_ledgers_back_stops_at_the_next_change() -> None:
    ledger = Ledger()
    ledger.admit(2)
    ledger.admitted += 1
    with pytest.raises(InvariantError, match="does not balance: admitted 3"):
        ledger.move("in_flight", "ready")


def test_attempts_trajectories_rows_and_tokens_are_counted_beside_rollouts() -> None:
    ledger = Ledger()
    ledger.count_record(make_record(attempts=3))
    assert ledger.beside == {
        "pushed": 0,
        "attempts": 3,
        "trajectories": 1,
        "rows": 1,
        "tokens": 5,
    }
    assert ledger.snapshot().admitted == 0


def test_saved_state_leaves_out_rollouts_that_are_admitted_again() -> None:
    ledger = Ledger()
    ledger.admit(4)
    ledger.move("in_flight", "trained", 2)
    ledger.move("in_flight", "filtered", 1, "constant_reward")
    state = ledger.to_state([("in_flight", ""), ("filtered", "constant_reward")])
    loaded = Ledger()
    loaded.load_state(state)
    snapshot = loaded.snapshot()
    assert (snapshot.admitted, snapshot.trained, snapshot.filtered) == (2, 2, {})


def test_saved_state_with_an_open_rollout_is_refused() -> None:
    ledger = Ledger()
    ledger.admit(1)
    with pytest.raises(InvariantError, match="keeps open rollouts"):
        ledger.to_state([])
