"""The asynchronous I/O engine: what callers see of it, and the checks at the door.

Owns the threads' start and end. Which request goes next is `TransferQueue`'s business, how it gets to the device is
`IOWorkers`'s, and where a byte lies is the device's.

Lifetimes: a worker refers to the workshop, never to the engine, so an engine that nobody holds is collected; its
finalizer then lets the workers do what is queued and leave.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np

from zero_infinity.errors import ConfigError
from zero_infinity.policy.sizes import ALIGNMENT
from zero_infinity.storage.io_queue import IORequest
from zero_infinity.storage.io_types import Direction, IOCounters, Priority
from zero_infinity.storage.io_workers import IOWorkers
from zero_infinity.storage.swap_device import SwapDevice
from zero_infinity.trace import Trace

NUM_THREADS = 4
REQUEST_BYTES = 8 << 20


class QueuedIOEngine:
    """An `Engine` over any `SwapDevice`, which it owns: closing the engine closes the device."""

    def __init__(
        self,
        device: SwapDevice,
        num_threads: int = NUM_THREADS,
        request_bytes: int = REQUEST_BYTES,
        trace: Trace | None = None,
    ) -> None:
        if num_threads < 1:
            raise ConfigError(f"num_threads must be 1 or more, not {num_threads}")
        if request_bytes < 1 or request_bytes % ALIGNMENT:
            raise ConfigError(f"request_bytes must be a multiple of {ALIGNMENT} above 0, not {request_bytes}")
        self._request_bytes = request_bytes
        self._device = device
        self._workshop = IOWorkers(device, num_threads, trace)
        self._threads = [
            threading.Thread(target=self._workshop.work, name=f"zero-infinity-io-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        # Not at exit: daemon threads simply end then, and the kernel frees the swap files.
        weakref.finalize(self, self._workshop.abandon).atexit = False

    @property
    def capacity(self) -> int:
        """Bytes reserved so far."""
        return self._device.capacity

    def reserve(self, num_bytes: int) -> int:
        """Grow the address space by `num_bytes`, rounded up to ALIGNMENT; the offset of the new part."""
        if num_bytes < 0:
            raise ValueError(f"cannot reserve {num_bytes} bytes")
        self._workshop.check_process()
        with self._workshop.reserving:
            self._workshop.queue.check_open()
            offset = self._device.capacity
            if num_bytes:
                self._device.extend(-(-num_bytes // ALIGNMENT) * ALIGNMENT)
        return offset

    def submit(
        self, direction: Direction, memory: memoryview, offset: int, priority: Priority, name: str = ""
    ) -> QueuedTicket:
        """Queue a transfer between `memory` and `offset`. `memory` must stay alive until the ticket is done."""
        self._workshop.check_process()
        if memory.format != "B" or memory.ndim != 1 or not memory.c_contiguous:
            memory = memory.cast("B")
        self._check(direction, memory, offset)
        transfer = IORequest(direction, memory, offset, priority, self._split(offset, len(memory)), name)
        self._workshop.queue.submit(transfer)
        return QueuedTicket(self._workshop, transfer)

    def describe(self, offset: int) -> str:
        """Where the byte at `offset` lies."""
        return self._device.describe(offset)

    def counters(self) -> IOCounters:
        """What has been done so far, as of one moment."""
        self._workshop.check_process()
        return self._workshop.queue.counters()

    def close(self) -> None:
        """Finish what runs, fail what waits, give back files and threads. Idempotent.

        Called on a worker (by a callback) it does not wait for the threads: they leave after their last request.
        """
        workshop = self._workshop
        if os.getpid() != workshop.pid:
            # A forked child has none of the threads, and its copy of the lock may be held for ever. What it can
            # give back is its copies of the descriptors, which would keep the parent's swap space alive.
            self._device.close()
            return
        workshop.settle(workshop.queue.close())
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _check(self, direction: Direction, memory: memoryview, offset: int) -> None:
        """Refuse what the device would refuse later, on another thread."""
        length = len(memory)
        if length == 0:
            raise ValueError("cannot transfer 0 bytes")
        if direction is Direction.READ and memory.readonly:
            raise ValueError("cannot read into memory that is read-only")
        if offset < 0 or offset + length > self._device.capacity:
            raise ValueError(
                f"{direction.value} of {length} bytes at offset {offset} passes the end of the swap space, which has "
                f"{self._device.capacity} bytes reserved"
            )
        alignment = self._device.alignment
        if alignment > 1:
            # numpy gives the address of read-only memory too, which ctypes does not.
            address = np.frombuffer(memory, np.uint8).ctypes.data
            for what, value in (("memory address", address), ("offset", offset), ("length", length)):
                if value % alignment:
                    raise ValueError(
                        f"{direction.value} of {length} bytes at offset {offset}: the {what} {value} is not a multiple "
                        f"of {alignment}, which direct I/O needs"
                    )

    def _split(self, offset: int, length: int) -> list[tuple[int, int]]:
        """Cut at the request size and at the device's boundaries."""
        requests: list[tuple[int, int]] = []
        stop = offset + length
        while offset < stop:
            part = min(self._request_bytes, stop - offset, self._device.max_request(offset))
            requests.append((offset, part))
            offset += part
        return requests


class QueuedTicket:
    """One submitted transfer. When `wait` returns or `done` is true, its callbacks have run."""

    __slots__ = ("_transfer", "_workshop")

    def __init__(self, workshop: IOWorkers, transfer: IORequest) -> None:
        self._workshop = workshop
        self._transfer = transfer

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is complete; raise what it failed with. Raises it to DEMANDED first."""
        transfer = self._transfer
        if not transfer.settled:
            self._workshop.check_may_wait()
            queue = self._workshop.queue
            queue.raise_priority(transfer, Priority.DEMANDED)
            with queue.lock:
                if transfer.event is None:
                    transfer.event = threading.Event()
                event = transfer.event
                if transfer.settled:
                    event.set()
            if not event.wait(timeout):
                raise TimeoutError(f"{self!r} is not complete after {timeout} s")
        if transfer.error is not None:
            # The same exception may be raised many times: start anew rather than pile up tracebacks. Where it
            # came from is in its cause.
            raise transfer.error.with_traceback(None)

    def done(self) -> bool:
        """Whether it is complete, well or not."""
        return self._transfer.settled

    def raise_priority(self, priority: Priority) -> None:
        """Let it overtake from here on; never lowers."""
        self._workshop.check_process()
        self._workshop.queue.raise_priority(self._transfer, priority)

    def cancel(self) -> bool:
        """Take it back if no byte of it has started (then `wait` raises CancelledError); False if too late."""
        self._workshop.check_process()
        transfer = self._transfer
        if not self._workshop.queue.cancel(transfer, CancelledError(f"{self!r} was cancelled")):
            return isinstance(transfer.error, CancelledError)
        self._workshop.settle([transfer])
        return True

    def add_done_callback(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call `callback(error)` once, on the completing thread, with no engine lock held (at once if done).

        An exception in it stops the engine, because whoever relies on the callback would wait for ever.
        """
        self._workshop.check_process()
        with self._workshop.queue.lock:
            if not self._transfer.finished:
                self._transfer.callbacks.append(callback)
                return
        callback(self._transfer.error)

    def __repr__(self) -> str:
        transfer = self._transfer
        return f"<{transfer.direction.value} of {transfer.stop - transfer.offset} bytes at offset {transfer.offset}>"
