"""Reads and writes byte ranges of checkpoint files without filling the page cache; errors name the file.

Large ranges use direct I/O, which takes half the CPU (measured: dev/LOG.md). Reads are widened to whole pages; writes
need file offset and memory address to be congruent modulo the page size. Buffered writes drop their pages as soon as
they are on the drive, so that they do not count against a cgroup's memory limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from zero_infinity.checkpoint.regular_files import open_regular
from zero_infinity.errors import CheckpointError, StorageError, TransferError
from zero_infinity.policy.alignment import ALIGNMENT, round_up
from zero_infinity.storage.pages import address_of, move_bytes
from zero_infinity.storage.swap_file import fallocate

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_TO_DRIVE = 1 | 2 | 4  # write the dirty pages of a range, and wait for them
_LARGE = 1 << 18  # bytes; pages of smaller ranges stay cached, else a page would be written once for each neighbour


class OpenFile:
    """One open file, usable from any thread."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        with storage_errors(path, "open"):
            flags = os.O_RDWR if writable else os.O_RDONLY
            self._direct = _open_direct(path, flags)
            self._descriptor = open_regular(path, flags)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)
        if self._direct is not None:
            os.close(self._direct)

    def read(self, start: int, num_bytes: int, room: memoryview) -> memoryview:
        """Read into `room`, and return the part of it that has the bytes.

        `room` is aligned to a page and two pages larger than `num_bytes`.
        """
        first, last = start // ALIGNMENT * ALIGNMENT, round_up(start + num_bytes)
        if self._direct is not None and num_bytes >= _LARGE and last - first <= len(room) and not start % 8:
            with storage_errors(self.path, f"read {num_bytes:,} bytes at {start:,} of"):
                # The file's last page may be incomplete. Any other short read is repeated below, which reports it.
                if os.preadv(self._direct, [room[: last - first]], first) >= start + num_bytes - first:
                    return room[start - first : start - first + num_bytes]
        self._read_buffered(start, room[:num_bytes])
        return room[:num_bytes]

    def read_into(self, start: int, memory: memoryview) -> bool:
        """Read straight into `memory` by direct I/O; False if that is not possible (`memory` is then undefined)."""
        if self._direct is None or len(memory) < _LARGE or (start | len(memory) | address_of(memory)) % ALIGNMENT:
            return False
        with storage_errors(self.path, f"read {len(memory):,} bytes at {start:,} of"):
            return os.preadv(self._direct, [memory], start) == len(memory)

    def _read_buffered(self, start: int, memory: memoryview) -> None:
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
        """Write `memory` at `start`. Durable only after `sync`."""
        with storage_errors(self.path, f"write {len(memory):,} bytes at {start:,} of"):
            # Whole pages use direct I/O if they are also aligned in memory (see `congruent`).
            head = -start % ALIGNMENT
            tail = head
            if self._direct is not None and len(memory) >= _LARGE and not (start - address_of(memory)) % ALIGNMENT:
                whole = memory[head : head + (len(memory) - head) // ALIGNMENT * ALIGNMENT]
                tail = head + os.pwrite(self._direct, whole, start + head)
            self._write_buffered(start, memory[:head])
            self._write_buffered(start + tail, memory[tail:])

    def _write_buffered(self, start: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            done += os.pwrite(self._descriptor, memory[done:], start + done)
        if len(memory) >= _LARGE:
            _libc.sync_file_range(self._descriptor, start, len(memory), _TO_DRIVE)
            os.posix_fadvise(self._descriptor, start, len(memory), os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        with storage_errors(self.path, "make durable"):
            os.fsync(self._descriptor)


def _open_direct(path: Path, flags: int) -> int | None:
    """A descriptor for direct I/O; None if the file system does not support it."""
    try:
        return open_regular(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def congruent(memory: memoryview, start: int, room: memoryview) -> memoryview:
    """Move bytes within `room` (aligned to a page) so that `OpenFile.write` can write them at `start` by direct I/O.

    Returned as they are if they are small, already congruent, or do not fit.
    """
    shift = start % ALIGNMENT
    if len(memory) < _LARGE or address_of(memory) % ALIGNMENT == shift or shift + len(memory) > len(room):
        return memory
    target = room[shift : shift + len(memory)]
    move_bytes(target, memory)
    return target


def create(path: Path, beginning: bytes, num_bytes: int) -> None:
    """Create a file with this content at its beginning, and reserve `num_bytes` in all."""
    with storage_errors(path, "write"), path.open("xb") as file:
        file.write(beginning)
        file.flush()
        # A full drive fails now, before anything is written. Without fallocate a later write fails.
        if not fallocate(file.fileno(), 0, max(1, num_bytes)):
            file.truncate(num_bytes)


def write_whole(path: Path, data: bytes) -> None:
    """Create a small file, durably."""
    with storage_errors(path, "write"), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storage_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an OSError inside into a `TransferError` that says which action failed, and where."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "\n  fix:   free some space there, or save to a larger drive" if is_full else ""
        where = error.filename or path
        raise TransferError(
            error.errno, f"cannot {action} {path}: {error.strerror} ({where}){fix}", str(path)
        ) from error
