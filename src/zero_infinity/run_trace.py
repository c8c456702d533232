"""The record of a real run: what the computing thread does when, and the file that it ends up in.

Owns the trace of one host. Whoever moves bytes (the I/O workers, the copier, the wires, the updater) adds his own spans
to it; here is the thread that trains, whose time is cut without gaps: into computation, named by the unit that was read
last, and into what it stood still for. Nothing of this exists when no trace is asked for.
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

# About 40 MB, beside the engine's budget: some hundred steps of a model with a hundred layers. The oldest go first.
MAX_EVENTS = 200_000

FORWARD, BACKWARD, STEP = "forward", "backward", "step"


class RunTrace:
    """What one model's training does, as a trace."""

    def __init__(self, path: Path, budget: int, rank: int | None) -> None:
        self.trace = Trace("", {HOST: budget}, max_events=MAX_EVENTS)
        self.path = path if rank is None else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        self._pid = os.getpid()
        self._writing = threading.Lock()
        self._phase: str | None = None
        self._phase_since = 0.0
        self._unit: str | None = None  # that is computed with
        self._since = 0.0  # from when on

    # ------------------------------------------------------------------ the computing thread

    def set_title(self, title: str) -> None:
        """What is trained, for the head of the report."""
        self.trace.title = title

    def begin(self, phase: str) -> None:
        """A phase begins, and ends the one before; nothing happens inside the same phase."""
        if phase != self._phase:
            self._end()
            self._phase, self._phase_since = phase, time.perf_counter()

    def end(self, phase: str) -> None:
        """A phase is over; what follows until the next one is the user's own code."""
        if phase == self._phase:
            self._end()

    def computing(self, unit: str) -> None:
        """What comes now is computed with `unit`."""
        if unit != self._unit and self._phase is not None:
            now = time.perf_counter()
            self._cut(now, now)
            self._unit = unit

    def waited(self, name: str, start: float, seconds: float) -> None:
        """The thread stood still."""
        self.trace.span(name, Category.WAIT, WAIT, start, seconds)
        self._cut(start, start + seconds)

    def updated(self, start: float) -> None:
        """From `start` until now the thread has updated parameters, which has spans of its own."""
        self._cut(start, time.perf_counter())

    def _end(self) -> None:
        now = time.perf_counter()
        self._cut(now, now)
        if self._phase is not None:
            self.trace.span(self._phase, Category.PHASE, PHASES, self._phase_since, now - self._phase_since)
        self._phase = self._unit = None

    def _cut(self, until: float, resumed: float) -> None:
        """Computation went on until here, and goes on from there."""
        if self._unit is not None and until > self._since:
            self.trace.span(self._unit, Category.COMPUTE, COMPUTE, self._since, until - self._since)
        self._since = max(resumed, self._since)

    # ------------------------------------------------------------------ the file

    def write(self) -> None:
        """Write what was recorded so far; the file is replaced as a whole."""
        if os.getpid() != self._pid:
            return  # a forked child has a copy of the record, not a run of its own
        with self._writing:
            try:
                self.trace.write(self.path)
            except OSError as error:
                raise ConfigError(f"trace: {self.path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """The run is over, and nobody is there to catch an error."""
        try:
            self.write()
        except ConfigError as error:
            logger.error("%s", error)
