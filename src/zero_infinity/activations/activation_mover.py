"""The thread that copies saved tensors between a device and blocks of the host, while the device computes.

It waits for blocks and for copies, so that no thread that computes does. Tasks run one after the other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from zero_infinity.interrupts import through
from zero_infinity.one_core_thread import use_one_core

# How often a thread that waits for this one checks that it is still alive.
_POLL_SECONDS = 0.1


class ActivationMover:
    """A thread for tasks that do not raise."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())  # guards what tasks and their submitters share
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="zero-infinity-activations", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a task has made it true. The lock is held."""
        while not condition() and self._thread.is_alive():
            with through():
                self.changed.wait(_POLL_SECONDS)

    def close(self) -> None:
        """End the thread after the tasks that were submitted."""
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        use_one_core()
        with torch.no_grad():
            while (task := self._tasks.get()) is not None:
                task()
                with self.changed:
                    self.changed.notify_all()
                del task  # it refers to tensors
