"""Finds layers with quantised weights and packs what belongs to each into one holder: weights and scales together.

A layer is quantised if it has a frozen parameter of integers, one of a tensor subclass that is made of other tensors
(torchao), or a large buffer of integers. What belongs to it are these tensors, its buffers, and the tensors among the
attributes of the layer and of its parameters (bitsandbytes keeps scales there). Only one switch is a library's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_infinity._torch import is_wrapper_subclass, own_buffers
from zero_infinity.params.dtensor import is_distributed
from zero_infinity.params.packed_tensor import HolderPart, PackedTensor, packed, part_of, turn_into
from zero_infinity.params.unit import dense_stride
from zero_infinity.policy.alignment import round_up_elements

# The name of a layer's quantised weights and scales, after that of the layer: in checkpoints and errors.
HOLDER = "quantised"
# Scalars and look-up tables, which many layers share, stay where they are: a table of 256 float32 numbers is 1 KiB.
_LARGEST_TABLE = 1024
# Integers in smaller buffers are positions and counters, not weights.
_LEAST_WEIGHT_BUFFER = 4096
_WEIGHT_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32)
# bitsandbytes rewrites weights for another kernel at the first forward without gradients, unless this is False.
_OTHER_KERNEL = "support_avx512bf16_for_cpu"
# How deep attributes are searched: parameter -> its quantisation state -> a nested one.
_DEPTH = 3


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place that a tensor is referred to from."""

    tensor: torch.Tensor
    holder: Any  # an object, or a dict
    name: str

    def put(self, tensor: PackedTensor) -> None:
        if isinstance(self.tensor, nn.Parameter):
            turn_into(self.tensor, tensor)
        elif isinstance(self.holder, dict):
            self.holder[self.name] = tensor
        else:
            setattr(self.holder, self.name, tensor)


def is_quantised(parameter: torch.Tensor) -> bool:
    """True for a frozen parameter that is not made of floating-point numbers, or of other tensors."""
    if parameter.requires_grad or parameter.is_meta or nn.parameter.is_lazy(parameter):
        return False
    if isinstance(parameter, PackedTensor):
        return True
    return is_made_of_others(parameter) or not (parameter.is_floating_point() or parameter.is_complex())


def pack(module: nn.Module, device: torch.device) -> nn.Parameter | None:
    """Pack the layer if it is quantised and not packed yet; returns its holder. It computes on `device`."""
    slots = list(_slots(module))
    known = next((slot.tensor for slot in slots if isinstance(slot.tensor, PackedTensor)), None)
    if known is None:
        slots = [slot for slot in slots if _can_be_packed(slot.tensor)]
        if not slots:
            return None
        known = _pack_into(slots, device)
        if hasattr(module, _OTHER_KERNEL):
            vars(module)[_OTHER_KERNEL] = False
    elif known.device != device:
        for slot in slots:
            if isinstance(slot.tensor, PackedTensor):
                slot.put(packed(part_of(slot.tensor), slot.tensor, slot.tensor.stride(), device))
    return part_of(known).holder


def holder_of(module: nn.Module) -> nn.Parameter | None:
    """Return the holder of a packed layer."""
    found = (slot.tensor for slot in _slots(module))
    return next((part_of(tensor).holder for tensor in found if isinstance(tensor, PackedTensor)), None)


def _pack_into(slots: list[_Slot], device: torch.device) -> PackedTensor:
    """Copy the tensors of a layer side by side and let the layer read them from there."""
    places: dict[Any, int] = {}  # a tensor may be referred to from two places
    num_bytes = 0
    for slot in slots:
        if _key(slot.tensor) not in places:
            places[_key(slot.tensor)] = num_bytes
            num_bytes += round_up_elements(slot.tensor.nbytes)
    data = torch.empty(num_bytes, dtype=torch.uint8, device=slots[0].tensor.device)
    holder = nn.Parameter(data, requires_grad=False)
    made = []
    for slot in slots:
        tensor = slot.tensor.detach()
        part = HolderPart(holder, places[_key(slot.tensor)], tensor.nbytes)
        values = part.of(data, tensor.dtype)
        strides = dense_stride(tensor)
        values.as_strided(tensor.shape, strides, values.storage_offset()).copy_(tensor)
        made.append(packed(part, tensor, strides, device))
    for slot, packed_tensor in zip(slots, made, strict=True):
        slot.put(packed_tensor)
    return made[0]


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _can_be_packed(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.requires_grad
        and not is_made_of_others(tensor)
        and tensor.nbytes > _LARGEST_TABLE
    )


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """True for a tensor subclass whose values are in other tensors, its attributes; a DTensor has one alone."""
    return is_wrapper_subclass(tensor) and not isinstance(tensor, PackedTensor) and not is_distributed(tensor)


def _slots(module: nn.Module) -> Iterator[_Slot]:
    """Yield all places of tensors that belong to a quantised layer; nothing for another module."""
    own = dict(nn.Module.named_parameters(module, recurse=False))
    quantised = {name: p for name, p in own.items() if is_quantised(p)}
    buffers = {name: buffer for name, buffer in own_buffers(module).items() if buffer is not None}
    if not quantised and not any(map(_is_weight_buffer, buffers.values())):
        return
    for name, parameter in quantised.items():
        if not is_made_of_others(parameter):
            yield _Slot(parameter, module, name)
    for name, buffer in buffers.items():
        yield _Slot(buffer, own_buffers(module), name)
    seen: set[int] = set()
    for parameter in quantised.values():
        yield from _inside(parameter, _DEPTH, seen)
    for name, value in vars(module).items():
        if not name.startswith("_"):
            yield from _slots_at(value, vars(module), name, _DEPTH, seen)


def _is_weight_buffer(buffer: torch.Tensor) -> bool:
    return isinstance(buffer, PackedTensor) or (
        buffer.dtype in _WEIGHT_DTYPES and buffer.nbytes >= _LEAST_WEIGHT_BUFFER and not buffer.is_meta
    )


def _slots_at(value: Any, holder: Any, name: str, depth: int, seen: set[int]) -> Iterator[_Slot]:
    if isinstance(value, torch.Tensor):
        if isinstance(value, PackedTensor) or not is_made_of_others(value):
            yield _Slot(value, holder, name)
        else:
            yield from _inside(value, depth, seen)
    elif isinstance(value, dict) or (hasattr(value, "__dict__") and not callable(value)):
        yield from _inside(value, depth, seen)


def _inside(value: Any, depth: int, seen: set[int]) -> Iterator[_Slot]:
    """Yield the places of tensors among the attributes of an object, or in a dict."""
    if depth == 0 or id(value) in seen or isinstance(value, nn.Module):
        return
    seen.add(id(value))
    items = value if isinstance(value, dict) else vars(value)
    for name, item in list(items.items()):
        if isinstance(name, str) and not name.startswith("_zero_infinity"):
            yield from _slots_at(item, value, name, depth - 1, seen)
