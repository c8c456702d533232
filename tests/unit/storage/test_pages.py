"""Mapping, unmapping and moving pages, checked against what /proc/self says about this process."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from support.forkserver import in_own_process
from support.mappings import mapped_of, smaps_at

from zero_infinity.errors import CapacityError
from zero_infinity.policy.alignment import HUGE_PAGE_BYTES
from zero_infinity.storage.pages import (
    PAGE_BYTES,
    address_of,
    map_pages,
    move_bytes,
    move_huge_page,
    reserve_addresses,
    unmap_pages,
    view_memory,
)

MIB = 1 << 20
THP_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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


@in_own_process
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


def test_a_huge_page_moves_to_reserved_addresses_with_its_bytes() -> None:
    source = map_pages(HUGE_PAGE_BYTES)
    ctypes.memset(source, 9, HUGE_PAGE_BYTES)
    target = reserve_addresses(2 * HUGE_PAGE_BYTES)
    assert target % HUGE_PAGE_BYTES == 0
    assert move_huge_page(source, target)
    assert mapped_of(source, HUGE_PAGE_BYTES) == 0
    assert view_memory(target, HUGE_PAGE_BYTES)[-1] == 9
    unmap_pages(target, 2 * HUGE_PAGE_BYTES)


def test_bytes_are_moved_also_where_ranges_overlap_and_from_read_only_memory() -> None:
    data = bytearray(b"abcdef")
    view = memoryview(data)
    move_bytes(view[2:6], view[0:4])
    assert data == b"ababcd"
    move_bytes(view[0:3], memoryview(b"xyz"))
    assert data == b"xyzbcd"
    assert address_of(view[2:]) == address_of(view) + 2
