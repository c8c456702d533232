"""Gradient norms and clipping, bit-identical to `torch.nn.utils.clip_grad_norm_`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from zero_infinity._torch import order_of_norms
from zero_infinity.params.dtensor import whole_norms
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.unit import ManagedParameter

# The norm of each gradient, by its parameter or tile of a parameter.
Norms: TypeAlias = dict[ManagedParameter | nn.Parameter, torch.Tensor]


def global_norms(norms: Mapping[ManagedParameter | nn.Parameter, torch.Tensor]) -> Norms:
    """Return the norms of whole gradients, given the norms of the local parts of DTensors."""
    parameters = [key.parameter if isinstance(key, ManagedParameter) else key for key in norms]
    return dict(zip(norms, whole_norms(list(norms.values()), parameters), strict=True))


def on_host(norms: Norms) -> Norms:
    """Return the norms in host memory. Waits for a device once, whatever their number."""
    places: dict[tuple[torch.device, torch.dtype], Norms] = {}
    for key, norm in norms.items():
        places.setdefault((norm.device, norm.dtype), {})[key] = norm
    found: Norms = {}
    for (device, _), there in places.items():
        here = there if device.type == "cpu" else dict(zip(there, torch.stack(list(there.values())).cpu(), strict=True))
        found.update(here)
    return {key: found[key] for key in norms}


def clip_factor(norms: Norms, parameters: Sequence[nn.Parameter], max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the total norm over `parameters`, and the factor that clips it to `max_norm`."""
    found = [(p, norms[key]) for p in parameters for key in _parts_of(p) if key in norms]
    return total_norm(found), _factor(total_norm(found), max_norm)


def total_norm(norms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return the norm of all gradients together."""
    if not norms:
        return torch.tensor(0.0)
    # torch groups norms by dtype and device before it adds them up, and that order determines the last bit.
    kinds = [torch.empty(0, dtype=p.dtype, device=p.device) for p, _ in norms]
    ordered = [norms[number][1] for number in order_of_norms(kinds)]
    if len({norm.device for norm in ordered}) > 1:
        ordered = [norm.cpu() for norm in ordered]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered))
    return total


def _factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _parts_of(parameter: nn.Parameter) -> Sequence[ManagedParameter | nn.Parameter]:
    """Return the parameter itself or its tiles: the keys of its norms."""
    known = managed(parameter)
    return known.parts if known is not None else [parameter]
