"""Reads and writes byte ranges of checkpoint files, past the page cache.

Tensors begin where the one before ends, so that direct I/O is not possible. Buffered I/O is as fast when pages are
given back as soon as they are used (measured: dev/LOG.md), and that also keeps a control group's memory free of them.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from zero_infinity.checkpoint.directory import storage_errors
from zero_infinity.errors import CheckpointError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_TO_DRIVE = 1 | 2 | 4  # write the dirty pages of a range, and wait for them
_LARGE = 1 << 20  # pages of smaller ranges may stay until the end: they would be written once for each neighbour
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL)  # a file system that cannot reserve


class OpenFile:
    """One file, for any thread."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        with storage_errors(path, "open"):
            self._descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, start: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes from `start` on."""
        done = 0
        with storage_errors(self.path, f"read {len(memory):,} bytes at {start:,} of"):
            while done < len(memory):
                count = os.preadv(self._descriptor, [memory[done:]], start + done)
                if not count:
                    raise CheckpointError(
                        f"{self.path} ends at byte {start + done:,}, {len(memory) - done:,} bytes before a tensor does"
                    )
                done += count
            os.posix_fadvise(self._descriptor, start, len(memory), os.POSIX_FADV_DONTNEED)

    def write(self, start: int, memory: memoryview) -> None:
        """Write `memory` at `start`; it is not durable before `sync`."""
        done = 0
        with storage_errors(self.path, f"write {len(memory):,} bytes at {start:,} of"):
            while done < len(memory):
                done += os.pwrite(self._descriptor, memory[done:], start + done)
        if len(memory) >= _LARGE:
            _libc.sync_file_range(self._descriptor, start, len(memory), _TO_DRIVE)
            os.posix_fadvise(self._descriptor, start, len(memory), os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        with storage_errors(self.path, "make durable"):
            os.fsync(self._descriptor)


def create(path: Path, beginning: bytes, num_bytes: int) -> None:
    """A new file that begins so, with room for `num_bytes` in all."""
    with storage_errors(path, "write"), path.open("xb") as file:
        file.write(beginning)
        file.flush()
        try:
            # A full drive is an error now, before anything else is written.
            os.posix_fallocate(file.fileno(), 0, max(1, num_bytes))
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            file.truncate(num_bytes)


def write_whole(path: Path, data: bytes) -> None:
    """A small file, durable."""
    with storage_errors(path, "write"), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
