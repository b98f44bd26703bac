"""Which groups make the next batch."""

from nexrl.pool.group_window import GroupWindow
from nexrl.pool.open_group import OpenGroup
from nexrl.testing.makers import make_draw


def waiting(admission: int, *, is_closed: bool = True, oldest_version: int = 0) -> OpenGroup:
    """A group of one rollout that stands in the window."""
    group = OpenGroup(
        draw=make_draw(admission),
        policy="actor",
        size=1,
        admission=admission,
        admitted_version=oldest_version,
    )
    group.num_running = 0 if is_closed else 1
    return group


def make_window(
    *groups: OpenGroup, wait_for_bound: bool = True, is_final: bool = False
) -> GroupWindow:
    """Two batches of two, staleness bound 3."""
    window = GroupWindow(batch_size=2, num_batches=2, threshold=3, wait_for_bound=wait_for_bound)
    window.is_final = is_final
    for group in groups:
        window.append(group)
    return window


def chosen(window: GroupWindow, version: int = 0) -> list[int]:
    return [group.admission for group in window.choose(version)]


def test_a_window_of_one_batch_waits_for_its_first_group() -> None:
    window = GroupWindow(batch_size=2, num_batches=1, threshold=3, wait_for_bound=True)
    first = waiting(0, is_closed=False)
    for group in (first, waiting(1), waiting(2)):
        window.append(group)
    assert chosen(window) == []
    first.num_running = 0
    window.note_closed(first)
    assert chosen(window) == [0, 1]


def test_a_wider_window_hands_out_what_is_ready_in_admission_order() -> None:
    running = (waiting(0, is_closed=False), waiting(2, is_closed=False))
    assert chosen(make_window(running[0], waiting(1), running[1], waiting(3))) == [1, 3]


def test_a_group_at_the_bound_goes_before_earlier_ones() -> None:
    window = make_window(
        waiting(0, oldest_version=4), waiting(1, oldest_version=4), waiting(2, oldest_version=2)
    )
    assert chosen(window, version=5) == [0, 2]


def test_a_running_group_at_the_bound_blocks_the_hand_out_until_it_has_ended() -> None:
    blocker = waiting(0, is_closed=False, oldest_version=2)
    window = make_window(blocker, waiting(1), waiting(2))
    assert window.may_choose()
    assert chosen(window, version=5) == []
    assert not window.may_choose()
    blocker.num_running = 0
    window.note_closed(blocker)
    assert chosen(window, version=5) == [0, 1]


def test_with_cancel_nobody_waits_for_a_running_group_at_the_bound() -> None:
    window = make_window(
        waiting(0, is_closed=False, oldest_version=2),
        waiting(1, oldest_version=4),
        waiting(2, oldest_version=4),
        wait_for_bound=False,
    )
    assert chosen(window, version=5) == [1, 2]


def test_the_last_batch_may_be_short() -> None:
    assert chosen(make_window(waiting(4))) == []
    assert chosen(make_window(waiting(4), is_final=True)) == [4]
    assert chosen(make_window(is_final=True)) == []


def test_a_removed_group_makes_room_for_the_next_one_behind() -> None:
    groups = [waiting(i) for i in range(6)]
    window = make_window(*groups)
    window.remove(groups[5])
    window.remove(groups[0])
    assert ([g.admission for g in window], window.num_closed) == ([1, 2, 3, 4], 4)
    window.put_back([groups[0]])
    assert [g.admission for g in window] == [0, 1, 2, 3, 4]
