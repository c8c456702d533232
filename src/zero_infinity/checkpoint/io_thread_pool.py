"""Threads for checkpoint I/O, each with a staging buffer ("room") of its own, and their progress.

The buffers are all memory that save and load use. It comes out of the budget: checkpoint I/O reuses what is set aside
for gradients, which is idle between two steps (`WeightsView.staging`).
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from zero_infinity.checkpoint.manifest import PIECE_BYTES
from zero_infinity.interrupts import through
from zero_infinity.one_core_thread import use_one_core
from zero_infinity.policy.alignment import ALIGNMENT, round_up

Job = Callable[[memoryview], None]
Progress = Callable[[int, int], None]  # bytes moved so far by this rank, and bytes in all

# Enough to saturate a drive with pieces of this size, some in I/O and one being checksummed.
_NUM_THREADS = 12
_MAX_ROOM = PIECE_BYTES + 2 * ALIGNMENT
# With less memory: fewer threads and smaller buffers.
_FEW_THREADS = 4
_MIN_ROOM = 4 * ALIGNMENT


class IOThreadPool:
    """A few threads that share `num_bytes` of memory (at least 16 KiB)."""

    def __init__(self, num_bytes: int, *, with_torch: bool = True) -> None:
        num_threads = min(_NUM_THREADS, num_bytes // _MAX_ROOM)
        if num_threads < _FEW_THREADS:
            num_threads = max(1, min(_FEW_THREADS, num_bytes // _MIN_ROOM))
        room = max(_MIN_ROOM, min(_MAX_ROOM, num_bytes // num_threads // ALIGNMENT * ALIGNMENT))
        # MAP_PRIVATE: shared anonymous memory counts as page cache and gets no huge pages.
        memory = mmap.mmap(-1, num_threads * round_up(room), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._rooms = [memoryview(memory)[at : at + room] for at in range(0, len(memory), round_up(room))]
        self.room_bytes = room - 2 * ALIGNMENT  # of payload: reads are widened to whole pages
        # torch in several threads at once: one core each.
        set_up = use_one_core if with_torch else None
        self._executor = ThreadPoolExecutor(num_threads, "zero-infinity-checkpoint", set_up)
        self._lock = threading.Lock()
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._failed = True  # stops jobs that an interrupt left behind
        self._executor.shutdown()

    def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs, in any order; raises the first error after all threads have stopped."""
        self.finish(self.start(jobs))

    def start(self, jobs: Iterable[Job]) -> list[Future[None]]:
        """Start to run jobs; returns one `Future` per thread."""
        waiting = iter(jobs)
        return [self._executor.submit(self._work, waiting, room) for room in self._rooms]

    @staticmethod
    def finish(futures: Iterable[Future[None]]) -> None:
        """Wait for all threads, and raise the first error."""
        futures = list(futures)
        for future in futures:
            with through():
                future.exception()
        for future in futures:
            future.result()

    def _work(self, waiting: Iterator[Job], room: memoryview) -> None:
        try:
            while (job := self._next(waiting)) is not None:
                job(room)
        except BaseException:
            self._failed = True
            raise

    def _next(self, waiting: Iterator[Job]) -> Job | None:
        with self._lock:
            return None if self._failed else next(waiting, None)


class ProgressMeter:
    """Counts bytes moved by several threads. Calls `progress` after each piece, one call at a time."""

    def __init__(self, progress: Progress | None, total: int = 0) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self.total = total

    def add(self, num_bytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done = min(self.total, self._done + num_bytes)
                self._progress(self._done, self.total)
