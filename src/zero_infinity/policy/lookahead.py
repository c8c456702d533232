"""The prefetch distance: how many bytes are fetched or copied ahead of use. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from zero_infinity.policy.unit_sizes import UnitSize

# How far blocks are fetched ahead: twice the largest unit with its record, so that the drive is never idle while one
# large unit is computed and updated, or at least the bytes below. The rest of the cache keeps blocks from one step to
# the next and saves their transfers. A small cache looks ahead by at most this share of itself: at 1/8 of the states
# 2/3 waits 4% of the time, 0.9 not at all, and both move as many bytes (dev/LOG.md, 2026-11-18).
_LOOKAHEAD_SHARE = 0.9
_LOOKAHEAD_UNITS = 2
_LEAST_LOOKAHEAD_BYTES = 64 << 20
# Inference: so many times the unit that an average byte lies in, so that one is read while another is computed; at
# least a share of the cache. What is fetched ahead in every cycle takes the place of what would stay (dev/LOG.md,
# 2026-11-18): with half of a model in memory 0.9 of the cache reads 0.98 of the model a forward, 1/32 reads 0.52.
_INFERENCE_UNITS = 2
_INFERENCE_SHARE = 1 / 32
# Copies in host memory are made ahead of use as far as this share of their room allows, on a device as far as all of
# it: what is used before the end of forward or backward is used again after it, in the opposite order, so nothing is
# evicted too early. With a third, the link idles while backward ends, and the next forward waits (dev/LOG.md,
# 2026-11-18).
_COPY_LOOKAHEAD_SHARE = 1 / 3


def lookahead_bytes(moving: Sequence[UnitSize], cache: int) -> int:
    """How many bytes of blocks are fetched ahead of use: units that move, in a cache of `cache` bytes."""
    largest = max((u.parameters + u.record for u in moving), default=0)
    return min(int(cache * _LOOKAHEAD_SHARE), max(_LOOKAHEAD_UNITS * largest, _LEAST_LOOKAHEAD_BYTES))


def inference_lookahead(sizes: Sequence[int], cache: int) -> int:
    """How many bytes are fetched ahead of use where nothing is trained: units of `sizes` bytes, in `cache` bytes."""
    usual = sum(size * size for size in sizes) // max(1, sum(sizes))
    least = min(_LEAST_LOOKAHEAD_BYTES, int(cache * _INFERENCE_SHARE))
    return min(int(cache * _LOOKAHEAD_SHARE), max(_INFERENCE_UNITS * usual, least))


def copy_lookahead(room: int, *, on_device: bool) -> int:
    """How many bytes of copies are made ahead of use, out of `room` bytes for copies."""
    return room if on_device else int(room * _COPY_LOOKAHEAD_SHARE)
