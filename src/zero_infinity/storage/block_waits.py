"""Waiting for blocks: until a condition holds, the store fails, or nothing that is going on can end the wait.

Owns the wait loop and the record of what goes on: held uses, threads at work, threads that wait. What is waited for is
the caller's condition.

The store cannot deadlock for a caller that keeps what it has fetched and not evicted within the budget (see
`block_store`). It can for one that holds tensors over evicted blocks: their memory is not reused. Such a wait ends with
an error that names who holds the memory, instead of a hang.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import CapacityError, UsageError
from zero_infinity.interrupts import through
from zero_infinity.storage.block import Block, Residence
from zero_infinity.storage.block_io import BlockIO
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.io_types import Priority
from zero_infinity.storage.snapshot_guard import SnapshotGuard
from zero_infinity.storage.store_monitor import StoreMonitor

# How often a waiting thread looks for tensors that have died: their finalizers may not wake anyone.
_POLL_SECONDS = 0.001
# A wait for room that nothing in flight can end is an error after this long without any event: another thread may still
# drop a tensor...
STUCK_SECONDS = 5.0
# ...or after this long while workers hold blocks that they do not use now: they may be busy elsewhere.
STUCK_WHILE_HELD_SECONDS = 30.0


class BlockWaits:
    """Waits on the blocks of one store."""

    def __init__(self, pool: BufferPool, io: BlockIO | None, monitor: StoreMonitor, snapshot: SnapshotGuard) -> None:
        self._pool = pool
        self._io = io
        self._monitor = monitor
        self._snapshot = snapshot
        self._num_holds = 0
        # By thread. One that is in both waits for room while it uses a block.
        self._using: Counter[int] = Counter()
        self._waiting: Counter[int] = Counter()

    def wait(self, block: Block, condition: Callable[[Block], bool], *, unless_failed: bool = False) -> None:
        """Wait for `condition`, which is called under the lock. A block that is waited for is demanded.

        `unless_failed`: return if the store has failed, instead of raising its error.
        """
        with self._monitor.lock:
            if self._monitor.error is None and condition(block):
                return  # the common case: nothing to wait for
        with self._counted(self._waiting):
            self._poll(block, condition, unless_failed=unless_failed)

    def wait_for_changes(self, block: Block) -> None:
        """Wait until no worker has yet to change the block; demands nothing."""
        with self._monitor.lock:
            while block.uses.has_changes():
                self._monitor.check()
                self._monitor.lock.wait(_POLL_SECONDS)

    @contextmanager
    def use(self, block: Block, condition: Callable[[Block], bool]) -> Iterator[memoryview]:
        """Wait for `condition`, then view the bytes of the block."""
        self.wait(block, condition)
        with self._counted(self._using):
            # Not a lease: the use already keeps the buffer, and a worker's view must not count as a user's tensor.
            yield block.present_buffer().view[: block.num_bytes]

    def wait_for_users(self) -> None:
        """Wait until the other threads that use a block now have ended that, but not for ever."""
        with self._monitor.lock:
            others = {thread for thread, uses in self._using.items() if uses} - {threading.get_ident()}
            self._monitor.lock.wait_for(lambda: not any(self._using[thread] for thread in others), STUCK_SECONDS)

    def count_holds(self, change: int) -> None:
        """A use was requested (1), or a requested one ended (-1). The lock is held."""
        self._num_holds += change

    def _poll(self, block: Block, condition: Callable[[Block], bool], *, unless_failed: bool) -> None:
        monitor = self._monitor
        idle_since, last_event = time.monotonic(), -1
        while True:
            self._pool.collect()
            with monitor.lock:
                if unless_failed and monitor.error is not None:
                    return
                monitor.check()
                if condition(block):
                    return
                _demand(block)
                with through():
                    monitor.lock.wait(_POLL_SECONDS)
                if last_event != monitor.num_events or not self._is_stuck(block):
                    idle_since, last_event = time.monotonic(), monitor.num_events
                patience = self._patience
            if time.monotonic() - idle_since > patience:
                raise self._stuck_error(block)

    @contextmanager
    def _counted(self, threads: Counter[int]) -> Iterator[None]:
        thread = threading.get_ident()
        with self._monitor.lock:
            threads[thread] += 1
        try:
            yield
        finally:
            with self._monitor.lock:
                threads[thread] -= 1
                self._monitor.notify()

    @property
    def _patience(self) -> float:
        return STUCK_WHILE_HELD_SECONDS if self._num_holds else STUCK_SECONDS

    def _is_stuck(self, block: Block) -> bool:
        """True if `block` waits for room and nothing that could free some is going on. The lock is held."""
        return (
            any(stay.residence is Residence.QUEUED for stay in block.stays)
            and not (self._io is not None and self._io.num_in_flight)
            and not self._snapshot.is_active
            and all(self._waiting[thread] for thread, uses in self._using.items() if uses)
        )

    def _stuck_error(self, block: Block) -> CapacityError:
        holders = sorted(self._pool.holders(), key=lambda holder: -holder[1])[:8]
        held = "".join(f"\n  held:  {format_bytes(size)} by {label}" for label, size in holders)
        return CapacityError(
            f"block {block.name!r} needs {format_bytes(block.held_bytes)}, but {format_bytes(self._pool.free_bytes)} "
            f"of {format_bytes(self._pool.budget)} are free and nothing in flight will free more{held}\n"
            "  fix:   drop the tensors that refer to these blocks, or set a larger memory=..."
        )


def _demand(block: Block) -> None:
    """Raise the priority of a block that is waited for."""
    if not block.stays:
        raise UsageError(
            f"block {block.name!r} is waited for, but it was not fetched (or was evicted since)\n"
            "  fix:   fetch it before waiting"
        )
    block.priority = Priority.DEMANDED
    if block.ticket is not None:
        block.ticket.raise_priority(Priority.DEMANDED)
