"""The result of a simulation: time, waits, traffic and held bytes of one steady step. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class LinkTraffic:
    """Traffic of one link in a step: bytes of one rank, and how long the link was busy."""

    link: str
    num_bytes: int
    busy_seconds: float


@dataclass(frozen=True)
class SimulatedStep:
    """One steady step of one rank; all ranks are alike."""

    seconds: float
    forward_seconds: float
    backward_seconds: float
    compute_seconds: float
    engine_seconds: float  # that transfers and bookkeeping take from the cores that compute
    waits: dict[str, float]  # by module
    traffic: tuple[LinkTraffic, ...]
    read_bytes: int  # from storage, of one rank
    written_bytes: int
    peak_bytes: dict[str, int]  # by tier, of one rank, over the whole run: the first step may hold most
    flops: float  # of one device
    tokens: float  # of the whole cluster
    num_ranks: int

    @cached_property
    def wait_seconds(self) -> float:
        return sum(self.waits.values())

    @property
    def flops_per_second(self) -> float:
        """Achieved by one device; recomputation counts, as in the papers."""
        return self.flops / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bottleneck(self) -> str:
        """The resource that is busy for the longest part of the step."""
        return max(self.traffic, key=lambda traffic: traffic.busy_seconds).link
