"""What `p.grad` is between backward and zero_grad: a tensor without memory that stands for gradients in blocks.

A torch function that is called with it gets the values, in memory for that one call; what it changes in place is stored
again. Functions over lists of tensors (`torch._foreach_mul_`) are called for one tensor after the other. So code that
clips or logs gradients holds one of them in memory at a time.

A view (`g.view(-1)`, `g[0]`) stands for the same gradient: its values are that view of the whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from zero_infinity._torch import (
    no_torch_function,
    storage_id,
    tree_flatten,
    tree_unflatten,
    version_of,
    without_storage,
)
from zero_infinity.params.offloaded_param import METADATA

View = Callable[[torch.Tensor], torch.Tensor]
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# Answered by the stand-in.
_METADATA = METADATA | {torch.Tensor.stride, torch.Tensor.is_contiguous}
# Over lists of tensors, of which each is changed or read on its own.
_OVER_LISTS = ("_foreach_", "_amp_foreach_")


class GradientSource(Protocol):
    """The gradient of one parameter, wherever it is."""

    def read(self) -> torch.Tensor:
        """Return its values, in memory of their own."""

    def write(self, values: torch.Tensor) -> None:
        """Replace its values."""

    def zero(self) -> None:
        """Set it to zero."""


class RetainedGradient(torch.Tensor):
    """Stands for a gradient, or a view of one. Made by `retained_gradient`."""

    source: GradientSource
    views: tuple[View, ...]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func in _METADATA:
            with no_torch_function():
                return func(*args, **keywords)
        if func == _GET_DATA or func in (torch.Tensor.detach, torch.Tensor.detach_):
            return args[0]
        if func == _SET_DATA:
            return _call(torch.Tensor.copy_, args, keywords)
        return _call(func, args, keywords)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """For functions that C++ code calls."""
        return _call(func, args, dict(kwargs or {}))


def retained_gradient(
    source: GradientSource, like: torch.Tensor, stride: tuple[int, ...], views: tuple[View, ...] = ()
) -> RetainedGradient:
    """Return what stands for a gradient with the shape, dtype and device of `like`."""
    gradient = without_storage(RetainedGradient, like.shape, dtype=like.dtype, device=like.device, strides=stride)
    if not isinstance(gradient, RetainedGradient):
        raise TypeError(f"torch made a {type(gradient).__name__}")
    gradient.source, gradient.views = source, views
    return gradient


def _call(func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "").split(".")[0]
    if name.startswith(_OVER_LISTS):
        length = next(len(arg) for arg in args if isinstance(arg, list | tuple))
        if length > 1:
            return _one_by_one(func, args, keywords, length)
    leaves, structure = tree_flatten((args, keywords))
    first = next((leaf for leaf in leaves if isinstance(leaf, RetainedGradient)), None)
    if first is not None and not first.views and name.rstrip("_").endswith("zero") and name.endswith("_"):
        first.source.zero()
        return first
    wholes: dict[int, tuple[GradientSource, torch.Tensor, int]] = {}
    values: dict[int, RetainedGradient] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, RetainedGradient):
            if id(leaf.source) not in wholes:
                whole = leaf.source.read()
                wholes[id(leaf.source)] = (leaf.source, whole, version_of(whole))
            value = wholes[id(leaf.source)][1]
            for view in leaf.views:
                value = view(value)
            leaves[number] = value
            values[id(value)] = leaf
    args, keywords = tree_unflatten(leaves, structure)
    result = func(*args, **keywords)
    for source, whole, version in wholes.values():
        # Autograd does not count changes by `_amp_foreach_non_finite_check_and_unscale_`.
        if version_of(whole) != version or (name.startswith(_OVER_LISTS) and name.endswith("_")):
            source.write(whole)
    return _wrapped(result, func, args, keywords, values)


def _one_by_one(func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any], length: int) -> Any:
    """Call a function over lists of tensors for one element of each after the other."""

    def nth(value: Any, number: int) -> Any:
        return [value[number]] if isinstance(value, list | tuple) and len(value) == length else value

    results: list[Any] = []
    for number in range(length):
        part = {name: nth(value, number) for name, value in keywords.items()}
        result = func(*(nth(arg, number) for arg in args), **part)
        results.extend(result if isinstance(result, list | tuple) else ())
    return results or None


def _wrapped(
    result: Any,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    values: dict[int, RetainedGradient],
) -> Any:
    """Return a result without memory in common with the values, which are freed now."""
    if isinstance(result, list | tuple) and any(isinstance(item, torch.Tensor) for item in result):
        wrapped = [
            _wrapped(item, lambda *a, n=n, **k: func(*a, **k)[n], args, keywords, values)
            for n, item in enumerate(result)
        ]
        return type(result)(wrapped) if type(result) in (list, tuple) else result
    if not isinstance(result, torch.Tensor):
        if hasattr(result, "setflags"):
            result.setflags(write=False)  # what would be written to numpy's array would be lost
        return result
    if id(result) in values:
        return values[id(result)]
    for number, arg in enumerate(args):
        base = values.get(id(arg))
        if base is not None and storage_id(arg.untyped_storage()) == storage_id(result.untyped_storage()):
            view = partial(_view, func, args[:number], args[number + 1 :], keywords)
            return retained_gradient(base.source, result, result.stride(), (*base.views, view))
    return result


def _view(
    func: Callable[..., Any],
    before: tuple[Any, ...],
    after: tuple[Any, ...],
    keywords: dict[str, Any],
    whole: torch.Tensor,
) -> Any:
    return func(*before, whole, *after, **keywords)
