"""The links of one rank on a virtual clock: transfers and computations queue at them, first come, first served.

All ranks of a data-parallel job do the same thing
at the same time, so one rank is simulated, and a shared link takes the time of the bytes of all its ranks. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zero_infinity.planner.hardware import HardwareTier, TierKind
from zero_infinity.planner.plan_inputs import PlanInputs
from zero_infinity.planner.training_job import PartitionMode
from zero_infinity.trace import COMPUTE, RANKS, UPDATE, Category, Trace


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

    def restart(self) -> None:
        """Count busy seconds and bytes from now on."""
        self.busy_seconds, self.num_bytes = 0.0, 0

    def record(self, trace: Trace) -> None:
        """Trace what happens from now on."""
        self.trace = trace

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


class RankLinks:
    """The computation, the update worker and every link, each a queue on the simulation's clock."""

    def __init__(self, inputs: PlanInputs) -> None:
        self._inputs = inputs
        hardware = inputs.hardware
        self.compute = VirtualLink(COMPUTE)
        self.update_worker = VirtualLink(UPDATE)
        self.storage = {
            tier: VirtualLink(tier.name, tier.latency, tier.cpu_seconds_per_byte) for tier in hardware.storage
        }
        self._upload = VirtualLink(f"{hardware.host.name} to device", hardware.host.latency)
        self._download = VirtualLink(f"device to {hardware.host.name}", hardware.host.latency)
        self._gather = VirtualLink(RANKS, hardware.link_latency, hardware.link_cpu_seconds_per_byte)
        between = (self._upload, self._download, self._gather)
        self.links = (self.compute, *self.storage.values(), *between, self.update_worker)

    def upload(self, name: str, category: Category, ready: float, shard: int, whole: int) -> float:
        """Copy from host to device; returns when it is done."""
        return self._over_host_link(self._upload, name, category, ready, shard, whole)

    def download(self, name: str, category: Category, ready: float, shard: int, whole: int) -> float:
        """Copy from device to host; returns when it is done."""
        return self._over_host_link(self._download, name, category, ready, shard, whole)

    def collective(self, name: str, ready: float, shard: int) -> float:
        """An all-gather or a reduce-scatter: each rank receives all parts except its own."""
        num_ranks = self._inputs.num_ranks
        if num_ranks == 1:
            return ready
        num_bytes = shard * (num_ranks - 1)
        seconds = num_bytes / self._inputs.hardware.gather_link(self._inputs.job.num_nodes)
        return self._gather.occupy(name, Category.COLLECTIVE, ready, seconds, num_bytes)

    def store_checkpoint(self, name: str, ready: float, *, cached: bool) -> float:
        """Move an activation checkpoint from the device to its home, or (`cached`) only to the host's cache."""
        for link, tier in self._checkpoint_path(self._download, cached=cached):
            ready = self._move_checkpoint(link, name, ready, tier, tier.write)
        return ready

    def load_checkpoint(self, name: str, ready: float, *, cached: bool) -> float:
        for link, tier in reversed(self._checkpoint_path(self._upload, cached=cached)):
            ready = self._move_checkpoint(link, name, ready, tier, tier.read)
        return ready

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that all transfers so far have taken on one rank."""
        return sum(link.cpu_seconds for link in self.links)

    def _over_host_link(
        self, link: VirtualLink, name: str, category: Category, ready: float, shard: int, whole: int
    ) -> float:
        """A shard over every device's link at once, or the whole unit over its owner's link."""
        host = self._inputs.hardware.host
        if self._inputs.job.partition is PartitionMode.OWNER:
            return link.occupy(name, category, ready, whole / host.one_device, whole)
        rate = host.read if link is self._upload else host.write
        return link.occupy(name, category, ready, self._shared_seconds(shard, host, rate), shard)

    def _checkpoint_path(self, host_link: VirtualLink, *, cached: bool) -> list[tuple[VirtualLink, HardwareTier]]:
        """The hops from the computing device to where checkpoints live; none if that is the same memory."""
        home, hardware = self._inputs.homes.checkpoints, self._inputs.hardware
        if home.kind is TierKind.DEVICE:
            return []
        path = [(host_link, hardware.host)] if hardware.device is not None else []
        return [*path, (self.storage[home], home)] if home.kind is TierKind.STORAGE and not cached else path

    def _move_checkpoint(self, link: VirtualLink, name: str, ready: float, tier: HardwareTier, rate: float) -> float:
        inputs = self._inputs
        num_bytes = inputs.workload.one_checkpoint_bytes
        return link.occupy(name, Category.ACTIVATION, ready, self._shared_seconds(num_bytes, tier, rate), num_bytes)

    def _shared_seconds(self, num_bytes: int, tier: HardwareTier, rate: float) -> float:
        return max(num_bytes * self._inputs.num_devices / rate, num_bytes / tier.one_device)
