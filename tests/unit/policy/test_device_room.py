"""The budget of a device's cache, from what is free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.policy.device_room import (
    first_budget,
    is_learnt_after,
    is_worth_changing,
    learnt_budget,
    planned_budget,
)

SIZES = st.integers(0, 1 << 40)


@given(SIZES, SIZES)
def test_the_first_budget_is_careful_and_holds_a_layer(free: int, least: int) -> None:
    planned = planned_budget(free)
    first = first_budget(planned, least)
    assert first <= planned <= free
    assert first >= min(planned, least)
    if 8 * least <= free:
        assert first <= free // 4 + 1


@given(SIZES, SIZES, SIZES)
def test_a_learnt_budget_leaves_the_others_their_peak(capacity: int, others: int, least: int) -> None:
    learnt = learnt_budget(capacity, others, least)
    assert learnt >= least
    if learnt > least:
        assert learnt + others <= capacity


@given(SIZES, SIZES, SIZES, SIZES)
def test_more_for_others_is_never_more_for_the_cache(capacity: int, others: int, more: int, least: int) -> None:
    assert learnt_budget(capacity, others + more, least) <= learnt_budget(capacity, others, least)


def test_what_is_learnt_of_24_gib_with_6_for_activations() -> None:
    gib = 1 << 30
    assert learnt_budget(24 * gib, 6 * gib, gib) == 24 * gib - 6 * gib - 6 * gib // 8 - 24 * gib // 32


def test_when_it_is_learnt() -> None:
    assert [n for n in range(1, 40) if is_learnt_after(n)] == [1, 2, 3, 4, 8, 16, 32]


def test_small_changes_are_not_made() -> None:
    assert not is_worth_changing(1000, 1020)
    assert is_worth_changing(1000, 960)
