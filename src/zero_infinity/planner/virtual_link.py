"""Links on a virtual clock: transfers and computations queue at them, first come, first served. Pure.

All ranks of a data-parallel job do the same thing at the same time, so one rank is simulated; callers give the time
that a shared link takes for the bytes of all its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zero_infinity.trace import Category, Trace


@dataclass(slots=True)
class VirtualLink:
    """A resource that does one thing at a time."""

    name: str
    latency: float = 0.0  # seconds until the bytes arrive; does not keep the link busy
    cpu_seconds_per_byte: float = 0.0
    free_at: float = 0.0
    busy_seconds: float = 0.0
    num_bytes: int = 0  # of one rank
    cpu_seconds: float = 0.0  # of one rank's cores
    trace: Trace | None = field(default=None, repr=False)

    def occupy(self, name: str, category: Category, ready: float, seconds: float, num_bytes: int = 0) -> float:
        """Use the link for `seconds` once it is free, not before `ready`; returns when the transfer is done."""
        start = max(ready, self.free_at)
        self.free_at = start + seconds
        self.busy_seconds += seconds
        self.num_bytes += num_bytes
        self.cpu_seconds += num_bytes * self.cpu_seconds_per_byte
        if self.trace is not None and seconds:
            self.trace.span(name, category, self.name, start, seconds, num_bytes)
        return self.free_at + self.latency
