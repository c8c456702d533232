"""CRC-32 with the polynomial of zlib, by Intel's library where it is installed.

It (the package isal, with wheels for x86-64 and ARM) gives the same values as zlib, ten times as fast where the CPU has
carry-less multiplication (docs/numbers.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

try:
    from isal.isal_zlib import crc32 as crc32
    from isal.isal_zlib import crc32_combine as crc32_combine
except ImportError:
    from zlib import crc32 as crc32

    def crc32_combine(first: int, second: int, second_bytes: int, /) -> int:
        """The CRC of two strings one after the other. A CRC is linear, so zeros shift `first` as `second` would."""
        zeros = bytes(second_bytes)
        return crc32(zeros, first) ^ crc32(zeros) ^ second


def combine_all(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC of strings one after the other, each given as its CRC and its number of bytes."""
    return reduce(lambda total, part: crc32_combine(total, *part), parts, 0)
