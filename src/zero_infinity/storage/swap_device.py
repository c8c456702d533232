"""The interface between the I/O engine and the storage that moves the bytes.

A device is a linear address space with synchronous positional transfers, like a file with `pread` and `pwrite`. It is
called from several worker threads at once. It does not know about priorities, order or tickets: the I/O queue
guarantees that conflicting requests for the same bytes never run at the same time.

Implementations: `FileDevice` (striped_files); benchmarks have a throttled one, tests a fake one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

# Returned by `SwapDevice.max_request` if a request may have any size.
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of an open file."""

    descriptor: int
    offset: int
    num_bytes: int


@runtime_checkable
class InFiles(Protocol):
    """A device whose bytes lie in files, which others may read, too."""

    def file_ranges(self, offset: int, num_bytes: int) -> Sequence[FileRange]:
        """Where these bytes are, in their order."""


class SwapDevice(Protocol):
    """Storage for swapped blocks."""

    @property
    def capacity(self) -> int:
        """Bytes reserved so far."""

    @property
    def alignment(self) -> int:
        """Address, offset and length of a transfer must be multiples of this; 1 if there is no restriction."""

    def extend(self, num_bytes: int) -> None:
        """Reserve `num_bytes` more, or raise `SwapSpaceError` and change nothing.

        Never called by two threads at once, but possibly while transfers run.
        """

    def read(self, memory: memoryview, offset: int) -> int:
        """Fill `memory` from `offset`; return the number of bytes moved, which may be smaller. Raises OSError."""

    def write(self, memory: memoryview, offset: int) -> int:
        """Store `memory` at `offset`; return the number of bytes moved, which may be smaller. Raises OSError."""

    def max_request(self, offset: int) -> int:
        """The largest request that may start at `offset` (up to the end of a stripe), or UNLIMITED."""

    def describe(self, offset: int) -> str:
        """Where the byte at `offset` is stored, for error messages."""

    def close(self) -> None:
        """Release all resources. Called when no transfer runs. Idempotent."""
