"""ZeRO's memory and communication (arXiv 1910.02054), as its equations have them. Pure.

A parameter Psi trained in mixed precision with Adam takes 2 bytes for itself, 2 for its gradient and K = 12 for the
optimizer's states (float32 copy, momentum, variance); each stage splits one more of the three over the N_d ranks.
GB are 1e9 bytes in that paper.
"""

from __future__ import annotations

from zero_infinity.policy.zero_stage import ZeroStage

PARAMETER_BYTES = 2
GRADIENT_BYTES = 2
OPTIMIZER_BYTES = 12  # K: float32 master copy, momentum and variance


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
