"""What transfers and computations queue at: links on a virtual clock, first come, first served. Pure.

All ranks of a data-parallel job do the same at the same time, so one rank is simulated and a link that a node's devices
share takes what all of them send: its time for one rank's bytes is that of all ranks' bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zero_infinity.trace import Category, Trace


@dataclass(slots=True)
class VirtualLink:
    """A resource that does one thing after the other."""

    name: str
    latency: float = 0.0  # until the bytes are there; does not keep the link busy
    cpu_seconds_per_byte: float = 0.0
    free_at: float = 0.0
    busy_seconds: float = 0.0
    num_bytes: int = 0  # of one rank
    cpu_seconds: float = 0.0  # of one rank's cores
    trace: Trace | None = field(default=None, repr=False)

    def occupy(self, name: str, category: Category, ready: float, seconds: float, num_bytes: int = 0) -> float:
        """Take the link for `seconds` as soon as it is free, not before `ready`; returns when that is done."""
        start = max(ready, self.free_at)
        self.free_at = start + seconds
        self.busy_seconds += seconds
        self.num_bytes += num_bytes
        self.cpu_seconds += num_bytes * self.cpu_seconds_per_byte
        if self.trace is not None and seconds:
            self.trace.span(name, category, self.name, start, seconds, num_bytes)
        return self.free_at + self.latency
