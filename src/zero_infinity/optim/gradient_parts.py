"""The objects and settings that a gradient flow is constructed with. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from zero_infinity.optim.loss_scale import LossScale
from zero_infinity.optim.state_records import StateRecord
from zero_infinity.params.unit import Unit
from zero_infinity.params.unit_values import ValueSources
from zero_infinity.run_trace import RunTrace
from zero_infinity.tiers.compute_device import ComputeDevice
from zero_infinity.tiers.host_cache import HostCache
from zero_infinity.tiers.update_worker import UpdateWorker


@dataclass(frozen=True, slots=True)
class GradientParts:
    """The objects that the gradient flow uses."""

    host_cache: HostCache
    update_worker: UpdateWorker
    sources: ValueSources
    optimizer: Optimizer
    records: dict[Unit, StateRecord]
    run_trace: RunTrace | None
    accelerator: ComputeDevice | None  # the device that computes gradients; None: the CPU
    loss_scale: LossScale | None  # what backward multiplies gradients by


@dataclass(frozen=True, slots=True)
class GradientSettings:
    """How gradients are handled."""

    reserve: int  # bytes for gradients that the update worker has not used yet
    num_backwards: int  # gradient accumulation: number of backward passes per step
    early: bool  # update during backward, where that is safe
    norms: bool  # `step()` needs the norm of each gradient
    may_lag: bool = True  # updates that `step()` decides may wait until their unit is used next
