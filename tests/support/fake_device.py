"""An in-memory swap device with scripted behaviour.

Owns a bytearray and the script: how long a request takes, how many of its bytes are moved, which request fails with
which errno. The same script and order of requests always give the same outcome. It does not use files.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import SwapSpaceError
from zero_infinity.storage.io_types import Direction
from zero_infinity.storage.swap_device import UNLIMITED


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """One call of `read` or `write`, as the device received it."""

    index: int  # in order of arrival, from 0
    direction: Direction
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class FakeFault:
    """Requests that match all given conditions fail with `error_number`."""

    error_number: int
    at_request: int | None = None
    direction: Direction | None = None
    offsets: range | None = None

    def matches(self, request: FakeRequest) -> bool:
        if self.at_request is not None and request.index != self.at_request:
            return False
        if self.direction is not None and request.direction is not self.direction:
            return False
        return self.offsets is None or (
            request.offset < self.offsets.stop and self.offsets.start < request.offset + request.length
        )


class FakeDevice:
    """Swap space in a bytearray, with scripted latency, short transfers and errors.

    `latency` and `transfer` are called on the worker's thread before any byte moves, so a test can hold a request
    at the device by blocking in them.

    Args:
        latency: seconds that a request takes, or a function that returns them.
        transfer: maximum number of bytes that a request moves (a short transfer), or a function that returns it.
        faults: requests that fail.
        limit: maximum capacity in bytes; beyond it the device is full.
        stripe_bytes: requests must not cross multiples of this, as with several directories.
        alignment: required alignment of address, offset and length.
    """

    def __init__(
        self,
        *,
        latency: float | Callable[[FakeRequest], float] = 0.0,
        transfer: int | Callable[[FakeRequest], int] | None = None,
        faults: Iterable[FakeFault] = (),
        limit: int | None = None,
        stripe_bytes: int | None = None,
        alignment: int = 1,
    ) -> None:
        self._latency = latency
        self._transfer = transfer
        self._faults = tuple(faults)
        self._limit = limit
        self._stripe_bytes = stripe_bytes
        self._alignment = alignment
        self._data = bytearray()
        self._lock = threading.Lock()  # a bytearray must not be resized while a copy from it runs
        self._requests: list[FakeRequest] = []
        self._closed = False

    @property
    def capacity(self) -> int:
        return len(self._data)

    @property
    def alignment(self) -> int:
        return self._alignment

    @property
    def requests(self) -> list[FakeRequest]:
        """Every request so far, in order of arrival."""
        with self._lock:
            return list(self._requests)

    @property
    def closed(self) -> bool:
        return self._closed

    def contents(self) -> bytes:
        with self._lock:
            return bytes(self._data)

    def extend(self, num_bytes: int) -> None:
        with self._lock:
            if self._limit is not None and len(self._data) + num_bytes > self._limit:
                free = self._limit - len(self._data)
                raise SwapSpaceError(
                    errno.ENOSPC,
                    f"{format_bytes(num_bytes)} of swap space is needed, but the memory device has "
                    f"{format_bytes(free)} free of its limit of {format_bytes(self._limit)}",
                )
            self._data.extend(bytes(num_bytes))

    def read(self, memory: memoryview, offset: int) -> int:
        num_bytes = self._begin(Direction.READ, memory, offset)
        with self._lock:
            # A read past the end returns no bytes, as with a file.
            part = self._data[offset : offset + num_bytes]
            memory[: len(part)] = part
        return len(part)

    def write(self, memory: memoryview, offset: int) -> int:
        num_bytes = self._begin(Direction.WRITE, memory, offset)
        with self._lock:
            num_bytes = max(0, min(num_bytes, len(self._data) - offset))
            self._data[offset : offset + num_bytes] = memory[:num_bytes]
        return num_bytes

    def max_request(self, offset: int) -> int:
        if self._stripe_bytes is None:
            return UNLIMITED
        return self._stripe_bytes - offset % self._stripe_bytes

    def describe(self, offset: int) -> str:
        return f"memory at {offset}"

    def close(self) -> None:
        self._closed = True

    def _begin(self, direction: Direction, memory: memoryview, offset: int) -> int:
        """Record the request, sleep its latency, raise its fault if it has one; return the bytes to move."""
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            request = FakeRequest(len(self._requests), direction, offset, len(memory))
            self._requests.append(request)
        seconds = self._latency(request) if callable(self._latency) else self._latency
        if seconds > 0:
            time.sleep(seconds)
        for fault in self._faults:
            if fault.matches(request):
                raise OSError(fault.error_number, os.strerror(fault.error_number))
        if self._transfer is None:
            return len(memory)
        num_bytes = self._transfer(request) if callable(self._transfer) else self._transfer
        return min(num_bytes, len(memory))
