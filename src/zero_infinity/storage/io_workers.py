"""Worker threads of the I/O engine: they take requests from the queue and run them on the device.

Owns the device while workers run. The order of requests is decided by `IOQueue`.

Why threads: `preadv` and `pwritev` release the GIL for the whole transfer, so a few Python threads with requests of
megabytes reach the bandwidth that fio reaches with io_uring, at a cost of tens of µs of Python per request and without
dependencies. The worker's code under the GIL is short, because after each transfer it must reacquire the GIL from a
thread that may run Python code; many small requests would pay that wait many times.

The last worker to exit closes the device, after its last request: never while the kernel still writes into memory.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from time import perf_counter

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import TransferError, UsageError
from zero_infinity.storage.io_queue import IOQueue, IOTransfer
from zero_infinity.storage.io_types import Direction
from zero_infinity.storage.swap_device import SwapDevice
from zero_infinity.trace import STORAGE, Category, Trace

logger = logging.getLogger(__name__)

_HINTS = {
    errno.EINVAL: "the file system may not support direct I/O of this size or alignment",
    errno.ENOSPC: "the drive is full although the space was reserved, or could not be: free some space there",
    errno.EDQUOT: "the disk quota of the user is exhausted: free some space there",
    errno.EIO: "the drive reported an error: see dmesg and smartctl, and use another drive",
    errno.EBADF: "something in this process closed the descriptor of the swap file",
    errno.EFAULT: "the memory was freed during the transfer",
}


class IOWorkers:
    """State shared by the worker threads: the queue and the device. It does not refer to the engine."""

    def __init__(self, device: SwapDevice, num_workers: int, trace: Trace | None = None) -> None:
        self.queue = IOQueue()
        self.pid = os.getpid()
        self.resizing = threading.Lock()  # the device grows on one thread at a time, and not while it closes
        self._device = device
        self._trace = trace
        self._num_workers = num_workers
        self._num_left = num_workers
        self._identities: set[int] = set()

    def check_process(self) -> None:
        if os.getpid() != self.pid:
            raise UsageError(
                f"the I/O engine belongs to process {self.pid}, and this is its forked child {os.getpid()}, which has "
                f"none of its threads\n  fix:   use the engine in the parent only, or start the child with 'spawn'"
            )

    def check_may_wait(self) -> None:
        self.check_process()
        if threading.get_ident() in self._identities:
            raise UsageError(
                "wait() in a completion callback would block the I/O thread that has to run the transfer\n"
                "  fix:   wait on another thread, or add a callback to the second transfer"
            )

    def abandon(self) -> None:
        """Let the threads exit once nothing is queued. Called by a finalizer: takes no lock."""
        if os.getpid() == self.pid:
            self.queue.abandon(self._num_workers)

    def work(self) -> None:
        """The main function of a worker thread."""
        self._identities.add(threading.get_ident())
        while self._serve():
            pass
        with self.resizing:
            self._identities.discard(threading.get_ident())
            self._num_left -= 1
            if self._num_left == 0:
                self._device.close()

    def complete(self, transfers: list[IOTransfer]) -> None:
        """Run the callbacks of finished transfers, then wake waiters. No lock is held in a callback."""
        interrupt: BaseException | None = None
        for transfer in transfers:
            for callback in transfer.callbacks:
                try:
                    callback(transfer.error)
                except BaseException as error:
                    logger.error("the I/O engine stops: a completion callback failed", exc_info=error)
                    transfers.extend(self.queue.fail(error))
                    if not isinstance(error, Exception):
                        interrupt = error
            transfer.callbacks = []
            with self.queue.lock:
                transfer.completed = True
                event = transfer.event
            if event is not None:
                event.set()
        # Re-raise Ctrl-C on a user's thread (in `close`). A worker continues, to finish running requests.
        if interrupt is not None and threading.get_ident() not in self._identities:
            raise interrupt

    def _serve(self) -> bool:
        """Run one request; False when the worker should exit.

        A function of its own, so that a sleeping worker holds no reference to a transfer and its memory.
        """
        taken = self.queue.take()
        if taken is None:
            return False
        transfer, index = taken
        began = perf_counter()
        error = self._try_move(transfer, index)
        seconds = perf_counter() - began
        if self._trace is not None and error is None:
            category = Category.FETCH if transfer.direction is Direction.READ else Category.WRITE_BACK
            self._trace.span(transfer.name, category, STORAGE, began, seconds, transfer.requests[index][1])
        self.complete(self.queue.complete(transfer, index, seconds, error))
        return True

    def _try_move(self, transfer: IOTransfer, index: int) -> BaseException | None:
        offset, length = transfer.requests[index]
        start = offset - transfer.offset
        try:
            # Released before the completion is reported. No local but `part` refers to the memory: the traceback of
            # an error keeps this frame alive, and the engine keeps the error.
            with transfer.memory[start : start + length] as part:
                _move(self._device, transfer.direction, part, offset)
        except OSError as error:
            return _transfer_error(self._device, transfer.direction, offset, length, error)
        except BaseException as error:  # noqa: BLE001 - a bug in a device must reach the waiter, not end the worker
            return error
        return None


def _move(device: SwapDevice, direction: Direction, memory: memoryview, offset: int) -> None:
    """Transfer all of `memory`, resuming after short transfers."""
    transfer = device.read if direction is Direction.READ else device.write
    length = len(memory)
    done = 0
    while done < length:
        with memory[done:] as rest:
            moved = transfer(rest, offset + done)
        if not 0 <= moved <= length - done:
            raise OSError(errno.EIO, f"the device reports {moved} bytes moved of {length - done}")
        if done + moved < length:
            # Direct I/O can only resume at a multiple of the block size: repeat the incomplete block.
            moved -= moved % device.alignment
            if moved == 0:
                raise OSError(errno.EIO, f"it ended after {done} bytes (was the swap file cut short?)")
        done += moved


def _transfer_error(
    device: SwapDevice, direction: Direction, offset: int, length: int, error: OSError
) -> TransferError:
    where = device.describe(offset)
    number = error.errno or errno.EIO
    name = errno.errorcode.get(number, str(number))
    message = f"{direction.value} of {format_bytes(length)} at {where} failed: {error.strerror or error} ({name})"
    if number in _HINTS and error.strerror == os.strerror(number):
        message += f"; {_HINTS[number]}"
    result = TransferError(number, message, where)
    result.__cause__ = error
    return result
