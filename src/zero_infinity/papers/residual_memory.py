"""ZeRO-R (arXiv 1910.02054, sections 3.2 and 6): what training takes besides model states. Pure.

Activations, the buffers that collectives flatten gradients into, and memory lost to fragmentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HALF_BYTES = 2
SINGLE_BYTES = 4


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
