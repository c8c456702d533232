"""Alignment: pages, huge pages and grains, which the engine, the planner and the simulator share. Pure arithmetic.

Bytes move in pages (`ALIGNMENT`), large chunks in huge pages, and elements are cut at multiples of `GRAIN`.
"""

from __future__ import annotations

# O_DIRECT needs the address, the offset and the length in multiples of the logical block size. 4096 is right for every
# drive and is also the page size, so one number serves buffers, blocks and files.
ALIGNMENT = 4096
HUGE_PAGE_BYTES = 2 << 20

# Parameters, shards and chunks start at multiples of this many elements. Vectorised kernels on slices are bit-identical
# to kernels on the whole tensor when slices start at multiples of 8; 64 elements of any dtype are also whole cache
# lines.
GRAIN = 64


def round_up(num_bytes: int, multiple: int = ALIGNMENT) -> int:
    """The smallest multiple of `multiple` that is not below `num_bytes`."""
    return -(-num_bytes // multiple) * multiple


def round_up_elements(num_elements: int) -> int:
    """The smallest multiple of `GRAIN` that is not below `num_elements`."""
    return round_up(num_elements, GRAIN)
