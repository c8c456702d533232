"""Where a model is trained: what every decision about it goes by, found out once, before anything is decided.

What ranks that have to decide alike decide by (the least memory of all, the speed of 16 bits) is agreed here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from zero_infinity.comm.process_group import RankGroup
from zero_infinity.config import Config
from zero_infinity.params import offloaded_param
from zero_infinity.params.parameter_store import budget_of, sharding_of
from zero_infinity.params.precision import Precision, computes_with_buffers, multiplies_fast, precision_of
from zero_infinity.params.unshard import store_of
from zero_infinity.policy.partition import Sharding
from zero_infinity.tiers.accelerator import ComputeDevice


@dataclass(frozen=True, slots=True)
class TrainingEnvironment:
    """One rank's view of them."""

    config: Config
    ranks: RankGroup | None
    sharding: Sharding
    accelerator: ComputeDevice | None
    budget: int  # host memory of this rank
    common_budget: int  # the smallest of all ranks
    is_fast: bool | None  # whether all ranks compute fast in 16 bits; None: that is each one's own affair

    @property
    def device(self) -> torch.device:
        return self.accelerator.device if self.accelerator is not None else torch.device("cpu")

    @property
    def device_memory(self) -> int | None:
        """Of the accelerator."""
        return self.config.device_memory or (self.accelerator.budget if self.accelerator is not None else None)

    @property
    def least_budget(self) -> int:
        """Of the tiers that a tile has to fit in."""
        device = self.device_memory
        return self.common_budget if device is None else min(self.common_budget, device)

    def precision_of(self, dtype: torch.dtype, module: nn.Module | None = None) -> Precision:
        """Of a parameter of `module` that the user made in `dtype`."""
        own = module is not None and computes_with_buffers(module)
        return precision_of(dtype, self.config, self.device, fast=self.is_fast, computed_as_made=own)

    def agreed(self, phase: str) -> AbstractContextManager[None]:
        """What one rank fails with in here, all fail with."""
        return self.ranks.agreed(phase) if self.ranks is not None else nullcontext()


def environment_of(
    model: nn.Module, config: Config, accelerator: ComputeDevice | None, ranks: RankGroup | None
) -> TrainingEnvironment:
    """Of a model that is about to be prepared; what `zi.init` has found out before still holds."""
    hosts = {store_of(managed) for p in model.parameters() if (managed := offloaded_param.managed(p)) is not None}
    ranks = next((host.ranks for host in hosts if host.ranks is not None), ranks)
    # Asked once: what is available changes.
    budget = min((host.store.pool.budget for host in hosts), default=0) or budget_of(config, ranks)
    common = budget if ranks is None else ranks.smallest("the memory of zi.prepare", budget)
    is_fast = None
    stored = config.param_dtype
    if ranks is not None and stored is not None and stored != "float32" and config.compute_dtype is None:
        device = accelerator.device if accelerator is not None else torch.device("cpu")
        fast = multiplies_fast(getattr(torch, stored), device)
        is_fast = bool(ranks.smallest("the speed of 16-bit computation", fast))
    return TrainingEnvironment(config, ranks, sharding_of(config, ranks), accelerator, budget, common, is_fast)
