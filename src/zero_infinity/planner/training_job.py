"""How a model is trained on a cluster, and what follows from model, machine and job by arithmetic alone.

Knows nothing of where states live. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from zero_infinity.errors import ConfigError
from zero_infinity.planner.hardware import Hardware
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.unit_states import StateBytes, UnitStates
from zero_infinity.policy.partition import RankPartition, Sharding
from zero_infinity.policy.zero_stage import ZeroStage

# Everything in float32: value, momentum, variance. What a CPU without 16-bit arithmetic trains with.
SINGLE = StateBytes(parameter=4, record=8, gradient=4, update=28)
# 16-bit values, float32 master copy, momentum and variance, gradients in float32 on the host: what the engine keeps.
MIXED = StateBytes(parameter=2, record=12, gradient=4, update=30)
# As in ZeRO-Infinity's section 3: 16-bit values and gradients; float32 master, momentum, variance and gradient.
PAPER = StateBytes(parameter=2, record=16, gradient=2, update=36)


class PartitionMode(enum.StrEnum):
    """How parameters are partitioned over ranks."""

    ALL = "every parameter over all ranks"  # ZeRO-Infinity's: each rank loads a part, then all-gather
    OWNER = "every parameter on one rank"  # ZeRO-Offload's: its owner loads all of it, then broadcast


class HomeRule(enum.StrEnum):
    """The rule by which states are placed on tiers."""

    ENGINE = "engine"  # all states on the slowest tier in use; faster tiers are caches of it
    PAPER = "paper"  # ZeRO-Infinity's section 7.1: each kind on the fastest tier with room (`state_tiers`)


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One training job. `batch`: sequences per device and step; may be a fraction, as a mean over devices."""

    batch: float
    num_nodes: int = 1
    devices_per_node: int | None = None  # None: all there are
    accumulation: int = 1  # backward passes for each step, each of `batch` sequences
    stage: int = 3
    states: StateBytes = MIXED  # of units that do not say otherwise
    activation_bytes: int | None = None  # of an element that modules compute with; None: as parameters are stored
    memory: int | None = None  # host bytes a node for the engine; None: what checkpoints and resident states leave
    device_memory: int | None = None  # bytes on a device for parameters; None: what activations and states leave
    interval: int = 1  # blocks between activation checkpoints; 0: nothing is computed again
    offload_checkpoints: bool | None = None  # None: when device memory is too small for them
    overlap: bool = True  # fetch ahead of use, and send gradients and checkpoints behind the computation
    clips: bool = False  # clip by the norm of all gradients, which is known only after backward
    early_update: bool = True  # update a parameter in backward, as soon as its gradient is complete
    partition: PartitionMode = PartitionMode.ALL
    placement: HomeRule = HomeRule.ENGINE
    parameters_on: str | None = None  # a tier's name, in place of what `placement` says
    optimizer_on: str | None = None

    def __post_init__(self) -> None:
        if not self.batch > 0:
            raise ConfigError(f"batch is {self.batch:g}; accepted: a number above zero")
        if self.num_nodes < 1:
            raise ConfigError(f"nodes is {self.num_nodes}; accepted: an integer of at least 1")
        if self.devices_per_node is not None and self.devices_per_node < 1:
            raise ConfigError(f"gpus is {self.devices_per_node}; accepted: an integer of at least 1")
        if self.accumulation < 1:
            raise ConfigError(f"accumulation is {self.accumulation}; accepted: an integer of at least 1")
        if self.stage not in list(ZeroStage):
            raise ConfigError(f"stage is {self.stage}; accepted: 0, 1, 2, 3")
        if self.interval < 0:
            raise ConfigError(f"interval is {self.interval}; accepted: 0 (no recomputation) or more")


@dataclass(frozen=True, slots=True)
class Workload:
    """One training job of one model on one kind of hardware."""

    model: ModelShape
    hardware: Hardware
    job: TrainingJob

    def __post_init__(self) -> None:
        if self.num_devices > self.hardware.devices_per_node:
            raise ConfigError(
                f"gpus is {self.num_devices}, but a node of {self.hardware.name} has {self.hardware.devices_per_node}"
            )

    @property
    def num_devices(self) -> int:
        """Devices of one node that take part."""
        return self.job.devices_per_node or self.hardware.devices_per_node

    @property
    def num_ranks(self) -> int:
        return self.num_devices * self.job.num_nodes

    @property
    def sharding(self) -> Sharding:
        """What the stage does with so many ranks, seen from the first one: all have as much."""
        return Sharding(0, RankPartition(self.num_ranks), ZeroStage(self.job.stage))

    def padded(self, num_elements: int) -> int:
        """A unit's elements, so that it can be cut."""
        return RankPartition(self.num_ranks).padded(num_elements)

    def shard_elements(self, num_elements: int) -> int:
        """One rank's part of a unit."""
        return self.padded(num_elements) // self.num_ranks

    def stored_elements(self, num_elements: int) -> int:
        """What one rank stores of a unit."""
        return self.shard_elements(num_elements) if self.sharding.shards_parameters else self.padded(num_elements)

    def states_of(self, states: UnitStates | None, num_elements: int) -> UnitStates:
        """The states of a unit with so many elements that says this of itself."""
        return states if states is not None else UnitStates(self.job.states, num_elements)

    @property
    def gathers_on_host(self) -> bool:
        """CPUs of several ranks compute with gathered copies in host memory."""
        return self.hardware.device is None and self.sharding.shards_parameters

    @property
    def updates_early(self) -> bool:
        """Updates run in backward, unless they wait for a norm, or (stages 1 and 2) for the step's all-gather."""
        return self.job.early_update and not self.job.clips and not self.sharding.gathers_updates

    @property
    def parameter_bytes(self) -> int:
        """Of all parameters, stored once."""
        return self._total(lambda states, num_elements: num_elements * states.widths.parameter)

    @property
    def record_bytes(self) -> int:
        """Of all optimizer states, stored once."""
        return self._total(lambda states, _: states.record_bytes)

    @property
    def retained_bytes(self) -> int:
        """Of all gradients, where they wait for the step."""
        return self._total(lambda states, _: states.gradient_elements * states.widths.gradient)

    def _total(self, num_bytes: Callable[[UnitStates, int], int]) -> int:
        known = self.model.unit_states
        units = self.model.units.items()
        return sum(num_bytes(self.states_of(known.get(name), size), size) for name, size in units)

    @property
    def activation_bytes(self) -> int:
        """Of one element that modules compute with."""
        return self.job.activation_bytes or self.job.states.parameter

    @property
    def working_bytes(self) -> int:
        """Activations that exist at once on one device."""
        batch, interval = self.job.batch, self.job.interval
        return self.model.working_bytes(
            batch, max(1, interval), checkpointed=interval > 0, element_bytes=self.activation_bytes
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Activation checkpoints of one device's batch."""
        job = self.job
        if not job.interval:
            return 0
        return self.activation_bytes * self.model.checkpoint_elements(job.batch, job.interval)

    @property
    def one_checkpoint_bytes(self) -> int:
        """The input of one block, of one device's batch."""
        return int(self.activation_bytes * self.job.batch * self.model.seq * self.model.hidden)
