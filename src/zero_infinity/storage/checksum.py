"""CRC-32, as zlib has it, ten times as fast where the CPU multiplies without carries (docs/numbers.md).

The polynomial is zlib's, so what one computes the other checks: Intel's library (the package isal, which has wheels for
x86-64 and ARM) is only the faster one, and zlib serves wherever there is none.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32
