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
from zero_infinity.planner.unit_states import UnitStates, WholeParameter
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


def stored_elements(model: ModelShape, workload: Workload) -> dict[str, int]:
    """Elements of each unit that one rank stores."""
    return {name: workload.stored_elements(size) for name, size in model.units.items()}


def states_on_rank(model: ModelShape, workload: Workload) -> dict[str, UnitStates]:
    """What one rank updates of each unit. Parameters that are updated whole count as their share of all ranks."""
    known = model.unit_states
    return {
        name: _on_rank(workload.states_of(known.get(name), workload.padded(size)), workload)
        for name, size in model.units.items()
    }


def _on_rank(states: UnitStates, workload: Workload) -> UnitStates:
    if not workload.sharding.shards_optimizer:
        return states
    share = workload.num_ranks
    wholes = [WholeParameter(w.num_elements // share, w.record // share) for w in states.wholes]
    return replace(
        states, trained=workload.shard_elements(states.trained), wholes=tuple(wholes), flops=states.flops / share
    )


def unit_sizes(model: ModelShape, workload: Workload) -> dict[str, UnitSize]:
    """Bytes of each unit on one rank."""
    states = states_on_rank(model, workload)
    return {name: _unit_size(name, size, states[name], workload) for name, size in model.units.items()}


def _unit_size(name: str, num_elements: int, states: UnitStates, workload: Workload) -> UnitSize:
    widths, sharding = states.widths, workload.sharding
    on_host = workload.hardware.device is None and sharding.is_distributed
    updated = states.gradient_elements
    trained = updated * workload.num_ranks if on_host and sharding.shards_optimizer else updated
    whole = workload.padded(num_elements)
    copied = (
        copy_bytes(whole, stored=widths.parameter, computed=widths.parameter, staged=False)
        if workload.gathers_on_host
        else 0
    )
    size = unit_size(
        name,
        UnitElements(workload.stored_elements(num_elements), trained, updated),
        widths,
        is_reduced=on_host,
        whole_gradients=sharding.keeps_whole_gradients,
        copied=copied,
    )
    return replace(size, record=states.record_bytes, num_wholes=len(states.wholes), largest_whole=states.largest_whole)


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
