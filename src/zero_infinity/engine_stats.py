"""Counters of a prepared model: bytes held, bytes moved, waiting times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from zero_infinity.byte_sizes import format_bytes, format_seconds
from zero_infinity.comm.channel import Traffic
from zero_infinity.model_layout import ModelLayout
from zero_infinity.params.parameter_store import ParameterStore
from zero_infinity.policy.state_shares import state_shares


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot; subtract two to see what happened between them."""

    num_steps: int
    num_parameters: int
    state_bytes: int  # parameters, optimizer states and master weights: the sum of the next three
    device_state_bytes: int  # that live in device memory
    ram_state_bytes: int  # that live in host memory, or stay there as long as the cache has room for all
    nvme_state_bytes: int  # the rest
    memory_budget: int
    memory_held: int
    memory_peak: int
    swap_bytes: int  # reserved on NVMe
    bytes_read: int  # from NVMe into host memory
    bytes_read_directly: int  # from NVMe into device memory, past the host
    bytes_written: int  # to NVMe: this wears the drive
    read_requests: int
    write_requests: int
    waited_seconds: float  # time that the compute thread waited for a block or for the update worker
    io_busy_seconds: float  # time with at least one request in flight
    num_deviations: int  # accesses out of the recorded order
    pending_updates: int  # that the worker has not finished yet
    # What this rank stores, by kind, and its buffers for collectives.
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    bucket_bytes: int
    copy_bytes: int  # for copies of parameters on the compute device
    activation_bytes: int  # blocks for saved tensors, in use or free
    device_budget: int  # bytes of the accelerator for the cache: device_memory, or what was learnt
    device_others: int  # the most that everything else took there at once, as far as it was measured
    # Bytes and number of exchanges that this rank has sent, by kind. Empty on one rank.
    sent_bytes: dict[str, int]
    num_exchanges: dict[str, int]

    @property
    def homes(self) -> str:
        """Where the states are, such as "5% device, 55% RAM, 40% NVMe"."""
        parts = ((self.device_state_bytes, "device"), (self.ram_state_bytes, "RAM"), (self.nvme_state_bytes, "NVMe"))
        return ", ".join(f"{num_bytes / max(1, self.state_bytes):.0%} {name}" for num_bytes, name in parts if num_bytes)

    def _repr_html_(self) -> str:
        """A table for notebooks, without what is zero or empty."""
        rows = []
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, dict):
                value = ", ".join(f"{kind} {_shown(name, number)}" for kind, number in value.items())
            if value:
                rows.append(
                    f"<tr><th>{name}</th><td>{value if isinstance(value, str) else _shown(name, value)}</td></tr>"
                )
        return f"<table><caption>homes: {self.homes}</caption>{''.join(rows)}</table>"


def _shown(name: str, value: float) -> str:
    """A figure with its unit, which its name tells."""
    if name.endswith("seconds"):
        return format_seconds(value)
    is_bytes = "bytes" in name or name.startswith(("memory_", "device_"))
    return format_bytes(int(value)) if is_bytes else f"{value:,}"


def collect_stats(
    parameter_store: ParameterStore,
    layout: ModelLayout,
    *,
    num_steps: int,
    traffics: Iterable[Traffic],
    activation_bytes: int,
    bytes_read_directly: int,
    device_budget: int,
    device_others: int,
) -> Stats:
    """Return what is held and what was done so far."""
    store, host_cache = parameter_store.store, parameter_store.host_cache
    counters = store.engine.counters() if store.engine is not None else None
    store.pool.collect()
    sent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for traffic in traffics:
        more_sent, more_calls = traffic.snapshot()
        sent.update(more_sent)  # adds up
        calls.update(more_calls)
    sizes = layout.sizes
    homes = [layout.homes[unit] for unit in layout.units]
    shares = state_shares(sizes, homes, layout.placement)
    return Stats(
        num_steps=num_steps,
        num_parameters=sum(p.num_elements for p in layout.managed.values()),
        state_bytes=sum(size.parameters + size.record for size in sizes),
        device_state_bytes=shares.device,
        ram_state_bytes=shares.ram,
        nvme_state_bytes=shares.nvme,
        memory_budget=store.pool.budget,
        memory_held=store.pool.held_bytes,
        memory_peak=store.pool.peak_bytes,
        swap_bytes=layout.placement.swap,
        bytes_read=counters.bytes_read if counters else 0,
        bytes_read_directly=bytes_read_directly,
        bytes_written=counters.bytes_written if counters else 0,
        read_requests=counters.read_requests if counters else 0,
        write_requests=counters.write_requests if counters else 0,
        waited_seconds=parameter_store.compute_thread.waited_seconds,
        io_busy_seconds=counters.busy_seconds if counters else 0.0,
        num_deviations=host_cache.policy.num_deviations,
        pending_updates=parameter_store.update_worker.num_pending,
        parameter_bytes=sum(size.parameters for size in sizes),
        gradient_bytes=sum(size.gradients for size in sizes),
        optimizer_bytes=sum(size.record for size in sizes),
        bucket_bytes=2 * layout.bucket_bytes,
        copy_bytes=layout.copies,
        activation_bytes=activation_bytes,
        device_budget=device_budget,
        device_others=device_others,
        sent_bytes=dict(sent),
        num_exchanges=dict(calls),
    )
