"""Plain types of the I/O engine: direction and priority of a transfer, and the engine's counters.

Data only. `io_engine` accepts transfers, `io_queue` orders them, `io_workers` runs them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from zero_infinity.storage.latency import Latency


class Direction(enum.Enum):
    READ = "read"
    WRITE = "write"


class Priority(enum.IntEnum):
    """Lower values run first. A transfer that a thread waits for is raised to DEMANDED."""

    DEMANDED = 0
    PREFETCH = 1
    WRITE_BACK = 2


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
