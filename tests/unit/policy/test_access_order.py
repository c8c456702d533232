"""The recorded order of accesses: when it is adopted, and when each block is used next."""

from __future__ import annotations

from zero_infinity.policy.access_order import AccessOrder


def recorded(*blocks: int) -> AccessOrder:
    """An order of these accesses, at its beginning."""
    order = AccessOrder()
    for block in blocks:
        order.record(block)
    assert order.end_cycle(same_order=True)
    return order


def test_there_is_no_order_before_the_end_of_a_cycle() -> None:
    order = AccessOrder()
    order.record(1)
    assert not order
    assert order.end_cycle(same_order=True)
    assert order.accesses == (1,)


def test_the_next_use_is_in_this_cycle_or_in_the_next() -> None:
    order = recorded(1, 2, 3, 2)
    order.advance()
    assert [order.next_use(block) for block in (1, 2, 3)] == [4, 1, 2]
    assert order.at(5) == 2


def test_of_blocks_without_a_place_the_least_recently_used_is_used_last() -> None:
    order = recorded(1)
    for block in (7, 8):
        order.record(block)
    assert order.next_use(7) > order.next_use(8) > order.next_use(1)
    assert order.next_use(9) > order.next_use(7)


def test_what_is_ahead_is_jumped_to_and_what_is_behind_is_not() -> None:
    order = recorded(*range(10))
    assert order.jump_past(3)
    assert order.clock == 4
    assert not order.jump_past(2)
    assert order.clock == 4


def test_the_same_cycle_again_changes_nothing_and_another_replaces_it() -> None:
    order = recorded(1, 2)
    for block in (1, 2):
        order.record(block)
        order.advance()
    assert not order.end_cycle(same_order=True)
    order.record(2)
    assert order.end_cycle(same_order=True)
    assert (order.accesses, order.clock) == ((2,), 0)
    assert order.end_cycle(same_order=False)
    assert order.accesses == ()
