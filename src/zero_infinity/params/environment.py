"""The training environment of a model: ranks, device, memory and precision, determined once in advance.

Values on which ranks must agree (the smallest memory of all ranks, the speed of 16-bit computation) are agreed on here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.config import Config
from zero_infinity.errors import CapacityError
from zero_infinity.params import offloaded_param
from zero_infinity.params.parameter_store import budget_of, sharding_of
from zero_infinity.params.precision import Precision, computes_with_buffers, multiplies_fast, precision_of
from zero_infinity.params.unshard import store_of
from zero_infinity.policy.partition import Sharding
from zero_infinity.tiers.compute_device import ComputeDevice
from zero_infinity.tiers.torch_accelerator import TorchAccelerator


@dataclass(frozen=True, slots=True)
class TrainingEnvironment:
    """One rank's view of the training environment."""

    config: Config
    ranks: RankGroup | None
    sharding: Sharding
    accelerator: ComputeDevice | None
    budget: int  # host memory of this rank
    common_budget: int  # the smallest of all ranks
    is_fast: bool | None  # True if 16-bit compute is fast on all ranks; None: each rank decides

    @property
    def device(self) -> torch.device:
        return self.accelerator.device if self.accelerator is not None else torch.device("cpu")

    @property
    def torch_accelerator(self) -> TorchAccelerator | None:
        """The accelerator, if it is one that torch knows."""
        return self.accelerator if isinstance(self.accelerator, TorchAccelerator) else None

    @property
    def device_memory(self) -> int | None:
        """The accelerator's memory for parameters."""
        return self.config.device_memory or self.accelerator.budget if self.accelerator is not None else None

    @property
    def least_budget(self) -> int:
        """The smallest budget of the tiers that a tile must fit in."""
        device = self.device_memory
        return self.common_budget if device is None else min(self.common_budget, device)

    def precision_of(self, dtype: torch.dtype, module: nn.Module | None = None) -> Precision:
        """Return the precision of a parameter of `module` that the user made in `dtype`."""
        own = module is not None and computes_with_buffers(module)
        return precision_of(dtype, self.config, self.device, fast=self.is_fast, computed_as_made=own)

    def agreed(self, phase: str) -> AbstractContextManager[None]:
        """If one rank fails inside this context, all ranks raise."""
        return self.ranks.phases.agreed(phase) if self.ranks is not None else nullcontext()

    @contextmanager
    def making_homes(self, num_bytes: int) -> Iterator[None]:
        """Inside, units that live on the device, of this size together, get their memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free = torch.accelerator.get_memory_info(self.device)[0]
            raise CapacityError(
                f"{self.device} ran out of memory where {format_bytes(num_bytes)} of the model were to live: "
                f"{format_bytes(free)} are free, and device_memory is {format_bytes(self.device_memory or 0)}\n"
                "  fix:   a smaller device_memory; or leave the model on the CPU before zi.prepare, which moves it"
            ) from error


def environment_of(
    model: nn.Module, config: Config, accelerator: ComputeDevice | None, ranks: RankGroup | None
) -> TrainingEnvironment:
    """Return the environment of a model to prepare; reuses what `zi.init` has determined."""
    stores = {store_of(managed) for p in model.parameters() if (managed := offloaded_param.managed(p)) is not None}
    ranks = next((store.ranks for store in stores if store.ranks is not None), ranks)
    # Determined once, because the available memory changes.
    budget = min((store.store.pool.budget for store in stores), default=0) or budget_of(config, ranks)
    common = budget if ranks is None else ranks.phases.smallest("the memory of zi.prepare", budget)
    is_fast = None
    stored = config.param_dtype
    if ranks is not None and stored is not None and stored != "float32" and config.compute_dtype is None:
        device = accelerator.device if accelerator is not None else torch.device("cpu")
        fast = multiplies_fast(getattr(torch, stored), device)
        is_fast = bool(ranks.phases.smallest("the speed of 16-bit computation", fast))
    return TrainingEnvironment(config, ranks, sharding_of(config, ranks), accelerator, budget, common, is_fast)
