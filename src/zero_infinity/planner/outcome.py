"""The result of a simulation: time, waits, traffic and held bytes of one steady step. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

    def extended(self, shorter: SimulatedStep, number: int) -> SimulatedStep:
        """This step with so many more backward passes, each of which adds what this one has more than `shorter`."""

        def more(name: str) -> float:
            return float(getattr(self, name)) + number * float(getattr(self, name) - getattr(shorter, name))

        waits = {
            name: max(0.0, seconds + number * (seconds - shorter.waits.get(name, 0.0)))
            for name, seconds in self.waits.items()
        }
        traffic = tuple(
            LinkTraffic(
                link.link,
                link.num_bytes + number * (link.num_bytes - less.num_bytes),
                link.busy_seconds + number * (link.busy_seconds - less.busy_seconds),
            )
            for link, less in zip(self.traffic, shorter.traffic, strict=True)
        )
        return replace(
            self,
            seconds=more("seconds"),
            forward_seconds=more("forward_seconds"),
            backward_seconds=more("backward_seconds"),
            compute_seconds=more("compute_seconds"),
            engine_seconds=more("engine_seconds"),
            read_bytes=int(more("read_bytes")),
            written_bytes=int(more("written_bytes")),
            flops=more("flops"),
            tokens=more("tokens"),
            waits=waits,
            traffic=traffic,
        )

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
