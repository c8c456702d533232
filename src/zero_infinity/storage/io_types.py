"""Plain types of the I/O engine: direction and priority of a transfer, counters, and latency percentiles.

`io_engine` accepts transfers, `io_queue` orders and counts them under its lock, `io_workers` runs them.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from itertools import accumulate

# Latency buckets: 16 per factor of two, so that percentiles are accurate to 2.2 %, from 1 µs (no request is faster) to
# over an hour.
_BUCKETS_PER_OCTAVE = 16
_SMALLEST_SECONDS = 1e-6
_NUM_BUCKETS = 32 * _BUCKETS_PER_OCTAVE


class Direction(enum.Enum):
    READ = "read"
    WRITE = "write"


class Priority(enum.IntEnum):
    """Lower values run first. A transfer that a thread waits for is raised to DEMANDED."""

    DEMANDED = 0
    PREFETCH = 1
    WRITE_BACK = 2


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of the time from the start of a request to its end, in seconds."""

    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class IOCounters:
    """Totals since the engine was created."""

    bytes_read: int
    bytes_written: int
    read_requests: int
    write_requests: int
    busy_seconds: float  # time with at least one request at the device
    read_latency: Latency
    write_latency: Latency


class LatencyHistogram:
    """Counts of request durations by logarithmic bucket, in constant memory. Takes no lock."""

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
        """The middle of the bucket that contains this rank; 0 without samples."""
        total = sum(self._counts)
        rank = max(1, math.ceil(total * fraction))
        for index, seen in enumerate(accumulate(self._counts)):
            if seen >= rank:
                middle: float = _SMALLEST_SECONDS * 2.0 ** ((index + 0.5) / _BUCKETS_PER_OCTAVE)
                return min(middle, self._max)
        return 0.0
