"""The free list over mapped memory, checked against what /proc/self says about this process."""

from __future__ import annotations

import ctypes

import pytest
from support.mappings import mapped_of

from zero_infinity.errors import CapacityError
from zero_infinity.policy.alignment import HUGE_PAGE_BYTES
from zero_infinity.storage import arena as arenas
from zero_infinity.storage.arena import Arena
from zero_infinity.storage.pages import PAGE_BYTES, map_pages, view_memory
from zero_infinity.storage.pinning import Pinning

MIB = 1 << 20
NO_LIMIT = 1 << 40


@pytest.fixture
def system_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the mapping calls so far."""
    calls: list[str] = []

    def count(name: str) -> None:
        real = getattr(arenas, name)

        def counted(*args: int) -> object:
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(arenas, name, counted)

    count("map_pages")
    count("unmap_pages")
    return calls


def test_freed_ranges_are_used_again_best_fit_first(system_calls: list[str]) -> None:
    arena = Arena()
    a, b, c, d = (arena.take(n, limit=NO_LIMIT) for n in (8 * MIB, 2 * MIB, 4 * MIB, 2 * MIB))
    if c in (a + 8 * MIB, a - 4 * MIB):
        pytest.skip("the kernel placed the two freed mappings side by side, where they are one range")
    arena.give(a, 8 * MIB)
    arena.give(c, 4 * MIB)
    system_calls.clear()
    assert arena.take(3 * MIB, limit=NO_LIMIT) == c
    assert arena.take(5 * MIB, limit=NO_LIMIT) == a
    assert system_calls == []
    assert len({a, b, c, d}) == 4


def test_neighbours_coalesce_also_across_mappings(system_calls: list[str]) -> None:
    arena = Arena()
    addresses = sorted(arena.take(2 * MIB, limit=NO_LIMIT) for _ in range(8))
    if addresses != list(range(addresses[0], addresses[0] + 16 * MIB, 2 * MIB)):
        pytest.skip("the kernel did not place the mappings side by side")
    for index in (0, 2, 4, 6, 1, 3, 5, 7):
        arena.give(addresses[index], 2 * MIB)
    system_calls.clear()
    assert arena.take(16 * MIB, limit=NO_LIMIT) == addresses[0]
    assert system_calls == []


def test_small_takes_share_one_mapping(system_calls: list[str]) -> None:
    arena = Arena()
    addresses = [arena.take(PAGE_BYTES, limit=NO_LIMIT) for _ in range(512)]
    assert system_calls == ["map_pages"]
    assert len(set(addresses)) == 512
    assert arena.mapped_bytes == HUGE_PAGE_BYTES


def test_fragments_are_exchanged_for_one_range_within_the_limit() -> None:
    arena = Arena()
    limit = 64 * PAGE_BYTES
    addresses = sorted(arena.take(PAGE_BYTES, limit=limit) for _ in range(64))
    for address in addresses[::2]:
        arena.give(address, PAGE_BYTES)
    assert arena.mapped_bytes == limit
    whole = arena.take(32 * PAGE_BYTES, limit=limit)
    assert arena.mapped_bytes == limit
    assert mapped_of(whole, 32 * PAGE_BYTES) == 32 * PAGE_BYTES
    assert all(mapped_of(address, PAGE_BYTES) == PAGE_BYTES for address in addresses[1::2])


def scattered_huge_pages(arena: Arena) -> tuple[list[int], list[int]]:
    """Eight huge pages in use and eight free ones in turn, each filled with its number."""
    base = arena.take(32 * MIB, limit=32 * MIB)
    pages = list(range(base, base + 32 * MIB, HUGE_PAGE_BYTES))
    for number, page in enumerate(pages):
        ctypes.memset(page, number, HUGE_PAGE_BYTES)
    for page in pages[1::2]:
        arena.give(page, HUGE_PAGE_BYTES)
    return pages[::2], pages[1::2]


def test_free_huge_pages_are_moved_side_by_side_with_their_bytes(system_calls: list[str]) -> None:
    arena = Arena()
    used, free = scattered_huge_pages(arena)
    mapped = arena.mapped_bytes
    system_calls.clear()
    whole = arena.take(12 * MIB + PAGE_BYTES, limit=32 * MIB)
    assert (system_calls, arena.mapped_bytes) == ([], mapped)
    assert sorted(view_memory(whole, 14 * MIB)[::HUGE_PAGE_BYTES]) == [1, 3, 5, 7, 9, 11, 13]  # moved, not fresh
    assert [view_memory(page, HUGE_PAGE_BYTES)[-1] for page in used] == list(range(0, 16, 2))
    assert sum(mapped_of(page, HUGE_PAGE_BYTES) for page in free) == HUGE_PAGE_BYTES
    arena.give(whole, 12 * MIB + PAGE_BYTES)
    for page in used:
        arena.give(page, HUGE_PAGE_BYTES)
    arena.clear()
    assert not any(mapped_of(page, HUGE_PAGE_BYTES) for page in (*used, *free, whole))


@pytest.mark.parametrize("num_moved", [0, 3])
def test_a_kernel_that_moves_no_more_pages_costs_page_faults_only(
    num_moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena()
    used, free = scattered_huge_pages(arena)
    real, moved = arenas.move_huge_page, []

    def move(source: int, destination: int) -> bool:
        moved.append(source)
        return len(moved) <= num_moved and real(source, destination)

    monkeypatch.setattr(arenas, "move_huge_page", move)
    whole = arena.take(16 * MIB, limit=32 * MIB)
    assert len(moved) == num_moved + 1
    assert arena.mapped_bytes == 32 * MIB
    assert mapped_of(whole, 16 * MIB) == 16 * MIB
    assert [view_memory(page, HUGE_PAGE_BYTES)[-1] for page in used] == list(range(0, 16, 2))
    assert not any(mapped_of(page, HUGE_PAGE_BYTES) for page in free if not whole <= page < whole + 16 * MIB)


def test_shrink_cuts_on_huge_page_borders(system_calls: list[str]) -> None:
    arena = Arena()
    arena.give(arena.take(16 * MIB, limit=NO_LIMIT), 16 * MIB)
    arena.shrink(16 * MIB - 1)
    assert arena.mapped_bytes == 14 * MIB
    arena.shrink(5 * MIB)
    assert arena.mapped_bytes == 4 * MIB
    system_calls.clear()
    assert arena.take(4 * MIB, limit=4 * MIB) % HUGE_PAGE_BYTES == 0
    assert system_calls == []


class FakePinning:
    """Checks that every registration is of mapped memory and overlaps no other, and records the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.registered: dict[int, int] = {}
        self.pinning = Pinning(self.register, self.unregister, lambda: self.calls.append("synchronize"))

    def register(self, address: int, num_bytes: int) -> None:
        assert mapped_of(address, num_bytes) == num_bytes
        assert all(address + num_bytes <= a or a + n <= address for a, n in self.registered.items())
        self.registered[address] = num_bytes
        self.calls.append(f"register {num_bytes // MIB}")

    def unregister(self, address: int) -> None:
        num_bytes = self.registered.pop(address)
        assert mapped_of(address, num_bytes) == num_bytes  # before any part of it is unmapped
        self.calls.append(f"unregister {num_bytes // MIB}")


