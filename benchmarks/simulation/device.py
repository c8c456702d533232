"""The drives of a simulation: swap space in memory, and faults of checkpoint files.

A transfer takes virtual time, and moves its bytes somewhere in the middle of it. It may be short, as direct I/O can be,
or fail. A file whose fsync fails has lost what was written since the last one, as Linux has it: the pages are clean
afterwards, and the drive has not got them.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.simulation.scheduler import Scheduler
from zero_infinity.errors import SwapSpaceError
from zero_infinity.policy.alignment import ALIGNMENT
from zero_infinity.storage.swap_device import UNLIMITED

_SECTOR = 512  # where a short transfer may end


@dataclass(slots=True)
class DriveFaults:
    """What goes wrong on one rank's drives; each at the request with this number, counted from 0."""

    read_fails: int | None = None
    write_fails: int | None = None
    write_error: int = errno.EIO
    is_full: bool = False  # no room for swap space
    short_every: int | None = None  # every so many requests are short
    fsync_fails: int | None = None
    file_write_fails: int | None = None
    file_write_error: int = errno.ENOSPC
    # A bug put in on purpose: this write never reaches the drive.
    loses_write: int | None = None


class SimulatedDevice:
    """One rank's swap space."""

    alignment = ALIGNMENT

    def __init__(self, scheduler: Scheduler, faults: DriveFaults, delay: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._faults = faults
        self._delay = delay
        self._data = bytearray()
        self._counts = {"read": 0, "write": 0}
        self._num_requests = 0
        self.is_closed = False

    @property
    def capacity(self) -> int:
        return len(self._data)

    def extend(self, num_bytes: int) -> None:
        if self._faults.is_full:
            raise SwapSpaceError(errno.ENOSPC, "the simulated drive is full\n  fix:   another seed", "simulated")
        self._data.extend(bytes(num_bytes))

    def read(self, memory: memoryview, offset: int) -> int:
        num_bytes = self._begin("read", len(memory), self._faults.read_fails, errno.EIO)
        memory[:num_bytes] = self._data[offset : offset + num_bytes]
        self._scheduler.sleep(self._delay())
        return num_bytes

    def write(self, memory: memoryview, offset: int) -> int:
        is_lost = self._counts["write"] == self._faults.loses_write
        num_bytes = self._begin("write", len(memory), self._faults.write_fails, self._faults.write_error)
        if not is_lost:
            self._data[offset : offset + num_bytes] = memory[:num_bytes]
        self._scheduler.sleep(self._delay())
        return num_bytes

    def max_request(self, _: int) -> int:
        return UNLIMITED

    def describe(self, offset: int) -> str:
        return f"simulated at {offset}"

    def close(self) -> None:
        self.is_closed = True

    def _begin(self, kind: str, num_bytes: int, failing: int | None, error: int) -> int:
        number = self._counts[kind]
        self._counts[kind] += 1
        self._num_requests += 1
        self._scheduler.sleep(self._delay())
        if number == failing:
            raise OSError(error, os.strerror(error))
        every = self._faults.short_every
        if every is not None and self._num_requests % every == 0 and num_bytes > ALIGNMENT:
            return num_bytes - _SECTOR
        return num_bytes


class FileFaults:
    """In place of `os` where checkpoints are written: the real one, with each rank's faults."""

    def __init__(self, scheduler: Scheduler, faults: list[DriveFaults]) -> None:
        self._scheduler = scheduler
        self._faults = faults
        self._num_syncs: defaultdict[int, int] = defaultdict(int)
        self._num_writes: defaultdict[int, int] = defaultdict(int)
        self._unsynced: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self.failed_syncs = 0

    def namespace(self) -> Any:
        real = {name: getattr(os, name) for name in dir(os) if not name.startswith("_")}
        return SimpleNamespace(**{**real, "fsync": self._fsync, "pwrite": self._pwrite})

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        self._scheduler.pause()
        rank = self._scheduler.task().rank
        number, self._num_writes[rank] = self._num_writes[rank], self._num_writes[rank] + 1
        faults = self._faults[rank]
        if number == faults.file_write_fails:
            raise OSError(faults.file_write_error, os.strerror(faults.file_write_error))
        if len(data) > 1 and number % 3 == 2:
            data = data[: len(data) // 2]  # short
        self._unsynced[_path(descriptor)].append((offset, len(data)))
        return os.pwrite(descriptor, data, offset)

    def _fsync(self, descriptor: int) -> None:
        self._scheduler.pause()
        rank = self._scheduler.task().rank
        number, self._num_syncs[rank] = self._num_syncs[rank], self._num_syncs[rank] + 1
        written = self._unsynced.pop(_path(descriptor), [])
        if number != self._faults[rank].fsync_fails:
            return
        self.failed_syncs += 1
        for offset, length in written:
            os.pwrite(descriptor, bytes(length), offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _path(descriptor: int) -> str:
    return str(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
