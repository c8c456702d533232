"""Extents: ranges never overlap, free neighbours join, and the space grows only when it must."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zero_infinity.policy.alignment import ALIGNMENT, round_up
from zero_infinity.storage.free_extents import FreeExtents


class Space:
    """An address space that counts how it grows."""

    def __init__(self) -> None:
        self.size = 0
        self.num_grown = 0

    def grow(self, num_bytes: int) -> int:
        start = self.size
        self.size += num_bytes
        self.num_grown += 1
        return start


def free_bytes(extents: FreeExtents) -> int:
    return sum(extents._sizes.values())


@pytest.mark.parametrize(("num_bytes", "rounded"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_sizes_are_rounded_up(num_bytes: int, rounded: int) -> None:
    assert round_up(num_bytes) == rounded


def test_the_space_grows_by_what_is_asked_for() -> None:
    space = Space()
    extents = FreeExtents(space.grow)
    assert [extents.allocate(n) for n in (1, ALIGNMENT, ALIGNMENT + 1)] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert space.size == 4 * ALIGNMENT
    assert free_bytes(extents) == 0


def test_what_is_freed_is_used_before_the_space_grows() -> None:
    space = Space()
    extents = FreeExtents(space.grow)
    first = extents.allocate(5000)
    extents.allocate(1)
    extents.free(first, 5000)
    assert extents.allocate(8192) == first
    assert space.num_grown == 2


def test_the_smallest_range_that_fits_is_taken() -> None:
    space = Space()
    extents = FreeExtents(space.grow)
    large, wall, small, _ = (extents.allocate(n * ALIGNMENT) for n in (3, 1, 2, 1))
    extents.free(large, 3 * ALIGNMENT)
    extents.free(small, 2 * ALIGNMENT)
    assert extents.allocate(2 * ALIGNMENT) == small
    assert extents.allocate(2 * ALIGNMENT) == large
    assert extents.allocate(ALIGNMENT) == large + 2 * ALIGNMENT
    assert wall == 3 * ALIGNMENT
    assert space.num_grown == 4


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (2, 0, 1), (1, 2, 0)])
def test_free_neighbours_become_one_range(order: tuple[int, ...]) -> None:
    space = Space()
    extents = FreeExtents(space.grow)
    starts = [extents.allocate(ALIGNMENT) for _ in range(3)]
    for index in order:
        extents.free(starts[index], ALIGNMENT)
    assert extents.allocate(3 * ALIGNMENT) == 0
    assert space.num_grown == 3


def test_what_is_added_beforehand_is_used_first() -> None:
    space = Space()
    extents = FreeExtents(space.grow)
    extents.add(space.grow(4 * ALIGNMENT), 4 * ALIGNMENT)
    assert sorted(extents.allocate(2 * ALIGNMENT) for _ in range(2)) == [0, 2 * ALIGNMENT]
    assert space.num_grown == 1


def test_a_space_that_cannot_grow_changes_nothing() -> None:
    def full(num_bytes: int) -> int:
        raise OSError("full")

    extents = FreeExtents(full)
    extents.add(0, ALIGNMENT)
    with pytest.raises(OSError, match="full"):
        extents.allocate(2 * ALIGNMENT)
    assert free_bytes(extents) == ALIGNMENT
    assert extents.allocate(ALIGNMENT) == 0


class ExtentsMachine(RuleBasedStateMachine):
    """Against a map of pages: who has which."""

    def __init__(self) -> None:
        super().__init__()
        self.space = Space()
        self.extents = FreeExtents(self.space.grow)
        self.taken: dict[int, int] = {}  # start -> bytes asked for

    def free_runs(self) -> list[int]:
        """Lengths in pages of the maximal free runs, by brute force."""
        pages = [False] * (self.space.size // ALIGNMENT)
        for start, num_bytes in self.taken.items():
            for page in range(start // ALIGNMENT, (start + round_up(num_bytes)) // ALIGNMENT):
                assert not pages[page], "two ranges overlap"
                pages[page] = True
        runs = "".join("x" if page else "." for page in pages).split("x")
        return [len(run) for run in runs if run]

    @rule(num_bytes=st.integers(1, 6 * ALIGNMENT))
    def allocate(self, num_bytes: int) -> None:
        fits = max(self.free_runs(), default=0) * ALIGNMENT >= num_bytes
        grown = self.space.num_grown
        start = self.extents.allocate(num_bytes)
        assert start % ALIGNMENT == 0
        assert start + num_bytes <= self.space.size
        assert self.space.num_grown == grown + (not fits)
        self.taken[start] = num_bytes

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        self.extents.free(start, self.taken.pop(start))

    @rule(pages=st.integers(1, 4))
    def add(self, pages: int) -> None:
        self.extents.add(self.space.grow(pages * ALIGNMENT), pages * ALIGNMENT)

    @invariant()
    def nothing_overlaps_and_the_sum_is_right(self) -> None:
        self.free_runs()
        taken = sum(round_up(n) for n in self.taken.values())
        assert free_bytes(self.extents) == self.space.size - taken


TestExtentsMachine = ExtentsMachine.TestCase
