"""ZeRO's memory and communication (arXiv 1910.02054), as its equations have them. Pure.

A parameter Psi trained in mixed precision with Adam takes 2 bytes for itself, 2 for its gradient and K = 12 for the
optimizer's states (float32 copy, momentum, variance); each stage splits one more of the three over the N_d ranks.
GB are 1e9 bytes in that paper. Besides model states (ZeRO-R, sections 3.2 and 6): activations and the buffers that
collectives flatten gradients into.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero_infinity.policy.zero_stage import ZeroStage

PARAMETER_BYTES = 2
GRADIENT_BYTES = 2
OPTIMIZER_BYTES = 12  # K: float32 master copy, momentum and variance
HALF_BYTES = 2
SINGLE_BYTES = 4


def state_bytes_per_parameter(stage: ZeroStage, num_ranks: int) -> float:
    """Bytes of model states that one device holds, per parameter of the model."""
    kinds = (
        (OPTIMIZER_BYTES, stage.shards_optimizer),
        (GRADIENT_BYTES, stage.shards_gradients),
        (PARAMETER_BYTES, stage.shards_parameters),
    )
    return sum(size / num_ranks if is_sharded else size for size, is_sharded in kinds)


def state_bytes(num_parameters: float, stage: ZeroStage, num_ranks: int) -> float:
    """Bytes of model states on one device (figure 1, table 1)."""
    return num_parameters * state_bytes_per_parameter(stage, num_ranks)


def largest_model(device_bytes: float, stage: ZeroStage, num_ranks: int, model_parallel: int = 1) -> float:
    """Parameters whose states fill devices of `device_bytes` (table 2). `num_ranks` counts data-parallel ranks."""
    return model_parallel * device_bytes / state_bytes_per_parameter(stage, num_ranks)


def communication_elements(num_parameters: float, stage: ZeroStage, num_ranks: int | None = None) -> float:
    """Elements that one rank sends in a step (section 7).

    The paper counts 2 Psi (3 Psi with split parameters); `num_ranks` gives what a ring really sends, (N-1)/N of it.
    """
    moves = 3 if stage.shards_parameters else 2
    ring = 1.0 if num_ranks is None else (num_ranks - 1) / num_ranks
    return moves * num_parameters * ring


def activation_bytes(hidden: int, batch: int, seq: int, layers: int) -> float:
    """All activations in 16 bits: about 12 x hidden x batch x seq x layers elements (footnote 4)."""
    return 12.0 * hidden * batch * seq * layers * HALF_BYTES


def checkpointed_activation_bytes(hidden: int, batch: int, seq: int, layers: int) -> float:
    """The same with activation checkpointing, at 33% more computation.

    The text says "roughly the square root" and 8 GB for its example. Here: the checkpoints of groups of about
    sqrt(layers) blocks, and one group's activations while it is computed again.
    """
    groups = max(1, round(math.sqrt(layers)))
    checkpoints = float(hidden) * batch * seq * groups * HALF_BYTES
    return checkpoints + activation_bytes(hidden, batch, seq, layers) / groups


def block_checkpoint_bytes(hidden: int, batch: int, seq: int, layers: int) -> float:
    """One checkpoint for each block, in 16 bits (what P_a splits)."""
    return float(hidden) * batch * seq * layers * HALF_BYTES


def fused_buffer_bytes(num_parameters: float) -> float:
    """A float32 buffer that all gradients are flattened into; constant-size buffers (C_B) avoid it."""
    return num_parameters * SINGLE_BYTES


@dataclass(frozen=True, slots=True)
class PartitionedActivations:
    """P_a: checkpoints split over the model-parallel ranks, and P_a+cpu: their shards moved to the host."""

    checkpoint_bytes: float  # of a whole replica, per model-parallel group
    model_parallel: int

    @property
    def shard_bytes(self) -> float:
        return self.checkpoint_bytes / self.model_parallel

    @property
    def communication_overhead(self) -> float:
        """Extra all-gather, against tensor slicing's own traffic: seq x hidden on 12 x seq x hidden a block."""
        return 1 / 12

    @property
    def host_traffic_bytes(self) -> float:
        """P_a+cpu moves each shard to the host and back."""
        return 2 * self.shard_bytes
