"""Tensors that are read from a unit by each operation that uses them, and never refer to its memory otherwise.

For quantised weights and their scales. They are not floating-point parameters: libraries keep them as integer
parameters, as attributes, as buffers, and hold them for backward in objects that no saved-tensor hook sees. So a packed
tensor has its true shape and dtype and no memory; `__torch_dispatch__` gives each operation the real values for as long
as it runs. A view of one is another one. Operations that write change the stored values.

All tensors of a layer lie in one *holder*: a parameter of bytes that is managed like any other, in a unit that nothing
updates (`packed_layers.py` makes it).
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from zero_infinity._torch import (
    of_class,
    outside_dispatch,
    swap_tensor_impl,
    tree_flatten,
    tree_unflatten,
    version_of,
    without_storage,
)
from zero_infinity.errors import UsageError
from zero_infinity.params import offloaded_param

_PART = "_zero_infinity_part"


@dataclass(frozen=True, slots=True)
class HolderPart:
    """Bytes of a holder: one tensor, or the tensor that others are views of."""

    holder: nn.Parameter
    start: int
    num_bytes: int

    def of(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return these bytes of the holder's as elements of `dtype`."""
        return data[self.start : self.start + self.num_bytes].view(dtype)


class PackedTensor(torch.Tensor):
    """Reads its values from a part of a holder. Made by `packed`, never directly."""

    # Functions see it as any tensor; only operators are intercepted.
    __torch_function__ = nn.Parameter.__torch_function__

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is torch.ops.aten.detach.default and _is_copied(args[0]):
            return values_of(args[0])
        if func.is_view:
            return _view(func, args, keywords)
        with outside_dispatch():
            return _call(func, args, keywords)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Libraries put back what they have found there; anything else is an edit."""
        if isinstance(value, PackedTensor) and part_of(value) == part_of(self) and value.shape == self.shape:
            return
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise UsageError(
                f"a quantised weight of shape {tuple(self.shape)} ({self.dtype}) was replaced by one of shape "
                f"{tuple(value.shape)} ({value.dtype}), but it is managed by zero_infinity\n"
                "  fix:   quantise and convert weights before zi.prepare"
            )
        with torch.no_grad():
            self.copy_(value)

    def tolist(self) -> Any:
        return values_of(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy."""
        return values_of(self).numpy(force=force)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(values_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor of the class that it had."""
        values, plain = values_of(self), plain_class(self)
        if plain is torch.Tensor:
            memo[id(self)] = values
            return values
        made = of_class(plain, values)
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name != _PART})
        memo[id(self)] = copied = copy.deepcopy(made, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"a quantised weight of shape {tuple(self.shape)} is managed by zero_infinity and cannot be pickled\n"
            "  fix:   pickle copy.deepcopy(model), or model.state_dict()"
        )


def packed(part: HolderPart, like: torch.Tensor, strides: tuple[int, ...], device: torch.device) -> PackedTensor:
    """Return a tensor of the shape and dtype of `like` whose values are `part`."""
    return _made(PackedTensor, part, like.dtype, like.shape, strides, 0, device)


def turn_into(parameter: torch.Tensor, packed_tensor: PackedTensor) -> None:
    """Let a parameter, which stays the same object of its class, read its values as `packed_tensor` does."""
    kind = _class_of(plain_class(parameter))
    with torch.no_grad():
        fresh = _made(
            kind,
            part_of(packed_tensor),
            packed_tensor.dtype,
            packed_tensor.shape,
            packed_tensor.stride(),
            int(packed_tensor.storage_offset()),
            packed_tensor.device,
        )
    swap_tensor_impl(parameter, fresh)
    parameter.__class__ = kind
    parameter.__dict__[_PART] = part_of(packed_tensor)


def part_of(tensor: PackedTensor) -> HolderPart:
    """Return the part of a holder that a packed tensor reads."""
    part: HolderPart = tensor.__dict__[_PART]
    return part


def plain_class(tensor: torch.Tensor) -> type[torch.Tensor]:
    """Return the class that it has when it is not packed."""
    kind = type(tensor)
    if kind is PackedTensor:
        return torch.Tensor
    return kind.__bases__[1] if issubclass(kind, PackedTensor) else kind


def values_of(tensor: PackedTensor) -> torch.Tensor:
    """Return its values in memory of their own."""
    with outside_dispatch():
        return _read(tensor).clone()


@functools.cache
def _class_of(plain: type[torch.Tensor]) -> type[PackedTensor]:
    if plain is torch.Tensor:
        return PackedTensor
    return types.new_class("Packed" + plain.__name__, (PackedTensor, plain))


def _made(
    kind: type[PackedTensor],
    part: HolderPart,
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    offset: int,
    device: torch.device,
) -> PackedTensor:
    made = without_storage(kind, shape, dtype=dtype, device=device, strides=strides, offset=offset)
    made.__dict__[_PART] = part
    return cast(PackedTensor, made)


def _view(func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Work a view out without values, and return packed tensors like it."""
    tensor: PackedTensor = args[0]
    part = part_of(tensor)
    bytes_ = torch.empty(part.start + part.num_bytes, dtype=torch.uint8, device="meta")
    whole = part.of(bytes_, tensor.dtype)
    first = whole.storage_offset()
    views = func(
        whole.as_strided(tensor.shape, tensor.stride(), first + tensor.storage_offset()), *args[1:], **keywords
    )

    def like(view: torch.Tensor) -> PackedTensor:
        offset = int(view.storage_offset()) - part.start // view.itemsize
        return _made(PackedTensor, part, view.dtype, view.shape, view.stride(), offset, tensor.device)

    return like(views) if isinstance(views, torch.Tensor) else [like(view) for view in views]


def _call(func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Run an operator on the real values, which are forgotten afterwards."""
    leaves, structure = tree_flatten((args, keywords))
    given = {id(leaf): leaf for leaf in leaves if isinstance(leaf, PackedTensor)}
    real = {key: _read(leaf) for key, leaf in given.items()}
    versions = {key: version_of(tensor) for key, tensor in real.items()}
    real_args, real_keywords = tree_unflatten([real.get(id(leaf), leaf) for leaf in leaves], structure)
    result = func(*real_args, **real_keywords)
    for key, tensor in real.items():
        if version_of(tensor) != versions[key]:
            _changed(given[key])
    # An operator that writes returns what it was given.
    results, structure = tree_flatten(result)
    back = {id(tensor): given[key] for key, tensor in real.items()}
    return tree_unflatten([back.get(id(leaf), leaf) for leaf in results], structure)


def _read(tensor: PackedTensor) -> torch.Tensor:
    """Return its values in the unit's memory, which stays while the result is alive."""
    part = part_of(tensor)
    known = offloaded_param.managed(part.holder)
    data = part.holder.detach() if known is None else offloaded_param.access_of(known).read(known)
    values = part.of(data, tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride(), values.storage_offset() + tensor.storage_offset())


def _changed(tensor: PackedTensor) -> None:
    known = offloaded_param.managed(part_of(tensor).holder)
    if known is not None:
        offloaded_param.access_of(known).changed(known)


def _is_copied(tensor: PackedTensor) -> bool:
    """True while a state_dict is made: views in it could not be saved."""
    known = offloaded_param.managed(part_of(tensor).holder)
    return known is not None and offloaded_param.access_of(known).makes_state_dict
