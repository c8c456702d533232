"""Refuses to let others train managed parameters: another optimizer, DistributedDataParallel, FSDP.

They would find parameters without values or gradients and train nothing, in silence. Torch has public hooks for every
optimizer's step and every module that becomes part of another one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_infinity.errors import UsageError
from zero_infinity.optim.gradient_hook import GradientHook
from zero_infinity.optim.wrapped_optimizer import StreamedOptimizer
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.unit import ManagedParameter

# By name: FSDP takes a second to import.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


@functools.cache
def refuse_others() -> None:
    """Refuse others from now on, in the whole process.

    Never ended: engines close on another thread, and torch's own may be iterating over the hooks.
    """
    register_optimizer_step_pre_hook(refuse_step)
    register_module_module_registration_hook(refuse_wrapping)


def refuse_step(optimizer: Optimizer, _: Any, __: Any) -> None:
    """Raise if the optimizer would update managed parameters."""
    if isinstance(optimizer, StreamedOptimizer):
        return
    if any(isinstance(inner, StreamedOptimizer) for inner in vars(optimizer).values()):
        return  # calls its step
    known = _trained(p for group in optimizer.param_groups for p in group["params"])
    if known is not None:
        raise UsageError(
            f"{type(optimizer).__name__}.step() is called over {known.name!r}, which zi.prepare manages: its values, "
            "states and gradients are not there\n"
            "  fix:   call step() on the optimizer that zi.prepare has returned, and give that one to your trainer"
        )


def refuse_wrapping(module: nn.Module, _: str, child: nn.Module | None) -> None:
    """Raise if a prepared model gets a wrapper that shards or averages by itself."""
    kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
    wrapper = next((name for name in _WRAPPERS if name in kinds), None)
    if wrapper is None or child is None:
        return
    known = _trained(child.parameters())
    if known is not None:
        raise UsageError(
            f"{wrapper} around a prepared model would never see the gradients of {known.name!r}: zi.prepare shards and "
            "averages over ranks itself\n"
            f"  fix:   leave {wrapper} out; stage= and group= of zi.prepare do its work"
        )


def _trained(parameters: Iterable[torch.Tensor]) -> ManagedParameter | None:
    """Return a parameter that is trained by a prepared model."""
    for parameter in parameters:
        known = managed(parameter)
        if known is not None and isinstance(known.gradient_hook, GradientHook):
            return known
    return None