def test_pinned_regions_are_unregistered_before_a_part_is_unmapped_and_the_rest_is_registered_again() -> None:
    fake = FakePinning()
    arena = Arena(fake.pinning)
    base = arena.take(12 * MIB, limit=12 * MIB)
    arena.give(base + 4 * MIB, 4 * MIB)
    arena.shrink(10 * MIB)
    assert fake.calls == ["register 12", "synchronize", "unregister 12", "register 6", "register 4"]
    arena.give(base + 8 * MIB, 4 * MIB)
    arena.give(base, 4 * MIB)
    fake.calls.clear()
    arena.clear()
    assert sorted(fake.calls) == ["synchronize", "unregister 4", "unregister 6"]
    assert fake.calls[0] == "synchronize"
    assert (fake.registered, mapped_of(base, 12 * MIB)) == ({}, 0)


def test_pinned_ranges_do_not_cross_registrations() -> None:
    fake = FakePinning()
    arena = Arena(fake.pinning)
    addresses = [arena.take(2 * MIB, limit=4 * MIB) for _ in range(2)]
    for address in addresses:
        arena.give(address, 2 * MIB)
    whole = arena.take(4 * MIB, limit=4 * MIB)
    assert fake.registered == {whole: 4 * MIB}


def test_memory_that_cannot_be_pinned_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[int] = []

    def spy(num_bytes: int) -> int:
        mapped.append(map_pages(num_bytes))
        return mapped[-1]

    def refuse(address: int, num_bytes: int) -> None:
        raise CapacityError("no")

    monkeypatch.setattr(arenas, "map_pages", spy)
    arena = Arena(Pinning(refuse, lambda _: None, lambda: None))
    with pytest.raises(CapacityError, match="no"):
        arena.take(2 * MIB, limit=NO_LIMIT)
    assert (arena.mapped_bytes, mapped_of(mapped[0], 2 * MIB)) == (0, 0)
