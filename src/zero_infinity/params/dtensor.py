"""The local parts of tensor-parallel parameters (DTensors), which are managed like plain parameters.

Only the local part is managed: it is stored, unsharded, updated and sharded over the data-parallel ranks like any other
parameter. The DTensor that wraps it describes the whole tensor and is not changed. A gradient that is a partial sum (of
a norm under sequence parallelism) is first reduced over the mesh to the parameter's placements.

`torch.distributed.tensor` takes a second to import, so it is not imported here: unless it is loaded, there is no
DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import all_reduce, get_process_group_ranks

from zero_infinity._torch import dtensor_around, local_tensor, spec_of
from zero_infinity.errors import UsageError

_PLAIN = (torch.Tensor, nn.Parameter)


def is_distributed(tensor: torch.Tensor) -> TypeGuard[Any]:
    """True if it is a DTensor."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's local part: the whole tensor, unless it is a DTensor."""
    if not is_distributed(tensor):
        return tensor
    local: Any = local_tensor(tensor)
    # The result of an asynchronous collective must be waited for.
    part: torch.Tensor = local.trigger_wait() if hasattr(local, "trigger_wait") else local
    return part


def like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as the local part of a DTensor with the placements of `parameter`; unchanged for a plain one."""
    return dtensor_around(local, spec_of(parameter)) if is_distributed(parameter) else local


def local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient, redistributed to its parameter's placements."""
    if is_distributed(gradient) and is_distributed(parameter) and gradient.placements != parameter.placements:
        with torch.no_grad():
            gradient = gradient.redistribute(placements=parameter.placements)
    return local_of(gradient)


def whole_norms(norms: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norms of whole gradients, given those of local parts. Collective over the parameters' meshes."""
    whole = list(norms)
    split: dict[tuple[ProcessGroup, ...], list[int]] = {}
    for number, parameter in enumerate(parameters):
        if groups := _groups_of(parameter):
            split.setdefault(groups, []).append(number)
    for groups, numbers in split.items():
        squares = torch.stack([whole[number] for number in numbers]).square()
        for group in groups:
            all_reduce(squares, group=group)
        for number, norm in zip(numbers, squares.sqrt(), strict=True):
            whole[number] = norm
    return whole


def _groups_of(parameter: torch.Tensor) -> tuple[ProcessGroup, ...]:
    """Return the groups over which a parameter is split."""
    if not is_distributed(parameter):
        return ()
    placements = enumerate(parameter.placements)
    return tuple(parameter.device_mesh.get_group(dim) for dim, placement in placements if placement.is_shard())


def check_group(named: dict[str, nn.Parameter], group: ProcessGroup | None) -> None:
    """Raise if ranks of `group`, which must have the same parameters, have different parts of one."""
    if group is None:
        return
    members = set(get_process_group_ranks(group))
    for name, parameter in named.items():
        if is_distributed(parameter):
            common = members & set(parameter.device_mesh.mesh.flatten().tolist())
            if len(common) > 1:
                raise UsageError(
                    f"{name!r} is split over ranks {sorted(common)} (tensor parallel), which are also data-parallel"
                    ' ranks\n  fix:   group=mesh["dp"]: the ranks that have the same parameters'
                )
