"""How one byte budget is divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zero_infinity as zi
from zero_infinity.policy.memory_budget import (
    Home,
    MemoryDivision,
    SharedBuffers,
    UnitSize,
    copy_lookahead,
    home_while_building,
    place,
    room_while_building,
    shared_buffers,
)

MIB = 2**20


def adam(name: str, parameters: int) -> UnitSize:
    """What a unit takes with AdamW in float32."""
    return UnitSize(name, parameters, 2 * parameters, parameters, parameters)


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


def test_small_units_stay_while_they_are_a_sliver() -> None:
    units = [adam("norm", 4096), adam("matrix", 64 * MIB)]
    roomy = place(units, 512 * MIB, [], nvme=True)
    assert roomy.homes == (Home.RAM, Home.NVME)
    many = [adam(f"norm{number}", 200_000) for number in range(100)]
    assert set(place(many, 16 * MIB, [], nvme=True).homes) == {Home.NVME}


def test_a_home_that_was_decided_before_is_kept() -> None:
    decided = UnitSize("norm", 4096, 8192, 4096, 4096, home=Home.NVME)
    assert place([decided, adam("matrix", 64 * MIB)], 512 * MIB, [], nvme=True).homes == (Home.NVME, Home.NVME)


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


@pytest.mark.parametrize("budget", [40 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB])
def test_beside_what_is_needed_at_once_there_is_room_for_four_chunks(budget: int) -> None:
    """A chunk grows with the cache, and does not make the least budget grow."""
    found = place([adam(f"{number}", 12 * MIB) for number in range(64)], budget, [], nvme=True)
    assert 12 * MIB + 4 * found.chunk_bytes <= found.cache
    assert found.chunk_bytes <= max(256 << 10, found.cache / 12 + MIB)  # to a whole huge page


def test_what_is_fetched_ahead_is_two_large_units_with_their_records_and_the_rest_is_kept() -> None:
    units = [adam(f"layer {number}", 16 * MIB) for number in range(30)]
    found = place(units, 700 * MIB, [], nvme=True)
    assert found.lookahead == 96 * MIB
    assert found.cache > 500 * MIB
    small = [adam(f"layer {number}", MIB) for number in range(300)]
    assert place(small, 700 * MIB, [], nvme=True).lookahead == 64 * MIB


def test_a_small_cache_is_mostly_for_what_comes_next() -> None:
    units = [adam(f"layer {number}", 16 * MIB) for number in range(18)]
    found = place(units, 109 * MIB, [], nvme=True)
    assert found.lookahead == int(0.9 * found.cache)


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


def test_copies_are_made_ahead_as_far_as_a_third_of_their_room_allows() -> None:
    assert copy_lookahead(300 * MIB) == 100 * MIB
    assert copy_lookahead(0) == 0


def test_a_model_that_is_built_keeps_small_units_while_they_are_a_sliver() -> None:
    assert home_while_building(4096, 0, 512 * MIB, nvme=True) is Home.RAM
    assert home_while_building(4096, 8 * MIB, 512 * MIB, nvme=True) is Home.NVME
    assert home_while_building(MIB, 0, 512 * MIB, nvme=True) is Home.NVME
    assert home_while_building(MIB, 0, 512 * MIB, nvme=False) is Home.RAM
    assert room_while_building(512 * MIB) == 128 * MIB
