from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.checkpoint.manifest import PIECE_BYTES
from zero_infinity.checkpoint.shard_writer import cut


@given(st.integers(0, 5 * PIECE_BYTES), st.integers(0, 5 * PIECE_BYTES), st.integers(1 << 16, 2 * PIECE_BYTES))
def test_pieces_cover_the_range_and_end_where_a_checksum_does(start: int, num_bytes: int, most: int) -> None:
    pieces = list(cut(start, start + num_bytes, most))
    assert sum(stop - begin for begin, stop in pieces) == num_bytes
    position = start
    for begin, stop in pieces:
        assert begin == position
        assert 0 < stop - begin <= most
        assert begin // PIECE_BYTES == (stop - 1) // PIECE_BYTES
        position = stop
