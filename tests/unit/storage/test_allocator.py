"""Mapping, unmapping and the free list, checked against what /proc/self says about this process."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from zero_infinity.errors import CapacityError
from zero_infinity.policy.sizes import HUGE_PAGE_BYTES
from zero_infinity.storage import allocator
from zero_infinity.storage.allocator import PAGE_BYTES, Arena, Pinning, map_pages, unmap_pages, view_memory

MIB = 1 << 20
NO_LIMIT = 1 << 40
THP_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapped_of(address: int, num_bytes: int) -> int:
    """How many bytes of the range are mapped in this process."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        total += max(0, min(end, address + num_bytes) - max(start, address))
    return total


def smaps_at(address: int) -> dict[str, str]:
    """What the kernel says about the mapping that holds `address`."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(header[1], 16) <= address < int(header[2], 16)
        elif inside:
            key, _, value = line.partition(":")
            found[key] = value
    return found


@pytest.mark.parametrize("num_bytes", [PAGE_BYTES, MIB, 2 * MIB, 3 * MIB + PAGE_BYTES, 16 * MIB])
def test_mapped_memory_is_zero_writable_and_exactly_as_large_as_asked(num_bytes: int) -> None:
    address = map_pages(num_bytes)
    assert address % (HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES) == 0
    assert mapped_of(address, num_bytes) == num_bytes
    view = view_memory(address, num_bytes)
    assert (view[0], view[-1], view.readonly, len(view), view.format) == (0, 0, False, num_bytes, "B")
    view[-1] = 7
    assert view[-1] == 7
    unmap_pages(address, num_bytes)
    assert mapped_of(address, num_bytes) == 0


def test_any_range_of_pages_can_be_unmapped() -> None:
    address = map_pages(4 * MIB)
    ctypes.memset(address, 5, 4 * MIB)
    unmap_pages(address + MIB, PAGE_BYTES)
    assert mapped_of(address, 4 * MIB) == 4 * MIB - PAGE_BYTES
    view = view_memory(address, 4 * MIB)
    assert view[MIB - 1] == view[MIB + PAGE_BYTES] == 5  # the neighbours keep their bytes
    unmap_pages(address, 4 * MIB)


def test_mapping_leaves_no_slack_behind() -> None:
    def virtual_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES

    before = virtual_bytes()
    addresses = [map_pages(3 * MIB) for _ in range(20)]
    assert virtual_bytes() - before == 60 * MIB
    for address in addresses:
        unmap_pages(address, 3 * MIB)
    assert virtual_bytes() == before


def test_refusal_names_the_numbers() -> None:
    with pytest.raises(CapacityError, match=r"refused to map 1,152,921,504,606,846,976 bytes.*free\)\n  fix:"):
        map_pages(1 << 60)


def test_large_mappings_get_huge_pages() -> None:
    if not THP_SETTING.exists() or "[never]" in THP_SETTING.read_text():
        pytest.skip("transparent huge pages are off on this machine")
    address = map_pages(64 * MIB)
    ctypes.memset(address, 1, 64 * MIB)
    facts = smaps_at(address)
    unmap_pages(address, 64 * MIB)
    assert "hg" in facts["VmFlags"].split()  # advised, also when there was none to give
    huge = int(facts["AnonHugePages"].split()[0]) * 1024
    if huge == 0:
        pytest.skip("the kernel had no free huge page")
    assert huge >= 32 * MIB  # some may be missing when memory is fragmented


def test_freed_ranges_are_used_again_best_fit_first() -> None:
    arena = Arena()
    a, b, c, d = (arena.take(n, limit=NO_LIMIT) for n in (8 * MIB, 2 * MIB, 4 * MIB, 2 * MIB))
    arena.give(a, 8 * MIB)
    arena.give(c, 4 * MIB)
    remaps = arena.num_remaps
    assert arena.take(3 * MIB, limit=NO_LIMIT) == c
    assert arena.take(5 * MIB, limit=NO_LIMIT) == a
    assert arena.num_remaps == remaps
    assert len({a, b, c, d}) == 4


def test_neighbours_coalesce_also_across_mappings() -> None:
    arena = Arena()
    addresses = sorted(arena.take(2 * MIB, limit=NO_LIMIT) for _ in range(8))
    if addresses != list(range(addresses[0], addresses[0] + 16 * MIB, 2 * MIB)):
        pytest.skip("the kernel did not place the mappings side by side")
    for index in (0, 2, 4, 6, 1, 3, 5, 7):
        arena.give(addresses[index], 2 * MIB)
    remaps = arena.num_remaps
    assert arena.take(16 * MIB, limit=NO_LIMIT) == addresses[0]
    assert arena.num_remaps == remaps


def test_small_takes_share_one_mapping() -> None:
    arena = Arena()
    addresses = [arena.take(PAGE_BYTES, limit=NO_LIMIT) for _ in range(512)]
    assert arena.num_remaps == 1
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


def test_free_huge_pages_are_moved_side_by_side_with_their_bytes() -> None:
    arena = Arena()
    used, free = scattered_huge_pages(arena)
    remaps, mapped = arena.num_remaps, arena.mapped_bytes
    whole = arena.take(12 * MIB + PAGE_BYTES, limit=32 * MIB)
    assert (arena.num_remaps, arena.mapped_bytes) == (remaps, mapped)
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
    real, moved = allocator._move_huge_page, []

    def move(source: int, destination: int) -> bool:
        moved.append(source)
        return len(moved) <= num_moved and real(source, destination)

    monkeypatch.setattr(allocator, "_move_huge_page", move)
    whole = arena.take(16 * MIB, limit=32 * MIB)
    assert len(moved) == num_moved + 1
    assert arena.mapped_bytes == 32 * MIB
    assert mapped_of(whole, 16 * MIB) == 16 * MIB
    assert [view_memory(page, HUGE_PAGE_BYTES)[-1] for page in used] == list(range(0, 16, 2))
    assert not any(mapped_of(page, HUGE_PAGE_BYTES) for page in free if not whole <= page < whole + 16 * MIB)


def test_shrink_cuts_on_huge_page_borders() -> None:
    arena = Arena()
    arena.give(arena.take(16 * MIB, limit=NO_LIMIT), 16 * MIB)
    arena.shrink(16 * MIB - 1)
    assert arena.mapped_bytes == 14 * MIB
    arena.shrink(5 * MIB)
    assert arena.mapped_bytes == 4 * MIB
    remaps = arena.num_remaps
    assert arena.take(4 * MIB, limit=4 * MIB) % HUGE_PAGE_BYTES == 0
    assert arena.num_remaps == remaps


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

    monkeypatch.setattr(allocator, "map_pages", spy)
    arena = Arena(Pinning(refuse, lambda _: None, lambda: None))
    with pytest.raises(CapacityError, match="no"):
        arena.take(2 * MIB, limit=NO_LIMIT)
    assert (arena.mapped_bytes, mapped_of(mapped[0], 2 * MIB)) == (0, 0)
