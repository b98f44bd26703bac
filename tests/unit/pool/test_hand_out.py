"""Which groups make the next batch."""

from dataclasses import dataclass

from nexrl.pool.hand_out import Selection, select_groups


@dataclass(frozen=True)
class Waiting:
    admission: int
    is_closed: bool = True
    oldest_version: int = 0


def select(
    candidates: list[Waiting],
    *,
    version: int = 0,
    threshold: int = 3,
    wait_for_bound: bool = True,
    is_final: bool = False,
) -> Selection[Waiting]:
    return select_groups(
        candidates,
        batch_size=2,
        version=version,
        threshold=threshold,
        wait_for_bound=wait_for_bound,
        is_final=is_final,
    )


def admissions(selection: Selection[Waiting]) -> list[int]:
    return [group.admission for group in selection.chosen]


def test_a_window_of_one_batch_waits_for_its_first_group() -> None:
    assert admissions(select([Waiting(0, is_closed=False), Waiting(1)])) == []
    assert admissions(select([Waiting(0), Waiting(1)])) == [0, 1]


def test_a_wider_window_hands_out_what_is_ready_in_admission_order() -> None:
    window = [Waiting(0, is_closed=False), Waiting(1), Waiting(2, is_closed=False), Waiting(3)]
    assert admissions(select(window)) == [1, 3]


def test_a_group_at_the_bound_goes_before_earlier_ones() -> None:
    window = [
        Waiting(0, oldest_version=4),
        Waiting(1, oldest_version=4),
        Waiting(2, oldest_version=2),
    ]
    assert admissions(select(window, version=5)) == [0, 2]


def test_a_running_group_at_the_bound_blocks_the_hand_out() -> None:
    window = [Waiting(0, is_closed=False, oldest_version=2), Waiting(1), Waiting(2)]
    assert select(window, version=5).blocker == window[0]


def test_with_cancel_nobody_waits_for_a_running_group_at_the_bound() -> None:
    window = [
        Waiting(0, is_closed=False, oldest_version=2),
        Waiting(1, oldest_version=4),
        Waiting(2, oldest_version=4),
    ]
    assert admissions(select(window, version=5, wait_for_bound=False)) == [1, 2]


def test_the_last_batch_may_be_short() -> None:
    assert admissions(select([Waiting(4)])) == []
    assert admissions(select([Waiting(4)], is_final=True)) == [4]
    assert admissions(select([], is_final=True)) == []
