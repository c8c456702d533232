"""ZeRO's stages: which model states are sharded over ranks. Pure; does not know how a unit is cut."""

from __future__ import annotations

import enum


class ZeroStage(enum.IntEnum):
    """Each stage shards one more kind of state than the stage before. The comments have the ZeRO paper's names."""

    NONE = 0  # plain data parallelism
    OPTIMIZER = 1  # P_os
    GRADIENTS = 2  # P_os+g
    PARAMETERS = 3  # P_os+g+p

    @property
    def shards_optimizer(self) -> bool:
        return self >= ZeroStage.OPTIMIZER

    @property
    def shards_gradients(self) -> bool:
        return self >= ZeroStage.GRADIENTS

    @property
    def shards_parameters(self) -> bool:
        return self >= ZeroStage.PARAMETERS
