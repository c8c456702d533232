"""From a model, a machine and a job to what the simulator works with: homes, budgets, sizes of units. Pure.

Owns the order of decisions: homes first, then memory; tiles only if whole layers do not fit; a slice of a model that is
too large to simulate. How host memory is divided is decided in `host_division`, with the engine's own arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.config import MEASURED_FRACTION
from zero_infinity.errors import CapacityError, ConfigError
from zero_infinity.planner.hardware import Hardware, HardwareTier, TierKind
from zero_infinity.planner.host_division import HostPlan, divide_host, states_on_rank, stored_elements, unit_sizes
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.state_tiers import HomeTiers, StateNeed, choose_homes, slowest_homes
from zero_infinity.planner.training_job import HomeRule, TrainingJob, Workload
from zero_infinity.planner.unit_states import UnitStates
from zero_infinity.policy.homes import Home
from zero_infinity.policy.lookahead import copy_lookahead
from zero_infinity.policy.memory_budget import MemoryDivision
from zero_infinity.policy.tile_sizes import default_tile_bytes
from zero_infinity.policy.unit_sizes import UnitSize

# A model of more units than this is simulated by a slice: a part of its blocks (which are alike) with the same part of
# the host's cache, and every result times the number of slices. So the largest models take seconds, too.
MAX_UNITS = 1_500


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything that is decided before the first step."""

    workload: Workload
    model: ModelShape  # the workload's, tiled if it must be; only one slice of it, if there are several
    scale: float  # how many slices there are
    homes: HomeTiers
    elements: dict[str, int]  # of each unit, that one rank stores
    states: dict[str, UnitStates]  # of each unit, that one rank updates
    units: dict[str, UnitSize]  # of one rank
    host: HostPlan  # of one rank
    device_cache: int | None  # room for gathered parameters; None if nothing is gathered or copied

    def with_accumulation(self, number: int) -> PlanInputs:
        """The same with another number of backward passes in a step, and the same places."""
        return replace(self, workload=replace(self.workload, job=replace(self.job, accumulation=number)))

    @property
    def hardware(self) -> Hardware:
        return self.workload.hardware

    @property
    def job(self) -> TrainingJob:
        return self.workload.job

    @property
    def num_devices(self) -> int:
        """Devices of one node that take part."""
        return self.workload.num_devices

    @property
    def num_ranks(self) -> int:
        return self.workload.num_ranks

    @property
    def division(self) -> MemoryDivision:
        return self.host.division

    @property
    def resident_units(self) -> frozenset[str]:
        """Units that never leave host memory."""
        homes = zip(self.units, self.division.homes, strict=True)
        return frozenset(name for name, home in homes if home is Home.RAM)

    def shard_bytes(self, unit: str) -> int:
        """What one rank stores of a unit's parameters."""
        return self.elements[unit] * self.states[unit].widths.parameter

    def whole_bytes(self, unit: str) -> int:
        """A unit's parameters."""
        shares = self.num_ranks if self.workload.sharding.shards_parameters else 1
        return self.shard_bytes(unit) * shares

    def gradient_bytes(self, unit: str) -> int:
        """What one rank gets of a unit's gradient, as it is sent: in the dtype of the parameters."""
        states = self.states[unit]
        return states.gradient_elements * states.widths.parameter

    def product_seconds(self, unit: str, num_elements: int) -> float:
        """Of the matrix products in an update of so many elements, on the cores of the host."""
        states, hardware = self.states[unit], self.hardware
        rate = hardware.host_flops or (hardware.flops if hardware.device is None else None)
        if not states.flops or rate is None:
            return 0.0
        return states.flops * num_elements / states.gradient_elements * self.num_devices / rate

    @property
    def gathered_bytes(self) -> int:
        """Device memory for gathered parameters, and the gradients of the tile that computes."""
        return 0 if self.device_cache is None or self.hardware.device is None else self.device_cache * 4 // 3

    @property
    def streaming_bytes(self) -> int:
        """Host memory of a node that blocks stream through and waiting gradients take."""
        others = self.division.set_aside + self.host.buffers.total
        return self.num_devices * (int(self.division.cache * self.scale) + others)

    @property
    def streams(self) -> bool:
        """True if anything moves between the host and a slower tier."""
        return self.parameters_stream or self.optimizer_streams or self.homes.checkpoints.kind is TierKind.STORAGE

    @property
    def parameters_stream(self) -> bool:
        """True if parameters move between the host and a slower tier."""
        return self.homes.parameters.kind is TierKind.STORAGE

    @property
    def optimizer_streams(self) -> bool:
        """True if optimizer states move between the host and a slower tier."""
        return self.homes.optimizer.kind is TierKind.STORAGE


