"""Which units live in device memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.policy.device_homes import DeviceUnit, divide_device

KIB, MIB = 1 << 10, 1 << 20
ANYTHING = 1 << 40  # of host memory


def unit(parameters: int, *, states: int = 3, may_move: bool = True) -> DeviceUnit:
    """A unit whose record and gradient take `states` times its parameters, computed with as it is stored."""
    whole = parameters * (1 + states)
    return DeviceUnit(parameters, at_home=whole, copy=parameters, copy_at_home=0, on_host=whole, may_move=may_move)


def alone(units: list[DeviceUnit]) -> list[list[int]]:
    return [[number] for number in range(len(units))]


def test_everything_lives_there_if_it_fits() -> None:
    units = [unit(MIB)] * 4
    division = divide_device(units, 16 * MIB, alone(units), ANYTHING)
    assert division.at_home == (True,) * 4
    assert (division.homes, division.copies) == (16 * MIB, 0)


def test_copies_stay_before_a_unit_lives_there() -> None:
    units = [unit(MIB)] * 4
    assert divide_device(units, 4 * MIB, alone(units), ANYTHING).homes == 0
    # Four bytes at home, of which one would be a copy anyway.
    assert divide_device(units, 7 * MIB - 1, alone(units), ANYTHING).homes == 0
    assert divide_device(units, 7 * MIB, alone(units), ANYTHING).at_home == (True, False, False, False)


def test_what_does_not_fit_in_host_memory_lives_there_before_copies_stay() -> None:
    units = [unit(MIB)] * 8
    division = divide_device(units, 12 * MIB, alone(units), host_room=24 * MIB)
    assert division.at_home == (True, True) + (False,) * 6
    assert division.copies == 4 * MIB  # less than six copies, enough for three
    assert divide_device(units, 12 * MIB, alone(units), host_room=28 * MIB).at_home[:2] == (True, False)


def test_small_units_come_first_and_then_those_that_the_model_begins_with() -> None:
    units = [unit(MIB), unit(MIB), unit(KIB)]
    division = divide_device(units, 2 * MIB + 4 * KIB, alone(units), ANYTHING)
    assert division.at_home == (False, False, True)
    division = divide_device(units, 5 * MIB + 4 * KIB, alone(units), ANYTHING)
    assert division.at_home == (True, False, True)


def test_a_unit_that_may_not_move_stays_on_the_host() -> None:
    units = [unit(MIB, may_move=False), unit(MIB)]
    assert divide_device(units, 100 * MIB, alone(units), ANYTHING).at_home == (False, True)


def test_copies_of_units_that_live_there_need_room_too() -> None:
    """They are gathered from all ranks, or computed with in another dtype."""
    gathered = DeviceUnit(MIB, at_home=4 * MIB, copy=2 * MIB, copy_at_home=2 * MIB, on_host=4 * MIB)
    units = [gathered] * 4
    assert all(divide_device(units, 16 * MIB + 6 * MIB, alone(units), ANYTHING).at_home)
    assert not all(divide_device(units, 16 * MIB + 6 * MIB - 1, alone(units), ANYTHING).at_home)


sizes = st.lists(
    st.builds(unit, st.integers(1, 600 * KIB), states=st.integers(0, 9), may_move=st.booleans()), min_size=1, max_size=8
)


@given(sizes, st.integers(0, 30 * MIB), st.integers(0, 30 * MIB), st.data())
def test_what_is_chosen_fits_with_room_to_stream_the_others(
    units: list[DeviceUnit], budget: int, host_room: int, data: st.DataObject
) -> None:
    together = data.draw(st.lists(st.lists(st.integers(0, len(units) - 1), max_size=3, unique=True), max_size=5))
    division = divide_device(units, budget, together, host_room)
    assert len(division.at_home) == len(units)
    assert division.homes == sum(u.at_home for u, at_home in zip(units, division.at_home, strict=True) if at_home)
    assert division.homes + division.copies == budget
    assert all(unit.may_move for unit, at_home in zip(units, division.at_home, strict=True) if at_home)
    if any(division.at_home):
        streamed = [0 if at_home else unit.copy for unit, at_home in zip(units, division.at_home, strict=True)]
        at_once = max((sum(streamed[number] for number in group) for group in together), default=0)
        assert division.copies >= min(sum(streamed), 3 * at_once)


@given(sizes, st.integers(0, 30 * MIB))
def test_all_or_nothing(units: list[DeviceUnit], host_room: int) -> None:
    needed = sum(unit.at_home for unit in units)
    assert not any(divide_device(units, 0, alone(units), host_room).at_home)
    division = divide_device(units, needed + sum(unit.copy for unit in units), alone(units), host_room)
    assert division.at_home == tuple(unit.may_move for unit in units)
