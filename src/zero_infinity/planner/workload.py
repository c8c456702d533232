"""A model, the machine that it is trained on, and the job: what a plan is about, and what follows by arithmetic alone.

Knows nothing of where states live. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_infinity.errors import ConfigError
from zero_infinity.planner.hardware import Hardware
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.training_job import TrainingJob
from zero_infinity.policy.partition import RankPartition


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
