"""Records a run's trace: the compute thread's time without gaps, and the trace file.

Owns the trace of one model. Everything that moves bytes (I/O workers, copier, channels, update worker) adds its spans
to it. This module records the compute thread, whose time is divided without gaps into computation, named by the unit
that was read last, and waits. None of this exists unless a trace is requested.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from zero_infinity.errors import ConfigError
from zero_infinity.trace import COMPUTE, HOST, PHASES, WAIT, Category, Trace

logger = logging.getLogger(__name__)

# About 35 MB, not part of the engine's budget: some hundred steps of a model with a hundred layers. The oldest events
# are dropped first.
MAX_EVENTS = 200_000

FORWARD, BACKWARD, STEP = "forward", "backward", "step"


class RunTrace:
    """The trace of one model's training."""

    def __init__(self, path: Path, budget: int, rank: int | None) -> None:
        self.trace = Trace("", {HOST: budget}, max_events=MAX_EVENTS)
        self.path = path if rank is None else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        self._pid = os.getpid()
        self._writing = threading.Lock()
        self._phase: str | None = None
        self._phase_since = 0.0
        self._unit: str | None = None  # used by the current computation
        self._since = 0.0  # start of that computation

    # ------------------------------------------------------------------ the compute thread

    def set_title(self, title: str) -> None:
        """Set the title of the report."""
        self.trace.title = title

    def begin(self, phase: str) -> None:
        """Begin a phase, which ends the previous one; does nothing inside the same phase."""
        if phase != self._phase:
            self._end()
            self._phase, self._phase_since = phase, time.perf_counter()

    def end(self, phase: str) -> None:
        """End a phase; what follows until the next one is user code."""
        if phase == self._phase:
            self._end()

    def computing(self, unit: str) -> None:
        """The following computation uses `unit`."""
        if unit != self._unit and self._phase is not None:
            now = time.perf_counter()
            self._cut(now, now)
            self._unit = unit

    def waited(self, name: str, start: float, seconds: float) -> None:
        """The thread has waited."""
        self.trace.span(name, Category.WAIT, WAIT, start, seconds)
        self._cut(start, start + seconds)

    def updated(self, start: float) -> None:
        """From `start` until now the thread ran updates, which have their own spans."""
        self._cut(start, time.perf_counter())

    def _end(self) -> None:
        now = time.perf_counter()
        self._cut(now, now)
        if self._phase is not None:
            self.trace.span(self._phase, Category.PHASE, PHASES, self._phase_since, now - self._phase_since)
        self._phase = self._unit = None

    def _cut(self, until: float, resumed: float) -> None:
        """Computation ran until `until` and continues at `resumed`."""
        if self._unit is not None and until > self._since:
            self.trace.span(self._unit, Category.COMPUTE, COMPUTE, self._since, until - self._since)
        self._since = max(resumed, self._since)

    # ------------------------------------------------------------------ the file

    def write(self) -> None:
        """Write the events recorded so far; the file is replaced atomically."""
        if os.getpid() != self._pid:
            return  # a forked child has a copy of the record, but no run
        with self._writing:
            try:
                self.trace.write(self.path)
            except OSError as error:
                raise ConfigError(f"trace: {self.path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """The run is over; no caller can handle an error here."""
        try:
            self.write()
        except ConfigError as error:
            logger.error("%s", error)
