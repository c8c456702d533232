"""The tier executor: what it tells its mover to do, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import pytest

from zero_infinity.errors import CapacityError
from zero_infinity.policy.cache_policy import CachePolicy, NoRoomError
from zero_infinity.tiers.compute_thread import ComputeThread
from zero_infinity.tiers.tier import Tier


@dataclass(frozen=True)
class Item:
    key: int
    name: str
    held_bytes: int = 1


class ScriptedMover:
    """Writes down what it is told. Transfers end at once, unless the test names an entry in `slow`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.leased: set[str] = set()
        self.slow: set[str] = set()
        self.moved_bytes: list[int] = []

    def fetch(self, entry: Item, *, ahead: bool) -> None:
        self.log.append(f"{'prefetch' if ahead else 'fetch'} {entry.name}")

    def evict(self, entry: Item) -> None:
        self.log.append(f"evict {entry.name}")

    def is_leased(self, entry: Item) -> bool:
        return entry.name in self.leased

    def is_ready(self, entry: Item) -> bool:
        return entry.name not in self.slow

    def wait(self, entry: Item) -> None:
        self.log.append(f"wait {entry.name}")

    def no_room(self, entry: Item, error: NoRoomError, in_use: list[Item]) -> CapacityError:
        return CapacityError(f"{entry.name} beside {[item.name for item in in_use]}: {error.needed} of {error.budget}")

    def moved(self, cached_bytes: int) -> None:
        self.moved_bytes.append(cached_bytes)

    def said(self) -> list[str]:
        """What it was told since the last time."""
        log, self.log = self.log, []
        return log


