"""A device slowed to a given bandwidth and latency, to emulate a slower drive, a network or an accelerator's link.

Owns the schedule of the link. The wrapped device moves the bytes, and the caller then sleeps until the link would have
delivered them. Requests of both directions queue on the one link, so all threads together get the given bandwidth.
Latency is the round trip: it adds to every request but does not occupy the link, so more requests in flight hide it, as
with a real drive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from zero_infinity.errors import ConfigError
from zero_infinity.storage.swap_device import SwapDevice


class ThrottledDevice:
    """`device`, slowed to `bytes_per_second` and `latency_seconds` per request."""

    def __init__(
        self,
        device: SwapDevice,
        bytes_per_second: float,
        latency_seconds: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_second > 0:
            raise ConfigError(f"bytes_per_second must be above 0, not {bytes_per_second}")
        if not latency_seconds >= 0:
            raise ConfigError(f"latency_seconds must not be negative: {latency_seconds}")
        self._device = device
        self._bytes_per_second = bytes_per_second
        self._latency_seconds = latency_seconds
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._link_free_at = clock()

    @property
    def capacity(self) -> int:
        return self._device.capacity

    @property
    def alignment(self) -> int:
        return self._device.alignment

    def extend(self, num_bytes: int) -> None:
        self._device.extend(num_bytes)

    def read(self, memory: memoryview, offset: int) -> int:
        began = self._clock()
        num_bytes = self._device.read(memory, offset)
        self._deliver(began, num_bytes)
        return num_bytes

    def write(self, memory: memoryview, offset: int) -> int:
        began = self._clock()
        num_bytes = self._device.write(memory, offset)
        self._deliver(began, num_bytes)
        return num_bytes

    def max_request(self, offset: int) -> int:
        return self._device.max_request(offset)

    def describe(self, offset: int) -> str:
        return self._device.describe(offset)

    def close(self) -> None:
        self._device.close()

    def _deliver(self, began: float, num_bytes: int) -> None:
        """Sleep until the link has transferred `num_bytes`, after all earlier requests."""
        with self._lock:
            # The time that the device itself took counts: the link could transfer these bytes since `began`. The
            # schedule is in absolute time, so that a sleep that overshoots does not delay the next request too.
            self._link_free_at = max(self._link_free_at, began) + num_bytes / self._bytes_per_second
            due = self._link_free_at + self._latency_seconds
        remaining = due - self._clock()
        if remaining > 0:
            self._sleep(remaining)
