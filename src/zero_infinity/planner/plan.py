"""A plan: what fits where, how much bandwidth that needs, how long a step takes. Pure.

Owns no arithmetic of its own: memory comes from `plan_inputs`, time and traffic from the simulator, and required
bandwidth from the paper's equations at this machine's speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from zero_infinity.errors import CapacityError
from zero_infinity.planner.bandwidth_model import DataKind, partitioned_bandwidth, requirements
from zero_infinity.planner.calibration import TimeRange, time_range
from zero_infinity.planner.hardware import Hardware, HardwareTier, TierKind
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.outcome import SimulatedStep
from zero_infinity.planner.plan_inputs import PlanInputs, prepare
from zero_infinity.planner.simulator import simulate
from zero_infinity.planner.training_job import TrainingJob
from zero_infinity.policy.zero_stage import ZeroStage
from zero_infinity.trace import Trace

_MAX_NODES = 4096
_MIN_SEQ = 64  # shorter sequences are not suggested
_MAX_SEQ = 1 << 24  # nor longer ones

# Kinds of data on a tier whose bytes are chosen: as much as there is room for.
GATHERED = "parameters in use (device_memory)"
LEAVING = "room for gradients that leave"
STREAMING = "cache of the slower tier, gradients"


@dataclass(frozen=True, slots=True)
class TierUse:
    """Bytes on a tier by kind of data: of one device for device memory, else of one node."""

    tier: HardwareTier
    uses: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.uses.values())


@dataclass(frozen=True, slots=True)
class BandwidthNeed:
    """Bandwidth for one kind of data: needed for the target efficiency, and available."""

    data: DataKind
    target: float
    needed: float
    has: float
    overlapped: bool
    aggregate: bool

    @property
    def is_enough(self) -> bool:
        return self.has >= self.needed


@dataclass(frozen=True, slots=True)
class Plan:
    inputs: PlanInputs
    outcome: SimulatedStep
    tiers: tuple[TierUse, ...]
    needs: tuple[BandwidthNeed, ...]
    written_per_node: int  # bytes a step, to storage
    drive_life_seconds: float | None
    largest_model: int  # parameters, by states alone

    def least_bytes(self, tier: HardwareTier) -> int:
        """What must be on a tier, of one device or node: caches may be smaller, but hold one unit or the least."""
        inputs = self.inputs
        uses = dict(next(use for use in self.tiers if use.tier is tier).uses)
        if inputs.device_cache is not None and tier is inputs.hardware.device:
            largest = max((inputs.whole_bytes(name) for name in inputs.units), default=0)
            uses[GATHERED], uses[LEAVING] = largest, largest
        if tier is inputs.hardware.host and inputs.job.memory is not None:
            uses[STREAMING] = max(uses.get(STREAMING, 0), inputs.job.memory)
        elif tier is inputs.hardware.host:
            uses.pop(STREAMING, None)
        return sum(uses.values())

    @property
    def time_range(self) -> TimeRange:
        """Between which seconds a step is to be expected, and what that rests on."""
        return time_range(self.outcome.seconds, self.inputs.model, self.inputs.hardware)

    @property
    def settings(self) -> dict[str, str | int]:
        """Arguments for `zi.Config`. The user fills in where the drive is mounted."""
        inputs = self.inputs
        settings: dict[str, str | int] = {"memory": _round_size(inputs.host.memory)}
        if inputs.job.accumulation > 1:
            settings["gradient_accumulation_steps"] = inputs.job.accumulation
        if inputs.job.stage != ZeroStage.PARAMETERS:
            settings["stage"] = inputs.job.stage
        if not inputs.job.early_update:
            settings["update"] = "after_backward"
        if inputs.device_cache is not None and inputs.hardware.device is not None:
            settings["device_memory"] = _round_size(inputs.device_cache)
        if inputs.streams:
            settings["nvme"] = "/path/on/a/drive"
        if inputs.job.states.parameter < inputs.job.states.gradient:
            settings["param_dtype"] = "bfloat16"
        if inputs.job.interval == 1 and inputs.model.num_blocks:  # the engine refuses a model without blocks
            settings["checkpoint_activations"] = True
            computing = inputs.hardware.device or inputs.hardware.host
            if inputs.homes.checkpoints is not computing:
                settings["offload_activations"] = True
        return settings


def make_plan(model: ModelShape, hardware: Hardware, job: TrainingJob, trace: Trace | None = None) -> Plan:
    """Plan a job; `CapacityError` when it cannot work."""
    inputs = prepare(model, hardware, job)
    outcome = simulate(inputs, trace)
    written = outcome.written_bytes * inputs.num_devices
    return Plan(
        inputs,
        outcome,
        _tier_uses(inputs),
        _needs(inputs),
        written,
        _drive_life(inputs, written, outcome.seconds),
        largest_model(hardware, job),
    )


def largest_model(hardware: Hardware, job: TrainingJob) -> int:
    """The number of parameters whose states fill every tier."""
    num_devices = job.devices_per_node or hardware.devices_per_node
    node_bytes = sum(
        tier.capacity * (num_devices if tier.kind is TierKind.DEVICE else 1)
        for tier in hardware.tiers
        if tier.kind is not TierKind.HOST or job.memory is None
    )
    if job.memory is not None:
        node_bytes += job.memory
    retains = not job.early_update or job.accumulation > 1
    per_parameter = job.states.parameter + job.states.record + (job.states.gradient if retains else 0)
    return job.num_nodes * node_bytes // per_parameter


def alternatives(
    model: ModelShape,
    hardware: Hardware,
    job: TrainingJob,
    *,
    with_seq: Callable[[int], ModelShape] | None = None,
) -> list[str]:
    """Options that would make a job work that does not fit; each one was tried.

    `with_seq` makes the same model for a shorter sequence. A shorter one is tried if there is a long one to shorten.
    """
    found: list[str] = []
    nodes = 2 * job.num_nodes
    while nodes <= _MAX_NODES and not works(model, hardware, replace(job, num_nodes=nodes)):
        nodes *= 2
    if nodes <= _MAX_NODES:
        found.append(f"--nodes {nodes}")
    batch = math.ceil(job.batch) // 2
    while batch >= 1 and not works(model, hardware, replace(job, batch=batch)):
        batch //= 2
    if batch >= 1:
        found.append(f"--batch {batch}")
    seq = _longest_that_works(with_seq, model.seq, hardware, job) if with_seq is not None else None
    if seq is not None:
        found.append(f"--seq {seq}")
    if job.memory is not None and works(model, hardware, replace(job, memory=None)):
        found.append("no --memory: all that the machine has")
    if job.device_memory is not None and works(model, hardware, replace(job, device_memory=None)):
        found.append("no --device-memory: what activations and states leave")
    return found


def _longest_that_works(
    with_seq: Callable[[int], ModelShape], seq: int, hardware: Hardware, job: TrainingJob
) -> int | None:
    """The largest power of two below `seq` that works."""
    shorter = 1 << (min(seq, _MAX_SEQ) - 1).bit_length() - 1
    while shorter >= _MIN_SEQ and not works(with_seq(shorter), hardware, job):
        shorter //= 2
    return shorter if shorter >= _MIN_SEQ else None


def works(model: ModelShape, hardware: Hardware, job: TrainingJob) -> bool:
    """True if the job fits."""
    try:
        prepare(model, hardware, job)
    except CapacityError:
        return False
    return True


def _tier_uses(inputs: PlanInputs) -> tuple[TierUse, ...]:
    """Of the whole model, also if only a slice of it is simulated."""
    hardware, homes = inputs.hardware, inputs.homes
    uses: dict[HardwareTier, dict[str, int]] = {tier: {} for tier in hardware.tiers}
    work, sharding = inputs.workload, inputs.workload.sharding
    for name, home, num_bytes, is_shared in (
        ("parameters", homes.parameters, work.parameter_bytes, sharding.shards_parameters),
        ("optimizer states", homes.optimizer, work.record_bytes, sharding.shards_optimizer),
    ):
        each = 1 if home.kind is TierKind.DEVICE else inputs.num_devices
        uses[home][name] = -(-num_bytes * each // (inputs.num_ranks if is_shared else 1))
    each = 1 if homes.checkpoints.kind is TierKind.DEVICE else inputs.num_devices
    if inputs.workload.checkpoint_bytes:
        uses[homes.checkpoints]["activation checkpoints"] = inputs.workload.checkpoint_bytes * each
    computing = hardware.device or hardware.host
    uses[computing]["activations, working"] = inputs.workload.working_bytes
    if inputs.device_cache is not None and hardware.device is not None:
        uses[hardware.device][GATHERED] = inputs.device_cache
        uses[hardware.device][LEAVING] = inputs.gathered_bytes - inputs.device_cache
    if inputs.streaming_bytes:
        uses[hardware.host][STREAMING] = inputs.streaming_bytes
    return tuple(TierUse(tier, kinds) for tier, kinds in uses.items())


def _needs(inputs: PlanInputs) -> tuple[BandwidthNeed, ...]:
    hardware, homes, job = inputs.hardware, inputs.homes, inputs.job
    gather = hardware.gather_link(job.num_nodes) if inputs.num_ranks > 1 else math.inf
    rows = requirements(job.batch, inputs.model.seq, inputs.model.hidden, max(1, job.interval), hardware.flops)
    links = {
        DataKind.PARAMETERS: partitioned_bandwidth(inputs.num_ranks, _link(inputs, homes.parameters), gather),
        DataKind.OPTIMIZER: inputs.num_ranks * _link(inputs, homes.optimizer),
        DataKind.ACTIVATIONS: _link(inputs, homes.checkpoints),
    }
    return tuple(
        BandwidthNeed(
            row.data,
            row.target,
            row.bytes_per_second,
            links[row.data],
            job.overlap and (row.data.can_overlap or job.early_update),
            row.aggregate,
        )
        for row in rows
    )


def _link(inputs: PlanInputs, tier: HardwareTier) -> float:
    """Bytes per second from a tier to one device when all devices read at once."""
    if tier.kind is TierKind.DEVICE:
        return tier.read
    return min(tier.one_device, tier.read / inputs.num_devices)


def _drive_life(inputs: PlanInputs, written_per_node: int, seconds: float) -> float | None:
    endurances = [tier.endurance for tier in inputs.hardware.storage if tier.endurance is not None]
    if not endurances or not written_per_node:
        return None
    return sum(endurances) / written_per_node * seconds


def _round_size(num_bytes: int) -> str:
    """Rounded down to whole MiB or GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= 10 * size:
            return f"{num_bytes // size}{unit}"
    return f"{max(1, num_bytes // 2**20)}MiB"
