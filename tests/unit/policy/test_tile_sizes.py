from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.policy.tile_sizes import default_tile_bytes, rows_per_tile


@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 10**8))
def test_tiles_are_as_few_as_fit(num_rows: int, row_size: int, max_size: int) -> None:
    rows = rows_per_tile(num_rows, row_size, max_size)
    if rows is None:
        assert num_rows * row_size <= max_size or num_rows == 1
        return
    assert 1 <= rows < num_rows
    assert rows == 1 or rows * row_size <= max_size
    assert -(-num_rows // rows) <= -(-num_rows // max(1, max_size // row_size))


def test_tiles_are_alike() -> None:
    assert rows_per_tile(100, 10, 1000) is None
    assert rows_per_tile(100, 10, 990) == 50  # not 99 and 1
    assert rows_per_tile(100, 10, 5) == 1  # a row is larger than a tile may be
    assert rows_per_tile(0, 10, 5) is None


def test_a_tile_takes_an_eighth_of_the_memory_by_default() -> None:
    assert default_tile_bytes(1 << 20) == 1 << 17
    assert default_tile_bytes(1) == 1
