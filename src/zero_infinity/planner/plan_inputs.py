"""From a model, a machine and a job to what the simulator works with: homes, budgets, blocks. Pure.

How a rank's memory is divided is the engine's decision, not ours: whoever simulates hands in the engine's own function,
so that a plan and a run agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zero_infinity.config import MEASURED_FRACTION
from zero_infinity.errors import CapacityError, ConfigError
from zero_infinity.planner.hardware import Hardware, HardwareTier, TierKind
from zero_infinity.planner.home_tiers import HomeTiers, StateNeed, choose_homes, slowest_homes
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.training_job import HomeRule, TrainingJob
from zero_infinity.units import format_bytes

# Gathered parameters are fetched ahead as far as this part of their room on the device reaches, as in the engine. In a
# plan of the paper's an operator that is larger is tiled, so that one tile computes while the next arrives.
DEVICE_LOOKAHEAD_SHARE = 1 / 3
# The engine cuts layers into tiles only where the model does not fit with whole ones: then so that a tile and its
# gradient take this part of the memory.
TILE_SHARE = 1 / 8
# A model of more units than this is simulated by a slice: a part of its blocks (which are alike) with the same part of
# the host's cache, and every result times the number of slices. So the largest models take seconds, too.
MAX_UNITS = 1_500


# As in the engine: parameters and chunks start at multiples of this many elements, and blocks are whole pages.
GRAIN = 64
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """What one rank keeps of a unit."""

    name: str
    num_elements: int
    parameters: int
    record: int
    gradients: int
    arriving: int  # gradients in host memory before they are used or kept
    copied: int = 0  # all ranks' parts in host memory, where the CPU computes with them


@dataclass(frozen=True, slots=True)
class PlannedDivision:
    """How the engine divides a rank's host memory."""

    resident_units: frozenset[str]  # those that never leave it
    resident: int
    set_aside: int  # for gradients
    cache: int
    lookahead: int
    chunk_bytes: int
    copies: int = 0  # for units gathered from all ranks
    buckets: int = 0  # for gradients on their way to other ranks


# Units, the rank's host memory in bytes, whether there is a slower tier, and the number of ranks.
Divide = Callable[[Sequence[UnitBytes], int, bool, int], PlannedDivision]


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything that is decided before the first step."""

    model: ModelShape  # tiled where it must be; only one slice of it, where there are several
    scale: float  # how many slices there are
    hardware: Hardware
    job: TrainingJob
    homes: HomeTiers
    units: dict[str, UnitBytes]  # of one rank
    host_memory: int  # of one rank, for the engine
    division: PlannedDivision
    device_cache: int | None  # room for gathered parameters; None where nothing is gathered or copied
    working_bytes: int  # of activations, on one device
    checkpoint_bytes: int  # of one device's batch

    @property
    def num_devices(self) -> int:
        """Of one node, that take part."""
        return self.job.devices_per_node or self.hardware.devices_per_node

    @property
    def num_ranks(self) -> int:
        return self.num_devices * self.job.num_nodes

    @property
    def gathered_bytes(self) -> int:
        """Device memory for gathered parameters, and the gradients of the tile that computes."""
        return 0 if self.device_cache is None or self.hardware.device is None else self.device_cache * 4 // 3

    @property
    def streaming_bytes(self) -> int:
        """Host memory of a node that blocks stream through, and that waiting gradients take."""
        division = self.division
        others = division.set_aside + division.copies + division.buckets
        return self.num_devices * (int(division.cache * self.scale) + others)

    @property
    def streams(self) -> bool:
        """Whether anything moves between host and a slower tier."""
        return self.parameters_stream or self.optimizer_streams or self.homes.checkpoints.kind is TierKind.STORAGE

    @property
    def one_checkpoint_bytes(self) -> int:
        """The input of one block, of one device's batch."""
        return int(self.job.states.parameter * self.job.batch * self.model.seq * self.model.hidden)

    @property
    def parameters_stream(self) -> bool:
        """Whether parameters move between host and a slower tier."""
        return self.homes.parameters.kind is TierKind.STORAGE

    @property
    def optimizer_streams(self) -> bool:
        return self.homes.optimizer.kind is TierKind.STORAGE


def prepare(model: ModelShape, hardware: Hardware, job: TrainingJob, divide: Divide) -> PlanInputs:
    """Decide where everything goes; `CapacityError` when it does not fit."""
    num_devices = job.devices_per_node or hardware.devices_per_node
    if num_devices > hardware.devices_per_node:
        raise ConfigError(f"gpus is {num_devices}, but a node of {hardware.name} has {hardware.devices_per_node}")
    num_ranks = num_devices * job.num_nodes
    checkpointed = job.interval > 0
    value_bytes = job.states.parameter
    working = value_bytes * model.working_elements(job.batch, max(1, job.interval), checkpointed=checkpointed)
    checkpoints = value_bytes * model.checkpoint_elements(job.batch, job.interval) if checkpointed else 0
    homes = _homes(model, hardware, job, num_ranks, working, checkpoints)
    try:
        return _with_homes(model, hardware, job, divide, homes, working, checkpoints)
    except CapacityError:
        # By bytes it fitted on the host, but not with the engine's own needs: then it streams.
        if homes.optimizer.kind is not TierKind.HOST or job.optimizer_on or not hardware.storage:
            raise
        storage = hardware.storage[0]
        parameters = storage if job.placement is HomeRule.ENGINE and not job.parameters_on else homes.parameters
        homes = replace(homes, optimizer=storage, parameters=parameters)
        return _with_homes(model, hardware, job, divide, homes, working, checkpoints)


