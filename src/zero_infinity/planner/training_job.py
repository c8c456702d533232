"""How a model is trained on a cluster, and what follows from model, machine and job by arithmetic alone.

Knows nothing of where states live. Pure.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from zero_infinity.errors import ConfigError
from zero_infinity.planner.hardware import Hardware
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.policy.partition import RankPartition
from zero_infinity.policy.unit_sizes import ElementBytes


@dataclass(frozen=True, slots=True)
class StateBytes(ElementBytes):
    """Bytes per parameter of the model, by kind of state."""

    update: int  # read and written in memory by an update


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
    states: StateBytes = MIXED
    memory: int | None = None  # host bytes a node for the engine; None: what checkpoints and resident states leave
    device_memory: int | None = None  # bytes on a device for parameters; None: what activations and states leave
    interval: int = 1  # blocks between activation checkpoints; 0: nothing is computed again
    offload_checkpoints: bool | None = None  # None: when device memory is too small for them
    overlap: bool = True  # fetch ahead of use, and send gradients and checkpoints behind the computation
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

    def shard_elements(self, num_elements: int) -> int:
        """One rank's part of a unit: plans are of ZeRO stage 3, and all ranks have as much."""
        return RankPartition(self.num_ranks).padded(num_elements) // self.num_ranks

    @property
    def gathers_on_host(self) -> bool:
        """CPUs of several ranks compute with gathered copies in host memory, and make whole gradients there."""
        return self.hardware.device is None and self.num_ranks > 1

    @property
    def working_bytes(self) -> int:
        """Activations that exist at once on one device."""
        job = self.job
        elements = self.model.working_elements(job.batch, max(1, job.interval), checkpointed=job.interval > 0)
        return job.states.parameter * elements

    @property
    def checkpoint_bytes(self) -> int:
        """Activation checkpoints of one device's batch."""
        job = self.job
        if not job.interval:
            return 0
        return job.states.parameter * self.model.checkpoint_elements(job.batch, job.interval)

    @property
    def one_checkpoint_bytes(self) -> int:
        """The input of one block, of one device's batch."""
        return int(self.job.states.parameter * self.job.batch * self.model.seq * self.model.hidden)
