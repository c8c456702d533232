"""The range index against looking at every range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.storage.range_index import RangeIndex

ranges = st.tuples(st.integers(0, 200), st.integers(1, 80)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(st.tuples(ranges, st.booleans()), max_size=40), st.lists(ranges, min_size=1, max_size=10))
def test_it_finds_what_a_look_at_all_of_them_finds(
    entries: list[tuple[tuple[int, int], bool]], queries: list[tuple[int, int]]
) -> None:
    index: RangeIndex[int] = RangeIndex()
    for key, ((start, stop), _) in enumerate(entries):
        index.add(start, stop, key, key)
    for key, ((start, stop), removed) in enumerate(entries):
        if removed:
            index.remove(start, stop, key)
    for start, stop in queries:
        expected = [key for key, ((a, b), gone) in enumerate(entries) if not gone and a < stop and start < b]
        assert sorted(index.overlapping(start, stop)) == expected


def test_removing_what_is_not_there_is_an_error() -> None:
    index: RangeIndex[str] = RangeIndex()
    index.add(0, 8, 1, "a")
    with pytest.raises(KeyError):
        index.remove(0, 8, 2)
