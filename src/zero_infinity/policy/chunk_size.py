"""The size of a chunk: how much of a unit's optimizer record and gradient is fetched and updated at a time.

Pure arithmetic: bytes from the size of the cache, elements from bytes.
"""

from __future__ import annotations

from zero_infinity.policy.alignment import GRAIN, HUGE_PAGE_BYTES, round_up
from zero_infinity.policy.unit_sizes import ElementBytes

# A chunk of a record is at most this share of the cache, with room for four chunks beside what is needed at once, and
# within the bounds below. Each chunk costs an update some Python, during which the computation waits: compared with
# 1/24 a step at 1/8 of the states is 3% shorter; 1/8 is no better, and waits longer (dev/LOG.md, 2026-11-16). Large
# chunks are whole huge pages, which can be remapped without copying when free memory is fragmented.
_CHUNK_SHARE = 1 / 12
_CHUNKS_BESIDE = 4
MIN_CHUNK_BYTES = 256 * 1024
MAX_CHUNK_BYTES = 16 * 1024 * 1024


def choose_chunk_bytes(cache: int, at_once: int) -> int:
    """Bytes of one record in a cache of `cache` bytes, where parameters of `at_once` bytes are needed at once."""
    wanted = max(0, min(int(cache * _CHUNK_SHARE), (cache - at_once) // _CHUNKS_BESIDE))
    if wanted > HUGE_PAGE_BYTES:
        wanted = round(wanted / HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return max(MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, round_up(wanted)))


def chunk_elements(chunk_bytes: int, widths: ElementBytes) -> int:
    """Elements in one chunk of a unit's optimizer record and gradient: whole grains, at least one.

    A chunk's record and its gradient each take at most `chunk_bytes`; an optimizer without states has only the latter.
    """
    return max(GRAIN, chunk_bytes // max(widths.record, widths.gradient) // GRAIN * GRAIN)