class Waits:
    """A computing thread that only remembers what it stood still for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield


class Bench:
    """A tier of items "a", "b", ... of one byte each."""

    def __init__(self, num_items: int, budget: int, lookahead: int = 0, *, collective: bool = False) -> None:
        self.mover = ScriptedMover()
        self.waits = Waits()
        self.tier: Tier[Item] = Tier(
            self.mover, cast(ComputeThread, self.waits), CachePolicy, budget, lookahead, collective=collective
        )
        self.items = {name: Item(number, name) for number, name in enumerate("abcdefgh"[:num_items])}
        for item in self.items.values():
            self.tier.add(item)

    def __getitem__(self, name: str) -> Item:
        return self.items[name]

    def access(self, names: str) -> list[str]:
        for name in names:
            self.tier.access(self[name])
        return self.mover.said()

    def step(self, names: str) -> list[str]:
        """A whole step, which records the order of accesses."""
        said = self.access(names)
        self.tier.end_cycle(same_order=True)
        return said + self.mover.said()

    def held(self) -> str:
        return "".join(name for name, item in self.items.items() if item.key in self.tier.policy)


def test_room_is_made_before_anything_comes_in() -> None:
    b = Bench(3, budget=2)
    assert b.access("abc") == ["fetch a", "fetch b", "evict a", "fetch c"]
    assert b.access("c") == []
    assert b.mover.moved_bytes == [1, 2, 2], "told after each fetch, with what is held then"


def test_what_comes_next_is_fetched_ahead_in_the_order_of_its_use() -> None:
    b = Bench(4, budget=3, lookahead=2)
    b.step("badc")
    b.tier.drop_unpinned()
    b.mover.said()
    assert b.access("b") == ["fetch b", "prefetch a", "prefetch d"]
    assert b.access("a") == ["evict b", "prefetch c"]


def test_an_entry_that_is_used_now_is_waited_for_only_if_it_is_not_ready() -> None:
    b = Bench(2, budget=2)
    b.mover.slow.add("b")
    b.tier.bring(b["a"])
    b.tier.bring(b["b"])
    assert b.mover.said() == ["fetch a", "fetch b", "wait b"]
    assert b.waits.names == ["b"]


def test_a_pinned_entry_does_not_leave_until_it_is_unpinned_as_often() -> None:
    b = Bench(3, budget=2)
    b.access("ab")
    b.tier.pin(b["a"])
    with b.tier.pinned(b["a"]):
        assert b.access("c") == ["evict b", "fetch c"]
    assert b.tier.is_pinned(b["a"])
    assert b.access("b") == ["evict c", "fetch b"]
    b.tier.unpin(b["a"])
    assert not b.tier.is_pinned(b["a"])
    assert b.access("c") == ["evict a", "fetch c"]


def test_an_exception_inside_of_a_pin_ends_it() -> None:
    b = Bench(1, budget=1)
    with pytest.raises(ValueError, match="inside"), b.tier.pinned(b["a"]):
        raise ValueError("inside")
    assert not b.tier.is_pinned(b["a"])


def test_a_leased_entry_stays_since_its_leaving_would_free_nothing() -> None:
    b = Bench(3, budget=2)
    b.access("ab")
    b.mover.leased.add("a")
    assert b.access("c") == ["evict b", "fetch c"]


def test_the_error_names_what_is_in_use() -> None:
    b = Bench(3, budget=2)
    b.access("ab")
    b.tier.pin(b["b"])
    b.mover.leased.add("a")
    with pytest.raises(CapacityError, match=r"c beside \['a', 'b'\]: 1 of 2"):
        b.access("c")
    assert b.mover.said() == []


def test_an_entry_that_was_not_added_is_resident() -> None:
    b = Bench(2, budget=1)
    resident = Item(99, "resident", held_bytes=1000)
    b.tier.bring(resident)
    assert b.access("ab") == ["fetch resident", "fetch a", "evict a", "fetch b"]
    b.tier.forget(resident)
    b.tier.remove(resident)
    assert b.tier.policy.cached_bytes == 1


def test_lending_makes_what_is_over_it_leave_and_taking_back_lets_more_in() -> None:
    b = Bench(3, budget=3)
    b.access("abc")
    assert b.tier.lend(2)
    assert sorted(b.mover.said()) == ["evict a", "evict b"]
    assert b.access("a") == ["evict c", "fetch a"]
    b.tier.take_back(2)
    assert b.access("bc") == ["fetch b", "fetch c"]


@pytest.mark.parametrize("num_bytes", [2, 4])
def test_lending_too_much_changes_nothing(num_bytes: int) -> None:
    b = Bench(3, budget=3)
    b.access("abc")
    b.tier.pin(b["a"])
    b.tier.pin(b["b"])
    assert not b.tier.lend(num_bytes)
    assert b.mover.said() == []
    assert (b.tier.policy.budget, b.tier.policy.cached_bytes) == (3, 3)
    assert b.tier.lend(1)


def test_a_new_limit_counts_what_is_lent() -> None:
    b = Bench(4, budget=4)
    b.access("abcd")
    assert b.tier.lend(1)
    assert b.mover.said() == ["evict a"]
    b.tier.limit(3, 1)
    assert b.mover.said() == ["evict b"]
    assert (b.tier.policy.budget, b.tier.policy.lookahead) == (2, 1)
    b.tier.take_back(1)
    assert b.tier.policy.budget == 3


def test_what_leaves_without_a_decision_is_fetched_again() -> None:
    b = Bench(3, budget=3)
    b.access("abc")
    b.tier.forget(b["a"])
    assert b.mover.said() == [], "whoever forgets it moves it himself"
    b.tier.drop(b["b"])
    assert b.mover.said() == ["evict b"]
    assert b.access("cab") == ["fetch a", "fetch b"]
    b.tier.remove(b["a"])
    assert b.held() == "bc"


def test_everything_leaves_but_what_is_pinned() -> None:
    b = Bench(4, budget=3)
    b.access("abc")
    b.tier.pin(b["b"])
    b.tier.drop_unpinned()
    assert b.mover.said() == ["evict a", "evict c"]
    assert b.held() == "b"


def test_a_stale_entry_leaves_at_once_where_ranks_decide_for_themselves() -> None:
    b = Bench(2, budget=2)
    b.access("ab")
    b.tier.invalidate(b["a"])
    assert b.mover.said() == ["evict a"]


# ---------------------------------------------------------------------- collective


def test_repeated_use_counts_once_where_fetches_are_collective() -> None:
    """The number of uses may differ between ranks: the order that is recorded may not."""
    once, often = (Bench(2, budget=1, collective=True) for _ in range(2))
    assert once.access("ab") == often.access("aaabb")
    for b in (once, often):
        b.tier.end_cycle(same_order=True)
    assert once.tier.policy.order == often.tier.policy.order == (0, 1)
    alone = Bench(2, budget=1)
    alone.step("aaabb")
    assert alone.tier.policy.order == (0, 0, 0, 1, 1)


def test_a_repeated_use_of_what_has_left_counts() -> None:
    b = Bench(2, budget=2, collective=True)
    b.access("a")
    assert b.tier.is_last(b["a"])
    b.tier.drop(b["a"])
    assert not b.tier.is_last(b["a"])
    assert b.access("a") == ["evict a", "fetch a"]
    b.tier.drop_unpinned()
    assert b.access("a") == ["evict a", "fetch a"]


def test_stale_copies_leave_at_the_end_of_the_step_in_the_same_order_on_every_rank() -> None:
    b = Bench(3, budget=3, collective=True)
    b.access("abc")
    for name in "cb":
        b.tier.invalidate(b[name])
    assert b.access("bc") == [], "they are used until then"
    b.tier.end_cycle(same_order=True)
    assert b.mover.said() == ["evict b", "evict c"]
    b.tier.end_cycle(same_order=True)
    assert b.mover.said() == []


def test_what_the_next_step_needs_first_is_fetched_at_the_end_of_this_one() -> None:
    b = Bench(3, budget=3, lookahead=2, collective=True)
    b.access("abc")
    for name in "abc":
        b.tier.invalidate(b[name])
    b.tier.end_cycle(same_order=False)
    assert b.mover.said() == ["evict a", "evict b", "evict c", "prefetch a", "prefetch b"]
    assert b.access("a") == ["prefetch c"]


def test_nothing_is_fetched_ahead_into_the_next_step_where_fetches_are_collective() -> None:
    """An update of what is fetched may be under way on one rank and not on another."""
    b, alone = (Bench(3, budget=2, lookahead=1, collective=collective) for collective in (True, False))
    for bench in (b, alone):
        bench.step("abc")
        bench.access("ab")
    assert b.access("c") == []
    assert alone.access("c") == ["evict b", "prefetch a"]


def test_leases_do_not_count_where_all_ranks_have_to_decide_alike() -> None:
    """When a tensor dies is each rank's own affair."""
    b = Bench(3, budget=2, collective=True)
    b.access("ab")
    b.mover.leased.add("a")
    assert b.access("c") == ["evict a", "fetch c"]
    b.tier.pin(b["b"])
    assert b.access("a") == ["evict c", "fetch a"]
