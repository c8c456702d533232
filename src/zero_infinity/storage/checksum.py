"""CRC-32 with the polynomial of zlib, ten times as fast where the CPU has carry-less multiplication (docs/numbers.md).

Intel's library (the package isal, with wheels for x86-64 and ARM) gives the same values as zlib, only faster; zlib is
the fallback.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32
