"""Whichever library computes checksums, they are zlib's."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.storage.checksum import crc32


@given(st.binary(max_size=70_000), st.integers(0, 2**32 - 1))
def test_checksums_are_those_of_zlib(data: bytes, before: int) -> None:
    assert crc32(data, before) == zlib.crc32(data, before)
    assert crc32(memoryview(data)[3:]) == zlib.crc32(data[3:])