def prepare(model: ModelShape, hardware: Hardware, job: TrainingJob) -> PlanInputs:
    """Decide where everything goes; `CapacityError` if it does not fit."""
    workload = Workload(model, hardware, job)
    homes = _homes(workload)
    try:
        return _with_homes(workload, homes)
    except CapacityError:
        # The states fit on the host by their bytes, but not with what the engine needs besides: then they stream.
        if homes.optimizer.kind is not TierKind.HOST or job.optimizer_on or not hardware.storage:
            raise
        storage = hardware.storage[0]
        parameters = storage if job.placement is HomeRule.ENGINE and not job.parameters_on else homes.parameters
        return _with_homes(workload, replace(homes, optimizer=storage, parameters=parameters))


def _with_homes(workload: Workload, homes: HomeTiers) -> PlanInputs:
    widths = workload.job.states
    device_cache = _device_cache(workload, homes)
    memory = _host_memory(workload, homes)
    most = None
    if workload.job.placement is HomeRule.PAPER and device_cache is not None:
        # The paper tiles every operator that is larger than what is fetched ahead: one tile computes while the next
        # one arrives.
        most = max(1, copy_lookahead(device_cache, on_device=False) // widths.parameter)
    part, scale = _sliced(workload.model, most)
    if most is not None:
        part = part.tiled(most)
    try:
        host = _divided(part, scale, workload, homes, memory, device_cache)
    except CapacityError:
        # As the engine does: tiles of rows, only if whole layers do not fit.
        tile_bytes = default_tile_bytes(min(memory, device_cache or memory))
        most = max(1, tile_bytes // (widths.parameter + widths.gradient))
        whole, scale = _sliced(workload.model, most)
        part = whole.tiled_by_rows(most)
        if part is whole:
            raise
        host = _divided(part, scale, workload, homes, memory, device_cache)
    elements, states = stored_elements(part, workload), states_on_rank(part, workload)
    units, cache = unit_sizes(part, workload), host.buffers.copies or device_cache
    return PlanInputs(workload, part, scale, homes, elements, states, units, host, cache)


def _divided(
    model: ModelShape, scale: float, workload: Workload, homes: HomeTiers, memory: int, device_cache: int | None
) -> HostPlan:
    if device_cache is not None:
        _check_device_room(model, workload, device_cache)
    return divide_host(model, scale, workload, homes, memory)


def _check_device_room(model: ModelShape, workload: Workload, device_cache: int) -> None:
    states = states_on_rank(model, workload)
    sizes = {n: workload.padded(num) * states[n].widths.parameter for n, num in model.units.items()}
    name, whole = max(sizes.items(), key=lambda item: item[1])
    if whole > device_cache:
        raise CapacityError(
            f"{name!r} needs {format_bytes(whole)} of device memory, but {format_bytes(device_cache)} is left "
            "for parameters\n  fix:   a smaller batch, or a device with more memory"
        )


def _sliced(model: ModelShape, most: int | None) -> tuple[ModelShape, float]:
    """A part of the blocks of a model with too many units, and how many such parts there are.

    `most`: parameters that a unit has at most, after tiling.
    """
    num_units = sum(1 if most is None else -(-size // most) for size in model.units.values())
    if num_units <= MAX_UNITS:
        return model, 1.0
    num_blocks = max(1, model.num_blocks * MAX_UNITS // num_units)
    return model.sliced(num_blocks), model.num_blocks / num_blocks


def _homes(workload: Workload) -> HomeTiers:
    hardware, job = workload.hardware, workload.job
    retains = not workload.updates_early or job.accumulation > 1
    sharding, num_ranks = workload.sharding, workload.num_ranks
    copies = 1 if sharding.shards_parameters else num_ranks
    records = 1 if sharding.shards_optimizer else num_ranks
    gradients = (1 if sharding.shards_gradients else num_ranks) if retains else 0
    need = StateNeed(
        workload.parameter_bytes * copies,
        workload.record_bytes * records + workload.retained_bytes * gradients,
        workload.checkpoint_bytes * workload.num_ranks,
        workload.working_bytes,
    )
    memory = job.memory if job.memory is not None else int(hardware.host.capacity * MEASURED_FRACTION)
    rule = choose_homes if job.placement is HomeRule.PAPER else slowest_homes
    homes = rule(need, hardware, job.num_nodes, memory)
    return HomeTiers(
        _tier_named(hardware, job.parameters_on) or homes.parameters,
        _tier_named(hardware, job.optimizer_on) or homes.optimizer,
        _checkpoint_home(workload, homes),
    )


def _checkpoint_home(workload: Workload, homes: HomeTiers) -> HardwareTier:
    hardware, job = workload.hardware, workload.job
    if job.offload_checkpoints is True:
        # The engine puts them where the states are at home; in the paper they go to the host.
        offloaded = homes.parameters if job.placement is HomeRule.ENGINE else hardware.host
        return max(homes.checkpoints, offloaded, key=hardware.tiers.index)
    if job.offload_checkpoints is False and hardware.device is not None:
        return hardware.device
    return homes.checkpoints


def _tier_named(hardware: Hardware, name: str | None) -> HardwareTier | None:
    if name is None:
        return None
    for tier in hardware.tiers:
        if tier.name.lower() == name.lower():
            return tier
    raise ConfigError(f"{hardware.name} has no tier {name!r}; there are: {', '.join(t.name for t in hardware.tiers)}")


def _device_cache(workload: Workload, homes: HomeTiers) -> int | None:
    """Room for gathered or copied parameters on one device; None if they are computed with where they live."""
    hardware, job, device = workload.hardware, workload.job, workload.hardware.device
    if device is None or (not workload.sharding.shards_parameters and homes.parameters is device):
        return None
    if job.device_memory is not None:
        if job.device_memory > device.capacity:
            raise ConfigError(
                f"device_memory is {format_bytes(job.device_memory)}, but {device.name} of {hardware.name} has "
                f"{format_bytes(device.capacity)}"
            )
        return job.device_memory
    taken = workload.working_bytes + (workload.checkpoint_bytes if homes.checkpoints is device else 0)
    for home, num_bytes in ((homes.parameters, workload.parameter_bytes), (homes.optimizer, workload.record_bytes)):
        if home is device:
            taken += num_bytes // workload.num_ranks
    room = device.capacity - taken
    # A gradient of the largest tile takes as much as the tile: a quarter of the room is kept for it.
    cache = room * 3 // 4
    if cache <= 0:
        raise CapacityError(
            f"one device needs {format_bytes(taken)} for activations and its share of the states, but {device.name} "
            f"has {format_bytes(device.capacity)}\n"
            "  fix:   a smaller batch or sequence, more devices, or activation checkpoints on the host"
        )
    return cache


def _host_memory(workload: Workload, homes: HomeTiers) -> int:
    """Host bytes that one rank's engine may hold."""
    hardware, memory, host = workload.hardware, workload.job.memory, workload.hardware.host
    if memory is not None:
        if memory > host.capacity:
            raise ConfigError(
                f"memory is {format_bytes(memory)}, but {host.name} of {hardware.name} has "
                f"{format_bytes(host.capacity)}"
            )
        return memory // workload.num_devices
    others = workload.checkpoint_bytes * workload.num_devices if homes.checkpoints is host else 0
    if hardware.device is None:
        others += workload.working_bytes
    return max(0, int((host.capacity - others) * MEASURED_FRACTION)) // workload.num_devices
