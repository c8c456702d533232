"""An I/O engine over a scripted device whose requests can be held back, for tests."""

from __future__ import annotations

import threading

from support.fake_device import FakeDevice, FakeRequest
from support.patience import SECONDS, wait_until
from zero_infinity.storage.io_engine import IOEngine, IOTicket
from zero_infinity.storage.io_types import Direction, Priority

READ, WRITE = Direction.READ, Direction.WRITE
DEMANDED, PREFETCH, WRITE_BACK = Priority.DEMANDED, Priority.PREFETCH, Priority.WRITE_BACK
PAGE = 4096


class IOBench:
    """An engine over a scripted device whose requests are held until `open` is called (when `held`)."""

    def __init__(
        self, *, num_threads: int = 1, request_bytes: int = PAGE, pages: int = 64, held: bool = True, **script: object
    ) -> None:
        self.gate = threading.Event()
        if not held:
            self.gate.set()
        self.device = FakeDevice(latency=self._hold, **script)  # type: ignore[arg-type]
        self.engine = IOEngine(self.device, num_threads, request_bytes)
        self.engine.reserve(pages * PAGE)

    def _hold(self, request: FakeRequest) -> float:
        self.gate.wait(SECONDS)
        return 0.0

    def submit(
        self, direction: Direction, page: int, num_pages: int = 1, priority: Priority = PREFETCH, fill: int = 0
    ) -> IOTicket:
        memory = memoryview(bytearray([fill]) * (num_pages * PAGE))
        return self.engine.submit(direction, memory, page * PAGE, priority)

    def plug(self, num_requests: int = 1) -> list[IOTicket]:
        """Occupy the workers with reads at the end of the space, so that what follows stays queued."""
        last = self.engine.capacity // PAGE - 1
        tickets = [self.submit(READ, last - index, priority=DEMANDED) for index in range(num_requests)]
        wait_until(lambda: len(self.device.requests) == num_requests)
        return tickets

    def pages(self) -> list[int]:
        return [request.offset // PAGE for request in self.device.requests]
