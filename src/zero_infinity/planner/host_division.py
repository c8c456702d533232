"""How a rank's host memory is divided in a plan, by the engine's own arithmetic (`policy/`).

Adds only what the engine has no need of: states that live on different tiers, and models simulated by a slice. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import CapacityError
from zero_infinity.planner.hardware import TierKind
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.state_tiers import HomeTiers
from zero_infinity.planner.training_job import Workload
from zero_infinity.policy.homes import Home
from zero_infinity.policy.memory_budget import MemoryDivision, SharedBuffers, place, shared_buffers
from zero_infinity.policy.unit_sizes import UnitElements, UnitSize, copy_bytes, unit_size


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The host memory of one rank."""

    memory: int  # for the engine
    buffers: SharedBuffers
    division: MemoryDivision  # of one slice of the model, where it is simulated by a slice

    @property
    def fixed_bytes(self) -> int:
        """Everything but the cache."""
        return self.division.resident + self.division.set_aside + self.buffers.total


def shard_elements(model: ModelShape, workload: Workload) -> dict[str, int]:
    """Elements of each unit on one rank."""
    return {name: workload.shard_elements(size) for name, size in model.units.items()}


def unit_sizes(model: ModelShape, workload: Workload) -> dict[str, UnitSize]:
    """Bytes of each unit on one rank."""
    return {name: _unit_size(name, shard, workload) for name, shard in shard_elements(model, workload).items()}


def _unit_size(name: str, shard: int, workload: Workload) -> UnitSize:
    states, gathered = workload.job.states, workload.gathers_on_host
    whole = shard * workload.num_ranks if gathered else shard
    copied = copy_bytes(whole, stored=states.parameter, computed=states.parameter, staged=False) if gathered else 0
    return unit_size(name, UnitElements(shard, whole, shard), states, is_reduced=gathered, copied=copied)


def divide_host(model: ModelShape, scale: float, workload: Workload, homes: HomeTiers, memory: int) -> HostPlan:
    """Divide `memory` bytes between the states that stream through the host, less what lives there.

    `model` is one of `scale` equal slices of the workload's model; the cache is one slice's.
    """
    sizes = list(unit_sizes(model, workload).values())
    streams = TierKind.STORAGE in (homes.parameters.kind, homes.optimizer.kind)
    moving = [_on_host(size, homes, TierKind.STORAGE if streams else TierKind.HOST) for size in sizes]
    if not any(size.parameters or size.record for size in moving):
        all_resident = MemoryDivision((Home.RAM,) * len(sizes), 0, 0, 0, 0, chunk_bytes=1, swap=0)
        return HostPlan(memory, SharedBuffers(), all_resident)
    living = int(scale * _living_bytes(sizes, homes)) if streams else 0
    if living >= memory:
        raise CapacityError(
            f"what lives in host memory takes {format_bytes(living)} a rank, but its memory is {format_bytes(memory)}\n"
            "  fix:   more memory, or a slower tier for it"
        )
    buffers, division = _divide(moving, memory - living, workload, streams=streams)
    if scale > 1:
        room = int((memory - living - buffers.total) / scale) + buffers.total
        try:
            _, one = _divide(moving, room, workload, streams=streams)
        except CapacityError:
            raise CapacityError(
                f"the states and what one operator needs take more than the {format_bytes(memory)} of host memory that "
                "a rank has\n  fix:   more memory, more nodes, or a slower tier"
            ) from None
        division = _of_a_slice(division, one, scale, moving)
    return HostPlan(memory, buffers, replace(division, resident=division.resident + living))


def _divide(
    sizes: list[UnitSize], memory: int, workload: Workload, *, streams: bool
) -> tuple[SharedBuffers, MemoryDivision]:
    """What `zi.prepare` would decide for a rank with these units and this much host memory."""
    at_once = max(size.copied for size in sizes)
    buffers = shared_buffers(sizes, at_once, memory, gathered=True, num_ranks=workload.num_ranks)
    return buffers, place(sizes, memory - buffers.total, [], nvme=streams)


def _on_host(size: UnitSize, homes: HomeTiers, home: TierKind) -> UnitSize:
    """The part of a unit that is at home on `home`. Gradients are on the host unless the optimizer is on the device."""
    updates_on_host = homes.optimizer.kind is not TierKind.DEVICE
    return replace(
        size,
        parameters=size.parameters if homes.parameters.kind is home else 0,
        record=size.record if homes.optimizer.kind is home else 0,
        gradients=size.gradients if updates_on_host else 0,
        arriving=size.arriving if updates_on_host else 0,
    )


def _living_bytes(sizes: list[UnitSize], homes: HomeTiers) -> int:
    """States that are at home in host memory while others stream through it."""
    parameters = sum(size.parameters for size in sizes) if homes.parameters.kind is TierKind.HOST else 0
    records = sum(size.record for size in sizes) if homes.optimizer.kind is TierKind.HOST else 0
    return parameters + records


def _of_a_slice(whole: MemoryDivision, one: MemoryDivision, scale: float, sizes: list[UnitSize]) -> MemoryDivision:
    """All slices share the resident and the cached bytes; what is in use at once is not shared."""
    # The drive rests while kept blocks are used, and afterwards has as much to fetch as is fetched ahead. For both to
    # be the same share of a step, a slice looks ahead by its share, but by no less than what one unit needs.
    needed = max(size.parameters + size.record for size in sizes)
    return replace(
        whole,
        homes=one.homes,
        resident=int(scale * one.resident),
        cache=one.cache,
        lookahead=min(one.lookahead, max(int(whole.lookahead / scale), needed)),
    )
