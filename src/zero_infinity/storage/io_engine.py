"""The asynchronous I/O engine: submit transfers, wait for their tickets.

The engine is a linear address space over a `SwapDevice`. It grows by `reserve`; transfers are submitted against offsets
in it. This module validates transfers, splits them into requests, and starts and joins the threads. The order of
requests is decided by `IOQueue`, `IOWorkers` carries them out, and the device knows where a byte is stored.

Lifetime: worker threads refer to `IOWorkers`, never to the engine, so an unreferenced engine is garbage collected. Its
finalizer lets the workers finish what is queued and exit.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence

from zero_infinity.errors import ConfigError
from zero_infinity.policy.alignment import ALIGNMENT, round_up
from zero_infinity.storage.io_queue import IOTransfer
from zero_infinity.storage.io_types import Direction, IOCounters, Priority
from zero_infinity.storage.io_workers import IOWorkers
from zero_infinity.storage.pages import address_of
from zero_infinity.storage.swap_device import FileRange, InFiles, SwapDevice
from zero_infinity.trace import Trace

NUM_THREADS = 4
REQUEST_BYTES = 8 << 20


class IOEngine:
    """Asynchronous transfers over a `SwapDevice`, which the engine owns: closing the engine closes the device."""

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
            raise ConfigError(f"request_bytes must be a positive multiple of {ALIGNMENT}, not {request_bytes}")
        self._request_bytes = request_bytes
        self._device = device
        self._workers = IOWorkers(device, num_threads, trace)
        self._threads = [
            threading.Thread(target=self._workers.work, name=f"zero-infinity-io-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        # Not at exit: daemon threads simply end then, and the kernel frees the swap files.
        weakref.finalize(self, self._workers.abandon).atexit = False

    @property
    def thread_ids(self) -> list[int]:
        """The kernel's numbers of the worker threads."""
        return [thread.native_id for thread in self._threads if thread.native_id is not None]

    @property
    def capacity(self) -> int:
        """Size of the address space: the bytes reserved so far."""
        return self._device.capacity

    def reserve(self, num_bytes: int) -> int:
        """Grow the address space by `num_bytes`, rounded up to ALIGNMENT; return the offset of the new range."""
        if num_bytes < 0:
            raise ValueError(f"cannot reserve {num_bytes} bytes")
        self._workers.check_process()
        with self._workers.resizing:
            self._workers.queue.check_open()
            offset = self._device.capacity
            if num_bytes:
                self._device.extend(round_up(num_bytes))
        return offset

    def submit(
        self, direction: Direction, memory: memoryview, offset: int, priority: Priority, name: str = ""
    ) -> IOTicket:
        """Queue a transfer between `memory` and `offset`. `memory` must stay alive until the ticket is done.

        `name` is the owner of the bytes, for the trace.
        """
        self._workers.check_process()
        if memory.format != "B" or memory.ndim != 1 or not memory.c_contiguous:
            memory = memory.cast("B")
        self._check(direction, memory, offset)
        transfer = IOTransfer(direction, memory, offset, priority, self._split(offset, len(memory)), name)
        self._workers.queue.submit(transfer)
        return IOTicket(self._workers, transfer)

    def describe(self, offset: int) -> str:
        """Where the byte at `offset` is stored ("/mnt/nvme/... at 4096"), for error messages."""
        return self._device.describe(offset)

    def file_ranges(self, offset: int, num_bytes: int) -> Sequence[FileRange]:
        """Where these bytes are in files, for a reader beside the engine; empty if they are in none."""
        return self._device.file_ranges(offset, num_bytes) if isinstance(self._device, InFiles) else ()

    def counters(self) -> IOCounters:
        """A consistent snapshot of the counters."""
        self._workers.check_process()
        return self._workers.queue.counters()

    def close(self) -> None:
        """Finish running transfers, fail queued ones, release files and threads. Idempotent.

        Called on a worker thread (by a completion callback) it does not join the threads: they exit after their last
        request.
        """
        workers = self._workers
        if os.getpid() != workers.pid:
            # A forked child has none of the threads, and its copy of the lock may be held forever. It can only close
            # its copies of the descriptors, which would otherwise keep the parent's swap space allocated.
            self._device.close()
            return
        workers.complete(workers.queue.close())
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _check(self, direction: Direction, memory: memoryview, offset: int) -> None:
        """Reject what the device would reject later, on another thread."""
        length = len(memory)
        if length == 0:
            raise ValueError("cannot transfer 0 bytes")
        if direction is Direction.READ and memory.readonly:
            raise ValueError("cannot read into memory that is read-only")
        if offset < 0 or offset + length > self._device.capacity:
            raise ValueError(
                f"{direction.value} of {length} bytes at offset {offset} exceeds the swap space, which has "
                f"{self._device.capacity} bytes reserved"
            )
        alignment = self._device.alignment
        if alignment > 1:
            for what, value in (("memory address", address_of(memory)), ("offset", offset), ("length", length)):
                if value % alignment:
                    raise ValueError(
                        f"{direction.value} of {length} bytes at offset {offset}: the {what} {value} is not a multiple "
                        f"of {alignment}, which direct I/O requires"
                    )

    def _split(self, offset: int, length: int) -> list[tuple[int, int]]:
        """Cut a transfer at the request size and at the device's boundaries."""
        requests: list[tuple[int, int]] = []
        stop = offset + length
        while offset < stop:
            part = min(self._request_bytes, stop - offset, self._device.max_request(offset))
            requests.append((offset, part))
            offset += part
        return requests


class IOTicket:
    """One submitted transfer. Its callbacks have run when `wait` returns or `done` is true."""

    __slots__ = ("_transfer", "_workers")

    def __init__(self, workers: IOWorkers, transfer: IOTransfer) -> None:
        self._workers = workers
        self._transfer = transfer

    def wait(self, timeout: float | None = None) -> None:
        """Block until the transfer is complete; raise the error if it failed. Raises its priority to DEMANDED first.

        After `timeout` seconds: TimeoutError. The transfer continues.
        """
        transfer = self._transfer
        if not transfer.completed:
            self._workers.check_may_wait()
            queue = self._workers.queue
            queue.raise_priority(transfer, Priority.DEMANDED)
            with queue.lock:
                if transfer.event is None:
                    transfer.event = threading.Event()
                event = transfer.event
                if transfer.completed:
                    event.set()
            if not event.wait(timeout):
                raise TimeoutError(f"{self!r} is not complete after {timeout} s")
        if transfer.error is not None:
            # The same exception may be raised many times: reset the traceback, which would otherwise grow. The origin
            # is in its cause.
            raise transfer.error.with_traceback(None)

    def done(self) -> bool:
        """True if the transfer is complete, successfully or not. Unlike `wait` it does not raise the priority."""
        return self._transfer.completed

    def raise_priority(self, priority: Priority) -> None:
        """Give the transfer at least `priority`; never lowers it."""
        self._workers.check_process()
        self._workers.queue.raise_priority(self._transfer, priority)

    def add_done_callback(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call `callback(error)` once, on the completing thread, with no engine lock held (immediately if done).

        The callback must not wait for another transfer. An exception in it stops the engine, because whoever relies on
        the callback would otherwise wait forever.
        """
        self._workers.check_process()
        with self._workers.queue.lock:
            if not self._transfer.finished:
                self._transfer.callbacks.append(callback)
                return
        callback(self._transfer.error)

    def __repr__(self) -> str:
        transfer = self._transfer
        return f"<{transfer.direction.value} of {transfer.stop - transfer.offset} bytes at offset {transfer.offset}>"
