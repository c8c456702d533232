"""The workers' side of the I/O engine: how a request gets from the queue to the device, and the outcome back.

Owns the device while workers run. It does not decide which request goes next (`IOQueue` does).

Why threads: `preadv` and `pwritev` release the GIL for the whole transfer, so a few Python threads with requests of
megabytes reach what fio reaches with io_uring, at some tens of µs of Python a request and with nothing to install.
The worker's part under the GIL is kept short, because after each transfer it must win the GIL back from a thread that
may run Python code: many small requests would pay that wait many times.

The last worker to leave closes the device, after its last request: never while the kernel still writes into
someone's memory.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from time import perf_counter

from zero_infinity.errors import TransferError, UsageError
from zero_infinity.storage.io_queue import IOQueue, IORequest
from zero_infinity.storage.io_types import Direction
from zero_infinity.storage.swap_device import SwapDevice
from zero_infinity.trace import STORAGE, Category, Trace
from zero_infinity.units import format_bytes

logger = logging.getLogger(__name__)

_HINTS = {
    errno.EINVAL: "the file system may not allow direct I/O of this size or alignment",
    errno.ENOSPC: "the drive is full although the space was reserved, or could not be: free some space there",
    errno.EDQUOT: "the user's quota is used up: free some space there",
    errno.EIO: "the drive reported an error: see dmesg and smartctl, and use another drive",
    errno.EBADF: "something in this process closed the swap file's descriptor",
    errno.EFAULT: "the memory was freed while the transfer ran",
}


class IOWorkers:
    """What the workers share: the queue, the device, and the way a request goes from one to the other."""

    def __init__(self, device: SwapDevice, num_workers: int, trace: Trace | None = None) -> None:
        self.queue = IOQueue()
        self.pid = os.getpid()
        self.reserving = threading.Lock()  # the device grows in one thread at a time, and not while it closes
        self._device = device
        self._trace = trace
        self._num_workers = num_workers
        self._num_left = num_workers
        self._identities: set[int] = set()

    def check_process(self) -> None:
        if os.getpid() != self.pid:
            raise UsageError(
                f"the I/O engine belongs to process {self.pid}, and this is its forked child {os.getpid()}, which has "
                f"none of its threads; use the engine in the parent only, or start the child with 'spawn'"
            )

    def check_may_wait(self) -> None:
        self.check_process()
        if threading.get_ident() in self._identities:
            raise UsageError("wait() in a completion callback would block the thread that has to do the work")

    def abandon(self) -> None:
        if os.getpid() == self.pid:
            self.queue.abandon(self._num_workers)

    def work(self) -> None:
        """A worker's life."""
        self._identities.add(threading.get_ident())
        while self._serve():
            pass
        with self.reserving:
            self._identities.discard(threading.get_ident())
            self._num_left -= 1
            if self._num_left == 0:
                self._device.close()

    def settle(self, transfers: list[IORequest]) -> None:
        """Run callbacks, then wake those who wait. No lock is held in a callback."""
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
                transfer.settled = True
                event = transfer.event
            if event is not None:
                event.set()
        # Control-C on the user's own thread (cancel, close) goes on; a worker lives on to finish what runs.
        if interrupt is not None and threading.get_ident() not in self._identities:
            raise interrupt

    def _serve(self) -> bool:
        """Take one request to the device and back. A function of its own, so that nothing of it stays referenced
        (a transfer's memory above all) while the worker sleeps."""
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
        self.settle(self.queue.complete(transfer, index, seconds, error))
        return True

    def _try_move(self, transfer: IORequest, index: int) -> BaseException | None:
        offset, length = transfer.requests[index]
        try:
            # Released before anyone hears of the completion. And no local but `part` refers to the memory: an
            # error's traceback keeps this frame, and the engine keeps the error.
            with _part(transfer, offset, length) as part:
                _move(self._device, transfer.direction, part, offset)
        except OSError as error:
            return _transfer_error(self._device, transfer.direction, offset, length, error)
        except BaseException as error:  # noqa: BLE001 - a device's bug must reach who waits, not end the worker
            return error
        return None


def _part(transfer: IORequest, offset: int, length: int) -> memoryview:
    if transfer.memory is None:
        raise RuntimeError("a request of a finished transfer was taken")
    start = offset - transfer.offset
    return transfer.memory[start : start + length]


def _move(device: SwapDevice, direction: Direction, memory: memoryview, offset: int) -> None:
    """Transfer all of `memory`, going on after short transfers."""
    transfer = device.read if direction is Direction.READ else device.write
    length = len(memory)
    done = 0
    while done < length:
        with memory[done:] as rest:
            moved = transfer(rest, offset + done)
        if not 0 <= moved <= length - done:
            raise OSError(errno.EIO, f"the device reports {moved} bytes moved of {length - done}")
        if done + moved < length:
            # Direct I/O can only go on at a multiple of the block size: do the broken block again.
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
