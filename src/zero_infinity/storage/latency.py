"""How long requests took, as percentiles, in constant memory.

Owns a histogram with logarithmic buckets. It takes no lock: the queue adds under its own.
"""

from __future__ import annotations

import math
from itertools import accumulate

from zero_infinity.storage.io_types import Latency

# 16 buckets a factor of two: a percentile is right to 2.2 %. From 1 µs (no request is faster) to over an hour.
_BUCKETS_PER_OCTAVE = 16
_SMALLEST_SECONDS = 1e-6
_NUM_BUCKETS = 32 * _BUCKETS_PER_OCTAVE


class LatencyHistogram:
    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self._max = 0.0

    def add(self, seconds: float) -> None:
        ratio = seconds / _SMALLEST_SECONDS
        index = int(math.log2(ratio) * _BUCKETS_PER_OCTAVE) if ratio > 1.0 else 0
        self._counts[min(index, _NUM_BUCKETS - 1)] += 1
        if seconds > self._max:
            self._max = seconds

    def percentiles(self) -> Latency:
        return Latency(self._percentile(0.50), self._percentile(0.90), self._percentile(0.99), self._max)

    def _percentile(self, fraction: float) -> float:
        """The middle of the bucket that holds the request of this rank; 0 without requests."""
        total = sum(self._counts)
        rank = max(1, math.ceil(total * fraction))
        for index, seen in enumerate(accumulate(self._counts)):
            if seen >= rank:
                middle: float = _SMALLEST_SECONDS * 2.0 ** ((index + 0.5) / _BUCKETS_PER_OCTAVE)
                return min(middle, self._max)
        return 0.0
