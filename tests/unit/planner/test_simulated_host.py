from __future__ import annotations

import pytest

from zero_infinity.errors import CapacityError
from zero_infinity.planner.hardware import HardwareTier, TierKind
from zero_infinity.planner.host_division import HostPlan
from zero_infinity.planner.rank_links import VirtualLink
from zero_infinity.planner.simulated_host import SimulatedHost
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.policy.memory_budget import MemoryDivision, SharedBuffers

PAGES = 10 * ALIGNMENT
DRIVE = HardwareTier("NVMe", TierKind.STORAGE, 10**12, PAGES, PAGES, PAGES, 0.0)  # a block a second


def host(cache: int) -> SimulatedHost:
    division = MemoryDivision((), resident=300, set_aside=20, cache=cache, lookahead=0, chunk_bytes=1, swap=0)
    plan = HostPlan(10**9, SharedBuffers(copies=1000, bucket=2), division)
    found = SimulatedHost(plan, 1.0, 1, {DRIVE: VirtualLink("NVMe")})
    for key, name in enumerate("abc"):
        found.add(key, name, PAGES - 1, DRIVE)
    return found


def test_a_block_is_read_once_while_it_is_cached() -> None:
    found = host(2 * PAGES)
    assert found.held_bytes == 1324
    assert found.access(0, now=5.0) == 6.0
    assert found.access(0, now=8.0) == 8.0
    assert (found.read_bytes, found.held_bytes) == (PAGES, PAGES + 1324)


def test_only_changed_blocks_are_written_and_before_their_room_is_used() -> None:
    found = host(PAGES)
    found.access(0, 0.0)
    assert found.access(1, 2.0) == 3.0  # nothing to write
    found.change(1, 3.0)
    assert found.access(2, 4.0) == 6.0  # written for a second, read for a second
    assert (found.read_bytes, found.written_bytes) == (3 * PAGES, PAGES)


def test_dead_content_is_neither_written_nor_read() -> None:
    found = host(PAGES)
    found.access(0, 0.0)
    found.change(0, 1.0)
    found.expire(0)
    assert found.access(0, 2.0) == 2.0
    assert (found.read_bytes, found.written_bytes) == (PAGES, 0)


def test_blocks_that_are_not_known_are_always_there() -> None:
    found = host(PAGES)
    assert found.access(99, 2.0) == 2.0
    found.change(99, 7.0)
    assert found.access(99, 3.0) == 7.0


def test_no_room_names_the_block() -> None:
    found = host(PAGES)
    found.in_use.add(0)
    found.access(0, 0.0)
    with pytest.raises(CapacityError, match=r"(?s)'b' needs 40.0 KiB of host memory.*40.0 KiB.*fix:"):
        found.access(1, 0.0)
