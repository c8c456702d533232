"""Chooses the dtypes in which a parameter is stored, computed and optimized.

Stored: `param_dtype`, else the parameter's own. Optimizer states: `optim_dtype`, else float32 for 16-bit storage and
the stored dtype otherwise. Updates are computed in the wider of the two, and what is narrower is rounded; with
`master`, from a copy of the parameter or without one. Computed: `compute_dtype`; else, if storage was set to 16 bits,
that dtype if this machine multiplies matrices in it about as fast as in float32. That is measured, never assumed: on
CPUs without 16-bit instructions it is many times slower, and then 16 bits are used for storage and transfer only. Batch
norms compute in the dtype in which they were created.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch
from torch import nn

from zero_infinity._torch import NormWithStatistics
from zero_infinity.config import Config
from zero_infinity.errors import ConfigError

_PROBE_SIZE = 256
_PROBE_REPEATS = 50
_PROBE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one parameter."""

    stored: torch.dtype
    computed: torch.dtype
    optimized: torch.dtype  # of the arithmetic of updates, of gradients that wait, and of a master copy
    states: torch.dtype  # of the optimizer's states
    has_master: bool  # the optimizer keeps a copy of the parameter in `optimized`


def precision_of(
    own: torch.dtype,
    config: Config,
    device: torch.device,
    *,
    fast: bool | None = None,
    computed_as_made: bool = False,
) -> Precision:
    """Return the dtypes of a parameter that the user made in `own`. `fast`: an earlier result for 16-bit speed.

    `computed_as_made`: its module computes in the dtype in which the user made it, whatever other modules do.
    """
    if not own.is_floating_point:  # bytes of packed tensors
        return Precision(own, own, own, own, has_master=False)
    stored = _dtype(config.param_dtype) or own
    computed = _dtype(config.compute_dtype) or own
    if computed_as_made:
        computed = own
    elif config.compute_dtype is None and config.param_dtype is not None and stored.itemsize < own.itemsize:
        computed = stored if (multiplies_fast(stored, device) if fast is None else fast) else own
    states = _dtype(config.optim_dtype) or (torch.float32 if stored.itemsize < 4 else stored)
    optimized = states if states.itemsize >= stored.itemsize else stored
    if stored.itemsize < 4 and config.master != "auto":
        optimized = torch.float32
    has_master = optimized != stored and config.master != "none"
    _check_rounding(config, stored, states, optimized, has_master=has_master)
    return Precision(stored, computed, optimized, states, has_master)


def _check_rounding(
    config: Config, stored: torch.dtype, states: torch.dtype, optimized: torch.dtype, *, has_master: bool
) -> None:
    """Raise unless what an update rounds stochastically has the range of float32."""
    if states not in (optimized, torch.bfloat16):
        raise ConfigError(
            f"optim_dtype={config.optim_dtype!r} is narrower than the {optimized} in which updates are computed, and "
            "has too little range for squares of gradients\n"
            f'  fix:   optim_dtype="bfloat16", or {str(optimized).removeprefix("torch.")!r}'
        )
    if stored not in (optimized, torch.bfloat16) and not has_master:
        raise ConfigError(
            f"master='none' rounds every update to the {stored} that parameters are stored in, which has too little "
            'range for that\n  fix:   param_dtype="bfloat16", or master="auto"'
        )


def computes_with_buffers(module: nn.Module) -> bool:
    """Return True if the module's parameters must have the dtype of its buffers.

    Running statistics keep the dtype in which the user made them, and torch normalises 16-bit inputs with float32
    statistics only if weight and bias are float32 too.
    """
    return isinstance(module, NormWithStatistics) and module.running_mean is not None


@functools.cache
def multiplies_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """True if matrix multiplication in `dtype` is at least half as fast as in float32."""
    return _seconds(dtype, device) <= 2 * _seconds(torch.float32, device)


def _seconds(dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype, device=device)
    best = float("inf")
    # The first run starts threads, and on a busy machine most are slow: the fastest of many shows the hardware's speed.
    give_up = time.perf_counter() + _PROBE_SECONDS
    for number in range(_PROBE_REPEATS):
        if number > 2 and time.perf_counter() > give_up:
            break
        start = time.perf_counter()
        # .sum().item() also waits for an accelerator.
        (matrix @ matrix).sum().item()
        best = min(best, time.perf_counter() - start)
    return best


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
