"""Finds the parameters of a model that are managed: which ones, and each tied weight once, at its first owner.

The holder of a layer's quantised weights (`packed_layers.py`) comes after the layer's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn

from zero_infinity.errors import UsageError
from zero_infinity.params.dtensor import local_of
from zero_infinity.params.packed_layers import HOLDER, holder_of, is_made_of_others
from zero_infinity.params.packed_tensor import PackedTensor
from zero_infinity.params.unit import ATTRIBUTE


def manageable(parameter: nn.Parameter) -> bool:
    """True if it is real, floating point, dense and not empty; every other parameter is left alone."""
    if nn.parameter.is_lazy(parameter):
        raise UsageError("the model has a lazy parameter without a shape\n  fix:   run one forward before zi.prepare")
    if is_made_of_others(parameter):
        return False
    return parameter.is_floating_point() and parameter.layout is torch.strided and local_of(parameter).numel() > 0


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters registered on the module itself, by name; one may have several names."""
    # A model's class may override `named_parameters`.
    return dict(nn.Module.named_parameters(module, recurse=False, remove_duplicate=False))


def find_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, list[tuple[str, nn.Parameter]]]]:
    """Yield each module that owns parameters, its name, and those parameters (each once, at its first owner)."""
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        own = []
        for name, parameter in own_parameters(module).items():
            if id(parameter) not in seen and manageable(parameter):
                seen.add(id(parameter))
                own.append((f"{module_name}.{name}" if module_name else name, parameter))
        holder = holder_of(module)
        if holder is not None and id(holder) not in seen:
            seen.add(id(holder))
            own.append((f"{module_name}.{HOLDER}" if module_name else HOLDER, holder))
        if own:
            yield module, module_name, own


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise if a parameter to be managed shares memory with another parameter or a buffer.

    In plain PyTorch they are one (`b.weight.data = a.weight.data`, a buffer of `weight.detach()`); here they would be
    two.
    """
    spans = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        moves = isinstance(tensor, nn.Parameter) and manageable(tensor)
        if isinstance(tensor, PackedTensor):
            continue
        if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if ATTRIBUTE not in tensor.__dict__:
            local = local_of(tensor)
            last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
            spans.append((local.data_ptr(), local.data_ptr() + last * local.itemsize, name, moves))
    for (_, end, name, moves), (start, _, other, other_moves) in pairwise(sorted(spans)):
        if start <= end and start and (moves or other_moves):
            raise UsageError(
                f"{name!r} and {other!r} share memory, which is not possible once parameters are offloaded\n"
                "  fix:   tie parameters by assigning the parameter itself (b.weight = a.weight), or give one of them "
                "its own memory (.clone())"
            )
