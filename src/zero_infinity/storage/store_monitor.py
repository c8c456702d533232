"""The monitor of a block store: one lock for all its parts, the first error, and the wake-up of waiting threads.

It does not know what is waited for; `block_waits` does.
"""

from __future__ import annotations

import threading

from zero_infinity.errors import again


class StoreMonitor:
    """`with monitor.lock:` protects every field of the store, its parts and its blocks. The lock is reentrant."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.error: BaseException | None = None
        self.num_events = 0  # changes so far: a waiting thread sees by it whether anything still happens

    def check(self) -> None:
        """Raise the error that the store failed with, if any."""
        if self.error is not None:
            raise again(self.error)

    def fail(self, error: BaseException) -> None:
        """Let everyone who waits, now or later, get `error`, unless there was an earlier one."""
        with self.lock:
            if self.error is None:
                self.error = error
            self.notify()

    def notify(self) -> None:
        """Something changed: wake waiting threads. The lock is held."""
        self.num_events += 1
        self.lock.notify_all()
