"""Measures the throughput and latency of an I/O engine for one workload.

Owns the pattern of transfers and the clock. It does not choose settings and prints nothing.
"""

from __future__ import annotations

import enum
import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zero_infinity.storage.io_engine import IOEngine
from zero_infinity.storage.io_types import Direction, Priority


class IOWorkload(enum.Enum):
    READ = "read"
    WRITE = "write"
    MIXED = "mixed"  # half reads from the first half of the range, half writes to the second


@dataclass(frozen=True, slots=True)
class IOSpeed:
    bytes_per_second: float
    cores: float  # CPU seconds of this process, user and system, per second
    p50_seconds: float
    p99_seconds: float


def scratch_memory(num_bytes: int) -> mmap.mmap:
    """Page-aligned private memory on huge pages, filled with noise (drives may compress or skip zeros).

    Huge pages because the kernel looks up and pins every page of a direct transfer: there are 512 times fewer.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    words = np.frombuffer(memory, np.uint64)
    words[:] = np.random.default_rng(0).integers(0, 1 << 63, len(words), np.uint64)
    return memory


def measure(engine: IOEngine, memory: memoryview, workload: IOWorkload, request_bytes: int, num_bytes: int) -> IOSpeed:
    """Transfer `num_bytes` of a new engine's address space in transfers of `request_bytes`, all queued at once.

    Only a range that was written before gives a meaningful read: for the rest the kernel returns zeros without a drive.
    """
    # Transfers share the memory round-robin: the contents do not matter, and sharing bounds its size.
    slots = [memory[at : at + request_bytes] for at in range(0, len(memory) - request_bytes + 1, request_bytes)]
    wall, cpu = time.perf_counter(), time.process_time()
    tickets = [
        engine.submit(direction, slots[index % len(slots)], offset, Priority.PREFETCH)
        for index, (direction, offset) in enumerate(_pattern(workload, request_bytes, num_bytes))
    ]
    for ticket in tickets:
        ticket.wait()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    counters = engine.counters()
    reads, writes = counters.read_latency, counters.write_latency  # zeros where there were none
    return IOSpeed(
        bytes_per_second=len(tickets) * request_bytes / wall,
        cores=cpu / wall,
        p50_seconds=max(reads.p50, writes.p50),
        p99_seconds=max(reads.p99, writes.p99),
    )


def _pattern(workload: IOWorkload, request_bytes: int, num_bytes: int) -> Iterator[tuple[Direction, int]]:
    if workload is not IOWorkload.MIXED:
        direction = Direction.READ if workload is IOWorkload.READ else Direction.WRITE
        yield from ((direction, offset) for offset in range(0, num_bytes - request_bytes + 1, request_bytes))
        return
    half = num_bytes // 2
    for offset in range(0, half - request_bytes + 1, request_bytes):
        yield Direction.READ, offset
        yield Direction.WRITE, half + offset
