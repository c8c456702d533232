"""CRC-32 of a whole from the CRCs of its parts, so that ranks can each check-sum what they write.

A CRC is a polynomial over GF(2) modulo the generator P. Appending n bytes multiplies what came before by x^(8n), so
crc(a + b) = crc(a) * x^(8 len(b)) + crc(b), where + is an exclusive or. Polynomials are kept as zlib does: the
coefficient of x^0 is the highest of 32 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

_GENERATOR = 0xEDB88320
_ONE = 1 << 31  # the polynomial 1
_X8 = 1 << 23  # x^8: one byte more


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC of a string and another after it, from the CRCs of both."""
    return _multiply(first, _power(second_bytes)) ^ second


def combine_all(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC of strings one after the other: (crc, number of bytes) each."""
    total = 0
    for crc, num_bytes in parts:
        total = combine(total, crc, num_bytes)
    return total


@functools.lru_cache(1024)  # parts come in few sizes
def _power(num_bytes: int) -> int:
    """x^(8 num_bytes) modulo the generator."""
    result, square = _ONE, _X8
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        num_bytes >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo the generator."""
    product = 0
    bit = _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _GENERATOR if b & 1 else b >> 1
    return product
