"""The compute thread's share of optimizer updates, and the time it spends waiting.

On a CPU the model and the optimizer share the cores. Two rules decide which of them runs, and both live here:
- When the compute thread *passes by* (it reads a unit, or autograd delivers a gradient), it first runs the updates
  whose bytes are in memory, on all cores.
- While it *waits* for a transfer, the update worker runs them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from zero_infinity.run_trace import RunTrace
from zero_infinity.tiers.update_worker import UpdateWorker


class ComputeThread:
    """The compute thread of one model, and its total waiting time."""

    def __init__(self, update_worker: UpdateWorker, run_trace: RunTrace | None) -> None:
        self._update_worker = update_worker
        self._run_trace = run_trace
        self.waited_seconds = 0.0  # the exposed wait that stats report
        self._waiting_since: float | None = None

    def pass_by(self) -> None:
        """Run the updates that are ready, unless they are reserved for the worker."""
        self._update_worker.help()

    def seconds_of_wait(self) -> float:
        """How long it has been waiting now; for any thread."""
        since = self._waiting_since
        return time.perf_counter() - since if since is not None else 0.0

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """The compute thread waits for `name` inside this context."""
        self._update_worker.take_over()
        start = self._waiting_since = time.perf_counter()
        try:
            yield
        finally:
            self._waiting_since = None
            seconds = time.perf_counter() - start
            self.waited_seconds += seconds
            if self._run_trace is not None:
                self._run_trace.waited(name, start, seconds)
