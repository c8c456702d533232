"""Waiting for blocks: a thread blocks until a condition on one block holds, the store fails, or the wait is stuck.

Owns the wait loop. What is waited for is the caller's condition; whether a wait can still end is decided by
`DeadlockDetector`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from zero_infinity.errors import UsageError
from zero_infinity.interrupts import through
from zero_infinity.storage.block import Block
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.deadlock import DeadlockDetector
from zero_infinity.storage.io_types import Priority
from zero_infinity.storage.store_monitor import StoreMonitor

# How often a waiting thread looks for tensors that have died: their finalizers may not wake anyone.
_POLL_SECONDS = 0.001


class BlockWaits:
    """Waits on the blocks of one store."""

    def __init__(self, pool: BufferPool, monitor: StoreMonitor, detector: DeadlockDetector) -> None:
        self._pool = pool
        self._monitor = monitor
        self._detector = detector

    def wait(self, block: Block, condition: Callable[[Block], bool], *, unless_failed: bool = False) -> None:
        """Wait for `condition`, which is called under the lock. A block that is waited for is demanded.

        `unless_failed`: return if the store has failed, instead of raising its error.
        """
        thread = threading.get_ident()
        with self._monitor.lock:
            if self._monitor.error is None and condition(block):
                return  # the common case: nothing to wait for
            self._detector.begin_wait(thread)
        try:
            self._poll(block, condition, unless_failed=unless_failed)
        finally:
            with self._monitor.lock:
                self._detector.end_wait(thread)

    def _poll(self, block: Block, condition: Callable[[Block], bool], *, unless_failed: bool) -> None:
        monitor, detector = self._monitor, self._detector
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
                if last_event != monitor.num_events or not detector.is_stuck(block):
                    idle_since, last_event = time.monotonic(), monitor.num_events
                patience = detector.patience_seconds
            if time.monotonic() - idle_since > patience:
                raise detector.describe(block)


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
