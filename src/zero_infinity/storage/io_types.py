"""What the store asks of asynchronous I/O: the types, and nothing that moves a byte.

An engine is a linear address space that blocks are written to and read from. It grows by `reserve`, and
transfers are submitted against offsets in it; where the bytes really lie (one file, several striped files,
memory) is the engine's own business. `QueuedEngine` implements this protocol over any `Device`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Direction(enum.Enum):
    READ = "read"
    WRITE = "write"


class Priority(enum.IntEnum):
    """Lower goes first. A transfer that someone waits for is raised to DEMANDED."""

    DEMANDED = 0
    PREFETCH = 1
    WRITE_BACK = 2


class IOTicket(Protocol):
    """One submitted transfer."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is complete and its callbacks have run; raise what it failed with.

        Raises it to DEMANDED first. After `timeout` seconds: TimeoutError, and the transfer goes on.
        """

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def raise_priority(self, priority: Priority) -> None:
        """Let it overtake from here on; never lowers."""

    def cancel(self) -> bool:
        """Take it back if no byte of it has started (`wait` then raises CancelledError); False if it is too late."""

    def add_done_callback(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call `callback(error)` once, on the completing thread, with no engine lock held (at once if done).

        It must not wait for another transfer. An exception in it stops the engine.
        """


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of the time from a request's start to its end, in seconds."""

    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class IOCounters:
    """What an engine has done since it was made."""

    bytes_read: int
    bytes_written: int
    read_requests: int
    write_requests: int
    busy_seconds: float  # time with at least one request at the device
    queue_depth: int  # requests waiting or running now
    max_queue_depth: int
    read_latency: Latency
    write_latency: Latency


class IOEngine(Protocol):
    @property
    def capacity(self) -> int:
        """Bytes reserved so far: the size of the address space."""

    def reserve(self, num_bytes: int) -> int:
        """Grow the address space by `num_bytes` (rounded up to ALIGNMENT); return the offset of the new part."""

    def submit(
        self, direction: Direction, memory: memoryview, offset: int, priority: Priority, name: str = ""
    ) -> IOTicket:
        """Start a transfer between `memory` and `offset`. `memory` must stay alive until the ticket is done.

        `name`: whose bytes they are, for a trace.
        """

    def describe(self, offset: int) -> str:
        """Where the byte at `offset` lies ("/mnt/nvme/... at 4096"), for error messages."""

    def counters(self) -> IOCounters: ...

    def close(self) -> None:
        """Finish what runs, fail what waits, give back files and threads. Idempotent."""
