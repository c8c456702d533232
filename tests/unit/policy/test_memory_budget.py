"""How one byte budget is divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.unit_sizes import adam

import zero_infinity as zi
from zero_infinity.policy.homes import Home
from zero_infinity.policy.memory_budget import MemoryDivision, SharedBuffers, place, room_while_building, shared_buffers
from zero_infinity.policy.unit_sizes import UnitSize

MIB = 2**20


def least(units: list[UnitSize], together: list[tuple[str, int]], *, nvme: bool) -> int:
    """The smallest budget that is accepted."""
    refused, enough = 0, 1
    while not accepted(units, enough, together, nvme=nvme):
        refused, enough = enough, 2 * enough
    while enough - refused > 1:
        middle = (refused + enough) // 2
        if accepted(units, middle, together, nvme=nvme):
            enough = middle
        else:
            refused = middle
    return enough


def accepted(units: list[UnitSize], budget: int, together: list[tuple[str, int]], *, nvme: bool) -> bool:
    try:
        place(units, budget, together, nvme=nvme)
    except zi.CapacityError:
        return False
    return True


sizes = st.builds(
    UnitSize,
    name=st.text("abc", min_size=1),
    parameters=st.integers(1, 64 * MIB),
    record=st.integers(0, 128 * MIB),
    gradients=st.integers(0, 64 * MIB),
    arriving=st.integers(0, 64 * MIB),
)


@given(units=st.lists(sizes, min_size=1, max_size=12), extra=st.integers(0, 2048 * MIB), nvme=st.booleans())
def test_the_parts_are_never_more_than_the_whole(units: list[UnitSize], extra: int, nvme: bool) -> None:
    budget = least(units, [], nvme=nvme) + extra
    found = place(units, budget, [], nvme=nvme)
    assert found.needed <= budget
    assert 0 <= found.lookahead <= found.cache
    assert found.resident >= 0
    assert found.set_aside >= max(unit.arriving for unit in units)
    assert found.chunk_bytes > 0
    assert found.swap == 0 if not nvme else found.swap >= 0


@given(units=st.lists(sizes, min_size=1, max_size=8), nvme=st.booleans(), extra=st.integers(0, 512 * MIB))
def test_more_memory_is_never_refused(units: list[UnitSize], nvme: bool, extra: int) -> None:
    minimum = least(units, [], nvme=nvme)
    assert accepted(units, minimum + extra, [], nvme=nvme)


def test_everything_is_resident_without_nvme() -> None:
    units = [adam(name, 4 * MIB) for name in "abc"]
    found = place(units, 256 * MIB, [], nvme=False)
    assert found.homes == (Home.RAM,) * 3
    assert found.swap == 0


def test_what_does_not_fit_in_ram_says_by_how_much_and_what_to_do() -> None:
    with pytest.raises(zi.CapacityError, match=r"(?s)memory is 8.0 MiB and there is no nvme.*fix:   nvme=.*memory="):
        place([adam("a", 4 * MIB)], 8 * MIB, [], nvme=False)


def test_what_can_never_be_used_is_named() -> None:
    with pytest.raises(zi.CapacityError, match=r"(?s)'large' needs 64.0 MiB.*memory is 32.0 MiB.*fix:   memory="):
        place([adam("small", MIB), adam("large", 64 * MIB)], 32 * MIB, [], nvme=True)


def test_what_is_needed_together_counts_together() -> None:
    units = [adam(name, 8 * MIB) for name in "abcd"]
    assert accepted(units, 64 * MIB, [], nvme=True)
    with pytest.raises(zi.CapacityError, match="'attention' needs"):
        place(units, 64 * MIB, [("attention", 60 * MIB)], nvme=True)


def test_when_everything_fits_the_cache_holds_everything() -> None:
    units = [adam(name, 4 * MIB) for name in "abcd"]
    found = place(units, 1024 * MIB, [], nvme=True)
    assert found.cache >= sum(unit.parameters + unit.record + unit.gradients for unit in units)
    assert isinstance(found, MemoryDivision)


def test_small_gradients_have_room_beside_the_largest() -> None:
    """Else each of them waits for the update of the unit before it."""
    units = [adam(f"large {number}", 16 * MIB) for number in range(8)] + [adam(f"norm {n}", 8 << 10) for n in range(16)]
    found = place(units, 128 * MIB, [], nvme=True)
    assert found.homes == (Home.NVME,) * 8 + (Home.RAM,) * 16
    assert found.set_aside == 16 * MIB + 16 * (8 << 10)


def copied(*sizes: int) -> list[UnitSize]:
    return [UnitSize(str(size), MIB, 0, 0, 0, copied=size) for size in sizes]


def test_one_rank_that_copies_nothing_needs_no_buffers() -> None:
    assert shared_buffers(copied(0, 0), 0, 1024 * MIB, gathered=False, num_ranks=1) == SharedBuffers(0, 0)


def test_copies_have_a_share_of_the_memory_or_what_they_need() -> None:
    def room(memory: int, *, gathered: bool, at_once: int = 8 * MIB) -> int:
        units = copied(*[8 * MIB] * 16)
        return shared_buffers(units, at_once, memory, gathered=gathered, num_ranks=1).copies

    assert room(512 * MIB, gathered=False) == 64 * MIB
    assert room(512 * MIB, gathered=True) == 128 * MIB
    assert room(4096 * MIB, gathered=True) == 128 * MIB  # all of them
    assert room(MIB, gathered=True) == 16 * MIB  # the one in use and the next
    assert room(MIB, gathered=True, at_once=24 * MIB) == 32 * MIB


@pytest.mark.parametrize(
    ("memory", "bucket"), [(MIB, 64 << 10), (64 * MIB, MIB), (100 * MIB + 1, 1600 << 10), (1 << 40, 4 * MIB)]
)
def test_buckets_are_there_twice_and_do_not_grow_with_the_model(memory: int, bucket: int) -> None:
    found = shared_buffers([adam("layer", 64 * MIB)], 0, memory, gathered=True, num_ranks=2)
    assert found == SharedBuffers(0, bucket)
    assert found.total == 2 * bucket


def test_units_gathered_while_a_model_is_built_have_a_quarter_of_the_memory() -> None:
    assert room_while_building(512 * MIB) == 128 * MIB
