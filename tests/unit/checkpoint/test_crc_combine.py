from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.checkpoint.crc_combine import combine, combine_all


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_of_two(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.lists(st.binary(max_size=100), max_size=6))
def test_of_many(parts: list[bytes]) -> None:
    assert combine_all((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


def test_of_large_ones() -> None:
    first, second = bytes(range(256)) * 5000, b"abc" * 1_000_003
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
