"""The monitor: the first error counts, and every event wakes those who wait."""

from __future__ import annotations

import threading

import pytest
from support.patience import SECONDS

from zero_infinity.storage.store_monitor import StoreMonitor


def test_the_first_error_is_raised_again_each_time_without_growing() -> None:
    monitor = StoreMonitor()
    monitor.check()
    first = ValueError("first")
    monitor.fail(first)
    monitor.fail(ValueError("second"))
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            monitor.check()
    assert first.__traceback__ is None  # a copy is raised: frames would keep memory alive


def test_an_event_wakes_a_thread_that_waits() -> None:
    monitor = StoreMonitor()
    seen: list[int] = []

    def wait() -> None:
        with monitor.lock:
            monitor.lock.wait_for(lambda: monitor.num_events > 0, timeout=SECONDS)
            seen.append(monitor.num_events)

    thread = threading.Thread(target=wait)
    thread.start()
    with monitor.lock, monitor.lock:  # reentrant
        monitor.notify()
    thread.join(SECONDS)
    assert seen == [1]