def _with_homes(
    model: ModelShape,
    hardware: Hardware,
    job: TrainingJob,
    divide: Divide,
    homes: HomeTiers,
    working: int,
    checkpoints: int,
) -> PlanInputs:
    num_devices = job.devices_per_node or hardware.devices_per_node
    num_ranks = num_devices * job.num_nodes
    device_cache = _device_cache(model, hardware, job, homes, num_ranks, working, checkpoints)
    memory = _host_memory(hardware, job, homes, num_devices, working, checkpoints)
    is_paper = job.placement is HomeRule.PAPER and device_cache is not None
    most = max(1, int((device_cache or 0) * DEVICE_LOOKAHEAD_SHARE) // job.states.parameter) if is_paper else None
    part, scale = _sliced(model, most)
    if most is not None:
        part = part.tiled(most)
    try:
        division = _divide(part, scale, hardware, job, memory, device_cache, homes, divide)
    except CapacityError:
        tile_bytes = int(min(memory, device_cache or memory) * TILE_SHARE)
        most = max(1, tile_bytes // (job.states.parameter + job.states.gradient))
        whole, scale = _sliced(model, most)
        part = whole.tiled_by_rows(most)
        if part is whole:
            raise
        division = _divide(part, scale, hardware, job, memory, device_cache, homes, divide)
    if division.copies:
        device_cache = division.copies
    units = _unit_bytes(part, hardware, job)
    return PlanInputs(part, scale, hardware, job, homes, units, memory, division, device_cache, working, checkpoints)


def _sliced(model: ModelShape, most: int | None) -> tuple[ModelShape, float]:
    """Of a model with too many units (of at most so many parameters each) a part of its blocks; how many such parts."""
    num_units = sum(1 if most is None else -(-size // most) for size in model.units.values())
    if num_units <= MAX_UNITS:
        return model, 1.0
    num_blocks = max(1, model.num_blocks * MAX_UNITS // num_units)
    return model.sliced(num_blocks), model.num_blocks / num_blocks


def _unit_bytes(model: ModelShape, hardware: Hardware, job: TrainingJob) -> dict[str, UnitBytes]:
    num_ranks = (job.devices_per_node or hardware.devices_per_node) * job.num_nodes
    # A CPU of several ranks computes with copies in host memory, and makes whole gradients there.
    is_gathered = hardware.device is None and num_ranks > 1
    units: dict[str, UnitBytes] = {}
    for name, size in model.units.items():
        elements = _round_up(-(-size // num_ranks), GRAIN)
        gradients = elements * job.states.gradient
        units[name] = UnitBytes(
            name,
            elements,
            _round_up(elements * job.states.parameter, PAGE_BYTES),
            elements * job.states.record,
            gradients,
            arriving=gradients * (num_ranks + 1) if is_gathered else gradients,
            copied=_round_up(num_ranks * elements * job.states.parameter, PAGE_BYTES) if is_gathered else 0,
        )
    return units


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _homes(
    model: ModelShape, hardware: Hardware, job: TrainingJob, num_ranks: int, working: int, checkpoints: int
) -> HomeTiers:
    record = job.states.record + (0 if job.early_update else job.states.gradient)
    need = StateNeed(
        model.num_parameters * job.states.parameter, model.num_parameters * record, checkpoints * num_ranks, working
    )
    memory = job.memory if job.memory is not None else int(hardware.host.capacity * MEASURED_FRACTION)
    rule = choose_homes if job.placement is HomeRule.PAPER else slowest_homes
    homes = rule(need, hardware, job.num_nodes, memory)
    checkpoint_home = homes.checkpoints
    if job.offload_checkpoints is True:
        # The engine puts them where the states are at home; in the paper they go to the host.
        offloaded = homes.parameters if job.placement is HomeRule.ENGINE else hardware.host
        checkpoint_home = max(checkpoint_home, offloaded, key=hardware.tiers.index)
    if job.offload_checkpoints is False and hardware.device is not None:
        checkpoint_home = hardware.device
    return HomeTiers(
        _tier_named(hardware, job.parameters_on) or homes.parameters,
        _tier_named(hardware, job.optimizer_on) or homes.optimizer,
        checkpoint_home,
    )


def _tier_named(hardware: Hardware, name: str | None) -> HardwareTier | None:
    if name is None:
        return None
    for tier in hardware.tiers:
        if tier.name.lower() == name.lower():
            return tier
    raise ConfigError(f"{hardware.name} has no tier {name!r}; there are: {', '.join(t.name for t in hardware.tiers)}")


def _device_cache(
    model: ModelShape,
    hardware: Hardware,
    job: TrainingJob,
    homes: HomeTiers,
    num_ranks: int,
    working: int,
    checkpoints: int,
) -> int | None:
    """Room for gathered or copied parameters on one device; None where they are computed with where they live."""
    device = hardware.device
    if device is None or (num_ranks == 1 and homes.parameters is device):
        return None
    if job.device_memory is not None:
        if job.device_memory > device.capacity:
            raise ConfigError(
                f"device_memory is {format_bytes(job.device_memory)}, but {device.name} of {hardware.name} has "
                f"{format_bytes(device.capacity)}"
            )
        return job.device_memory
    taken = working + (checkpoints if homes.checkpoints is device else 0)
    for home, num_bytes in ((homes.parameters, job.states.parameter), (homes.optimizer, job.states.record)):
        if home is device:
            taken += model.num_parameters * num_bytes // num_ranks
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


def _host_memory(
    hardware: Hardware, job: TrainingJob, homes: HomeTiers, num_devices: int, working: int, checkpoints: int
) -> int:
    """Host bytes that one rank's engine may hold."""
    host = hardware.host
    if job.memory is not None:
        if job.memory > host.capacity:
            raise ConfigError(
                f"memory is {format_bytes(job.memory)}, but {host.name} of {hardware.name} has "
                f"{format_bytes(host.capacity)}"
            )
        return job.memory // num_devices
    others = checkpoints * num_devices if homes.checkpoints is host else 0
    if hardware.device is None:
        others += working
    return max(0, int((host.capacity - others) * MEASURED_FRACTION)) // num_devices


def _divide(
    model: ModelShape,
    scale: float,
    hardware: Hardware,
    job: TrainingJob,
    memory: int,
    device_cache: int | None,
    homes: HomeTiers,
    divide: Divide,
) -> PlannedDivision:
    """The engine divides what streams through the host; what lives there is taken off first.

    `model` is one of `scale` slices that are alike; the cache is one slice's.
    """
    units = _unit_bytes(model, hardware, job)
    num_ranks = (job.devices_per_node or hardware.devices_per_node) * job.num_nodes
    largest = max(units.values(), key=lambda unit: unit.num_elements)
    whole = largest.num_elements * num_ranks * job.states.parameter
    if device_cache is not None and whole > device_cache:
        raise CapacityError(
            f"{largest.name!r} needs {format_bytes(whole)} of device memory, but {format_bytes(device_cache)} is left "
            "for parameters\n  fix:   a smaller batch, or a device with more memory"
        )
    streams = TierKind.STORAGE in (homes.parameters.kind, homes.optimizer.kind)
    kinds = (TierKind.STORAGE,) if streams else (TierKind.HOST,)
    moving = [
        UnitBytes(
            unit.name,
            unit.num_elements,
            unit.parameters if homes.parameters.kind in kinds else 0,
            unit.record if homes.optimizer.kind in kinds else 0,
            unit.gradients if homes.optimizer.kind is not TierKind.DEVICE else 0,
            unit.arriving if homes.optimizer.kind is not TierKind.DEVICE else 0,
            unit.copied,
        )
        for unit in units.values()
    ]
    if not any(unit.parameters or unit.record for unit in moving):
        return PlannedDivision(frozenset(units), 0, 0, 0, 0, 1)
    living = 0
    if streams:
        living += sum(unit.parameters for unit in units.values()) if homes.parameters.kind is TierKind.HOST else 0
        living += sum(unit.record for unit in units.values()) if homes.optimizer.kind is TierKind.HOST else 0
    living = int(scale * living)
    if living >= memory:
        raise CapacityError(
            f"what lives in host memory takes {format_bytes(living)} a rank, but its memory is {format_bytes(memory)}\n"
            "  fix:   more memory, or a slower tier for it"
        )
    division = divide(moving, memory - living, streams, num_ranks)
    if scale > 1:
        # What stays in memory, and what is cached, is a matter of all slices; what is in use at once is not.
        shared = division.copies + division.buckets
        try:
            one = divide(moving, int((memory - living - shared) / scale) + shared, streams, num_ranks)
        except CapacityError:
            raise CapacityError(
                f"the states and what one operator needs take more than the {format_bytes(memory)} of host memory that "
                "a rank has\n  fix:   more memory, more nodes, or a slower tier"
            ) from None
        resident = int(scale * one.resident)
        # The drive rests while kept blocks are used, and afterwards has as much to fetch as is fetched ahead: to
        # be the same part of a step, both are a slice's share, but no less than what one unit needs.
        needed = max(unit.parameters + unit.record for unit in moving)
        lookahead = min(one.lookahead, max(int(division.lookahead / scale), needed))
        division = replace(
            division, resident_units=one.resident_units, resident=resident, cache=one.cache, lookahead=lookahead
        )
    return replace(division, resident=division.resident + living)
