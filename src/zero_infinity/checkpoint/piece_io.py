"""Reads and writes byte ranges of checkpoint files, past the page cache.

Large ranges go by direct I/O, which takes half the CPU (measured: dev/LOG.md): reads in whole pages around what is
wanted, writes where file and memory begin at a page. Whatever else is written gives its pages back as soon as they are
on the drive, which keeps a control group's memory free of them.
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
from zero_infinity.policy.sizes import ALIGNMENT, round_up
from zero_infinity.storage.pages import address_of, move_bytes
from zero_infinity.storage.swap_file import fallocate

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_TO_DRIVE = 1 | 2 | 4  # write the dirty pages of a range, and wait for them
_LARGE = 1 << 18  # pages of smaller ranges may stay until the end: they would be written once for each neighbour


class OpenFile:
    """One file, for any thread."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        with storage_errors(path, "open"):
            flags = os.O_RDWR if writable else os.O_RDONLY
            self._direct = _open_direct(path, flags)
            self._descriptor = os.open(path, flags)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)
        if self._direct is not None:
            os.close(self._direct)

    def read(self, start: int, num_bytes: int, room: memoryview) -> memoryview:
        """Bytes from `start` on, somewhere in `room`, which begins at a page and has two pages more than they take."""
        first, last = start // ALIGNMENT * ALIGNMENT, round_up(start + num_bytes)
        if self._direct is not None and num_bytes >= _LARGE and last - first <= len(room) and not start % 8:
            with storage_errors(self.path, f"read {num_bytes:,} bytes at {start:,} of"):
                # The last page of the file is not whole; whatever else is short is read again below, and told of.
                if os.preadv(self._direct, [room[: last - first]], first) >= start + num_bytes - first:
                    return room[start - first : start - first + num_bytes]
        self._read_buffered(start, room[:num_bytes])
        return room[:num_bytes]

    def read_into(self, start: int, memory: memoryview) -> bool:
        """Read bytes from `start` on straight into their place; False, and nothing of use, where that cannot be."""
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
        """Write `memory` at `start`; it is not durable before `sync`."""
        with storage_errors(self.path, f"write {len(memory):,} bytes at {start:,} of"):
            # Whole pages go past the page cache, if they are whole pages in memory, too (`congruent`).
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
    """For direct I/O; None where the file system has none."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def congruent(memory: memoryview, start: int, room: memoryview) -> memoryview:
    """The same bytes at an address from which `OpenFile.write` can write them at `start` by direct I/O, if that pays.

    They are moved into `room`, which begins at a page, when it has a page more than they take.
    """
    shift = start % ALIGNMENT
    if len(memory) < _LARGE or address_of(memory) % ALIGNMENT == shift or shift + len(memory) > len(room):
        return memory
    target = room[shift : shift + len(memory)]
    move_bytes(target, memory)
    return target


def create(path: Path, beginning: bytes, num_bytes: int) -> None:
    """A new file that begins so, with room for `num_bytes` in all."""
    with storage_errors(path, "write"), path.open("xb") as file:
        file.write(beginning)
        file.flush()
        # A full drive is an error now, before anything else is written; where nothing can be reserved, a write is.
        if not fallocate(file.fileno(), 0, max(1, num_bytes)):
            file.truncate(num_bytes)


def write_whole(path: Path, data: bytes) -> None:
    """A small file, durable."""
    with storage_errors(path, "write"), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
