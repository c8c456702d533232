"""How a model is trained on a cluster: everything besides the model and the machine. Data only."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from zero_infinity.errors import ConfigError
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
    PAPER = "paper"  # ZeRO-Infinity's section 7.1: each kind on the fastest tier with room (`home_tiers`)


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
