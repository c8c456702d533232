"""What the I/O queue asks of the thing that really moves bytes: one protocol, and nothing that moves a byte.

A device is a linear address space with synchronous positional transfers, like a file with `pread` and `pwrite`.
It is called from several worker threads at once. It does not know about priorities, order or tickets: that two
requests at the same bytes never run together is the queue's promise.
"""

from __future__ import annotations

from typing import Protocol

# For `SwapDevice.max_request`: no boundary ahead that a request must not cross.
UNLIMITED = 1 << 62


class SwapDevice(Protocol):
    @property
    def capacity(self) -> int:
        """Bytes reserved so far."""

    @property
    def alignment(self) -> int:
        """What address, offset and length of a transfer must be multiples of; 1 where anything goes."""

    def extend(self, num_bytes: int) -> None:
        """Reserve `num_bytes` more, or raise `SwapSpaceError` and leave everything as it was.

        Never called by two threads at once, but while transfers run.
        """

    def read(self, memory: memoryview, offset: int) -> int:
        """Fill `memory` from `offset`; return the bytes moved, which may be fewer. Raises OSError."""

    def write(self, memory: memoryview, offset: int) -> int:
        """Store `memory` at `offset`; return the bytes moved, which may be fewer. Raises OSError."""

    def max_request(self, offset: int) -> int:
        """Bytes from `offset` on that one request may cover (up to the end of a stripe), or UNLIMITED."""

    def describe(self, offset: int) -> str:
        """Where the byte at `offset` lies, for error messages."""

    def close(self) -> None:
        """Give everything back. Called once no transfer runs; idempotent."""
