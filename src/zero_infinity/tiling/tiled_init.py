"""In-place changes of a tiled weight, one tile at a time: those that initialise layers.

`zi.init` splits a layer that is larger than memory before it has values, and `nn.init` then fills it. The values are
those of a plain construction: torch draws random numbers element by element, so drawing them in parts gives the same
numbers, provided the parts are chosen well. On a CPU normal numbers are drawn in groups of 16, and the last 16 of a
tensor whose size is not a multiple of 16 are drawn twice. So parts are multiples of 16, and the last has at least 16.

Functions that cannot be done in parts use the materialized weight: `orthogonal_`, and `trunc_normal_`, which redraws
all values as long as one of them is out of bounds.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from zero_infinity.params.unit import ManagedParameter

_GROUP = 16  # normal numbers
_AT_ONCE = 1 << 16  # elements drawn at once: the size of the extra tensor


class Editable(Protocol):
    """A weight in tiles."""

    @property
    def parameter(self) -> nn.Parameter: ...

    def edit(self, work: Callable[[ManagedParameter, torch.Tensor], object]) -> None:
        """Call `work` to change each tile's values, in order."""


def _parts(num_elements: int) -> Iterator[int]:
    while num_elements >= _AT_ONCE + _GROUP:
        yield _AT_ONCE
        num_elements -= _AT_ONCE
    yield num_elements


def _drawn(func: Callable[..., torch.Tensor], use: Editable, target: Any, *args: Any, **keywords: Any) -> Any:
    if not _may_change(use, target, args):
        return NotImplemented
    sizes = _parts(use.parameter.numel())
    left = torch.empty(0)

    def fill(_: ManagedParameter, values: torch.Tensor) -> None:
        nonlocal left
        values = values.view(-1)
        while len(values):
            if not len(left):
                left = func(values.new_empty(next(sizes)), *args, **keywords)
            num = min(len(left), len(values))
            values[:num].copy_(left[:num])
            values, left = values[num:], left[num:]

    use.edit(fill)
    return target


def _each(func: Callable[..., torch.Tensor], use: Editable, target: Any, *args: Any, **keywords: Any) -> Any:
    if not _may_change(use, target, (*args, *keywords.values())):
        return NotImplemented
    use.edit(lambda _, values: func(values, *args, **keywords))
    return target


def _may_change(use: Editable, target: Any, others: tuple[Any, ...]) -> bool:
    """True if the weight is changed using only numbers, on the CPU: other devices draw in another order."""
    if target is not use.parameter or torch.is_grad_enabled() or target.device.type != "cpu":
        return False
    return not any(isinstance(other, torch.Tensor) for other in others)


class _StandIn:
    """Replaces the weight in functions of `nn.init`, where the weight itself would cause infinite recursion."""

    def __init__(self, use: Editable) -> None:
        self._use = use
        self.shape = use.parameter.shape

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_EDITS[getattr(torch.Tensor, name)], self._use, self._use.parameter)


def _initialised(func: Callable[..., Any], use: Editable, tensor: Any, **keywords: Any) -> Any:
    with torch.no_grad():
        if not _may_change(use, tensor, ()):
            return NotImplemented
        func(_StandIn(use), **keywords)
    return tensor


_EDITS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{func: partial(_drawn, func) for func in (torch.Tensor.uniform_, torch.Tensor.normal_)},
    **{
        func: partial(_each, func)
        for func in (torch.Tensor.fill_, torch.Tensor.zero_, torch.Tensor.mul_, torch.Tensor.div_)
    },
}
# Functions of `nn.init` that check the tensor's class; the others call methods of the tensor. By name, because
# transformers replaces these functions while it initialises a model.
_INITIALISING = ("uniform_", "normal_", "constant_", "kaiming_uniform_")


def edit_by(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the tile-by-tile equivalent of `func`."""
    if isinstance(func, types.FunctionType) and func.__name__ in _INITIALISING:
        return partial(_initialised, func)
    return _EDITS.get(func)
