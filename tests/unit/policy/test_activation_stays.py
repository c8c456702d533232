"""Which saved tensors stay on the device."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.policy.activation_stays import ActivationStays


def step(stays: ActivationStays, *forwards: list[int]) -> list[list[bool]]:
    """Forwards, each followed by its backward; returns which tensors stayed."""
    found = []
    for sizes in forwards:
        chosen = [stays.stays(size) for size in sizes]
        for size, is_here in reversed(list(zip(sizes, chosen, strict=True))):
            stays.used()
            if is_here:
                stays.left(size)
        found.append(chosen)
    stays.end_step()
    return found


def with_room(num_bytes: int) -> ActivationStays:
    stays = ActivationStays()
    stays.room = num_bytes
    return stays


def test_nothing_stays_in_the_first_step_and_the_last_ones_in_the_next() -> None:
    stays = with_room(25)
    assert step(stays, [10, 10, 10, 10]) == [[False] * 4]
    assert step(stays, [10, 10, 10, 10]) == [[False, False, True, True]]


def test_all_stay_where_all_fit() -> None:
    stays = with_room(40)
    step(stays, [10, 10, 10, 10])
    for _ in range(3):
        assert step(stays, [10, 10, 10, 10]) == [[True] * 4]


def test_forwards_of_one_step_are_counted_apart() -> None:
    stays = with_room(20)
    step(stays, [10, 10, 10], [10, 10, 10])
    assert step(stays, [10, 10, 10], [10, 10, 10]) == [[False, True, True]] * 2


def test_two_forwards_before_a_backward_share_the_room() -> None:
    stays = with_room(20)
    step(stays, [10, 10])
    assert step(stays, [10, 10, 10, 10]) == [[True, True, False, False]]
    assert stays.held_bytes == 0


def test_without_room_nothing_stays_any_more() -> None:
    stays = with_room(40)
    step(stays, [10, 10])
    step(stays, [10, 10])
    stays.room = 0
    assert step(stays, [10, 10]) == [[False, False]]


@given(st.lists(st.lists(st.integers(1, 50), max_size=8), min_size=1, max_size=6), st.integers(0, 200))
def test_never_more_than_the_room(forwards: list[list[int]], room: int) -> None:
    stays = with_room(room)
    for sizes in forwards:
        step(stays, sizes)
        assert stays.peak_bytes <= room
        assert stays.held_bytes == 0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 200))
def test_as_many_of_the_last_ones_as_fit(sizes: list[int], room: int) -> None:
    stays = with_room(room)
    step(stays, sizes)
    (chosen,) = step(stays, sizes)
    first = chosen.index(True) if True in chosen else len(sizes)
    assert all(chosen[first:])
    assert sum(sizes[first:]) <= room
    assert first == 0 or sum(sizes[first - 1 :]) > room
