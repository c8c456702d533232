"""Logits over a vocabulary that are never materialized if only a cross-entropy is computed from them.

Where a tiled linear layer produces logits (as many features as an embedding has words), training gets a `LazyLogits`: a
tensor that knows its shape and what it would be computed from. `F.cross_entropy` (and so `nn.CrossEntropyLoss`, and the
losses of transformers) then iterates over the tiles: logits of one tile at a time, a running maximum and sum of
exponentials, and in backward the same tiles again. Operations that keep rows intact (`view`, `reshape`, `flatten`,
`contiguous`, slices of positions, `float()`) stay lazy. Any other operation computes all logits and then continues as
usual.

That can come too late: logits that are first used after the weight was updated can no longer be computed. That is an
error, never a wrong number.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.function import once_differentiable

from zero_infinity._torch import no_torch_function, without_storage
from zero_infinity.errors import UsageError
from zero_infinity.params.dynamo import not_compiled
from zero_infinity.params.unit import ManagedParameter
from zero_infinity.tiling.tiled_ops import (
    Saved,
    TiledWeight,
    WeightGradient,
    add_product,
    columns,
    linear,
    linear_backward,
)


class Projection:
    """A weight and its bias at the time of a forward."""

    __slots__ = ("bias", "bias_value", "use", "versions")

    def __init__(self, use: TiledWeight, bias: torch.Tensor | None) -> None:
        self.use = use
        self.bias = bias  # receives the gradient
        self.bias_value = bias.detach().clone() if bias is not None else None  # the bias is offloaded after the forward
        self.versions = [tile.version for tile in use.tiles]

    def check(self) -> None:
        """Raise if the weight has changed since the forward."""
        if [tile.version for tile in self.use.tiles] != self.versions:
            raise UsageError(
                f"logits of {self.use.whole.name!r} are first used after its weight was updated: their layer is tiled, "
                "so they were not computed in forward, and can no longer be computed\n"
                "  fix:   use logits before loss.backward(), or set a larger tile_above in zi.Config"
            )


class LazyLogits(torch.Tensor):
    """The product of `hidden` and a tiled weight, not computed."""

    hidden: torch.Tensor
    projection: Projection
    whole: torch.Tensor | None

    @classmethod
    @not_compiled
    def __torch_function__(
        cls, func: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func in _METADATA:
            with no_torch_function():
                return func(*args, **keywords)
        lazily = _LAZILY.get(func)
        if lazily is not None and isinstance(args[0], LazyLogits) and args[0].whole is None:
            result = lazily(*args, **keywords)
            if result is not NotImplemented:
                return result
        return func(*_computed(args), **_computed(keywords))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Below autograd they cannot be computed: only their shape is usable there."""
        if func is torch.ops.aten.detach.default:
            return _wrap(args[0].shape, args[0].dtype, args[0].device)
        raise UsageError(
            f"{func} got lazy logits, bypassing the torch function that would have computed them\n"
            "  fix:   pass logits.clone(), or set a larger tile_above in zi.Config"
        )


def make_logits(use: TiledWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Replaces a linear layer."""
    return _lazy(x, Projection(use, bias), x.dtype)


def _lazy(hidden: torch.Tensor, projection: Projection, dtype: torch.dtype) -> LazyLogits:
    lazy: LazyLogits = _Lazy.apply(  # type: ignore[no-untyped-call]
        hidden, projection.use.parameter, projection.bias, projection, dtype
    )
    lazy.hidden, lazy.projection, lazy.whole = hidden, projection, None
    return lazy


def _wrap(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return without_storage(LazyLogits, shape, dtype=dtype, device=device)


class _Lazy(torch.autograd.Function):
    """Makes lazy logits; gradients that reach them are those of the linear layer."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        _: torch.Tensor,
        __: torch.Tensor | None,
        projection: Projection,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.projection = projection
        ctx.save_for_backward(hidden)
        return _wrap(torch.Size((*hidden.shape[:-1], projection.use.whole.shape[0])), dtype, hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # No handles: logits that are still referenced would delay every update. So the versions are compared.
        ctx.projection.check()
        use, (hidden,) = ctx.projection.use, ctx.saved_tensors
        return (*linear_backward(ctx, use, Saved(use), hidden, gradient.to(hidden.dtype)), None, None)


class _Compute(torch.autograd.Function):
    """Computes lazy logits."""

    @staticmethod
    def forward(ctx: Any, lazy: torch.Tensor, hidden: torch.Tensor, projection: Projection) -> torch.Tensor:  # noqa: ARG004
        rows = hidden.reshape(-1, hidden.shape[-1])
        out = rows.new_empty(len(rows), projection.use.whole.shape[0])
        for tile in projection.use.tiles:
            projection.use.with_tile(tile, partial(linear, rows, projection.bias_value, tile, out[:, columns(tile)]))
        return out.view(*hidden.shape[:-1], out.shape[1]).to(lazy.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ARG004
        return gradients[0], None, None


def compute(lazy: LazyLogits) -> torch.Tensor:
    """Return the logits as the linear layer would have computed them."""
    if lazy.whole is None:
        lazy.projection.check()
        with torch.enable_grad():
            lazy.whole = _Compute.apply(lazy, lazy.hidden.detach(), lazy.projection)  # type: ignore[no-untyped-call]
    return lazy.whole


def _computed(value: Any) -> Any:
    """Return the same value with lazy logits computed."""
    if isinstance(value, LazyLogits):
        return compute(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_computed(item) for item in value)
    if isinstance(value, dict):
        return {key: _computed(item) for key, item in value.items()}
    return value


# ---------------------------------------------------------------------- the loss


class _CrossEntropy(torch.autograd.Function):
    """The cross-entropy of each row with its class, over tiles of classes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        _: torch.Tensor,
        __: torch.Tensor | None,
        target: torch.Tensor,
        ignored: torch.Tensor,
        projection: Projection,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        use = projection.use
        ctx.use, ctx.projection, ctx.dtype, ctx.saved = use, projection, dtype, Saved(use)
        exact = torch.promote_types(dtype, torch.float32)
        highest = torch.full((len(hidden),), -torch.inf, dtype=exact, device=hidden.device)
        total, picked = torch.zeros_like(highest), torch.zeros_like(highest)
        for tile in use.tiles:
            logits = use.with_tile(tile, partial(_logits, hidden, projection, tile, dtype))
            above = torch.maximum(highest, logits.amax(1))
            places, classes = _of_tile(target, ignored, tile)
            picked[places] = logits[places, classes]
            total.mul_(torch.exp(highest - above)).add_(logits.sub_(above.unsqueeze(1)).exp_().sum(1))
            highest = above
        log_total = highest + total.log()
        ctx.save_for_backward(hidden, target, ignored, log_total)
        return (log_total - picked).masked_fill_(ignored, 0).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        use, projection = ctx.use, ctx.projection
        hidden, target, ignored, log_total = ctx.saved_tensors
        of_loss = gradient.masked_fill(ignored, 0).to(log_total.dtype).unsqueeze(1)
        of_weight = WeightGradient(use, ctx)
        of_hidden: torch.Tensor | None = None
        bias = projection.bias_value
        of_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None

        def back(tile: ManagedParameter, weight: torch.Tensor) -> torch.Tensor:
            nonlocal of_hidden
            of_logits = _logits(hidden, projection, tile, ctx.dtype, weight)
            of_logits.sub_(log_total.unsqueeze(1)).exp_()
            places, classes = _of_tile(target, ignored, tile)
            of_logits[places, classes] -= 1
            of_logits = of_logits.mul_(of_loss).to(hidden.dtype)
            if ctx.needs_input_grad[0]:
                of_hidden = add_product(of_hidden, of_logits, weight)
            return of_logits

        for number, tile in reversed(list(enumerate(use.tiles))):
            of_logits = ctx.saved.with_tile(number, partial(back, tile))
            if of_bias is not None:
                of_bias[columns(tile)] = of_logits.sum(0)
            if of_weight.is_wanted:
                of_weight.add(tile, of_logits.t() @ hidden)
        return of_hidden, of_weight.result(), of_bias, None, None, None, None


def _logits(
    hidden: torch.Tensor, projection: Projection, tile: ManagedParameter, dtype: torch.dtype, weight: torch.Tensor
) -> torch.Tensor:
    """Return one tile's logits in the dtype that the loss sees (`dtype`)."""
    out = hidden.new_empty(len(hidden), tile.shape[0])
    linear(hidden, projection.bias_value, tile, out, weight)
    return out.to(dtype).to(torch.promote_types(dtype, torch.float32))


def _of_tile(target: torch.Tensor, ignored: torch.Tensor, tile: ManagedParameter) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows whose class is in the tile, and the index of that class in the tile."""
    own = columns(tile)
    places = ((target >= own.start) & (target < own.stop) & ~ignored).nonzero().squeeze(1)
    return places, target[places] - tile.first_row


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not is_plain or input.dim() != 2 or type(target) is not torch.Tensor or reduction not in _REDUCTIONS:
        return NotImplemented
    if target.dtype is not torch.int64 or target.shape != input.shape[:1]:
        return NotImplemented
    ignored = target == ignore_index
    wrong = target[~ignored & ((target < 0) | (target >= input.shape[1]))]
    if len(wrong):
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
    projection = input.projection
    projection.check()
    dtype = torch.float32 if torch.is_autocast_enabled(input.device.type) else input.dtype
    with torch.autocast(input.device.type, enabled=False):
        losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            input.hidden, projection.use.parameter, projection.bias, target, ignored, projection, dtype
        )
    return _REDUCTIONS[reduction](losses, ignored)


_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "none": lambda losses, _: losses,
    "sum": lambda losses, _: losses.sum(),
    "mean": lambda losses, ignored: losses.sum() / (~ignored).sum(),
}


# ---------------------------------------------------------------------- operations that keep rows intact


def _view(lazy: LazyLogits, *shape: Any) -> Any:
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else list(shape)
    if not sizes or not all(isinstance(size, int) for size in sizes) or sizes[-1] not in (-1, lazy.shape[-1]):
        return NotImplemented
    if sizes[-1] == -1 and lazy.numel() != lazy.shape[-1] * torch.Size(sizes[:-1]).numel():
        return NotImplemented
    rows = lazy.hidden.reshape(*sizes[:-1], lazy.hidden.shape[-1])
    return _lazy(rows, lazy.projection, lazy.dtype)


def _flatten(lazy: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % lazy.dim() == lazy.dim() - 1:
        return NotImplemented
    return _lazy(lazy.hidden.flatten(start_dim, end_dim), lazy.projection, lazy.dtype)


def _slice(lazy: LazyLogits, index: Any) -> Any:
    """Slices of positions: `logits[:, :-1]`, `logits[..., :-1, :]`."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice | int | types.EllipsisType) and not isinstance(part, bool) for part in parts):
        return NotImplemented
    reaches = len(parts) == lazy.dim() if Ellipsis not in parts else parts[-1] is not Ellipsis
    if reaches and (parts[-1] != slice(None)):
        return NotImplemented
    return _lazy(lazy.hidden[index], lazy.projection, lazy.dtype)


def _float(lazy: LazyLogits) -> Any:
    return lazy if lazy.dtype is torch.float32 else _lazy(lazy.hidden, lazy.projection, torch.float32)


def _contiguous(lazy: LazyLogits) -> Any:
    return lazy


_LAZILY: dict[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    torch.Tensor.view: _view,
    torch.Tensor.reshape: _view,
    torch.reshape: _view,
    torch.Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    torch.Tensor.__getitem__: _slice,
    torch.Tensor.float: _float,
    torch.Tensor.contiguous: _contiguous,
}

_METADATA: frozenset[Any] = frozenset(
    {
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "requires_grad", "layout", "ndim", "is_leaf", "is_cuda", "grad_fn")
    }
    | {getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "is_floating_point", "__len__")}
    | {torch.is_floating_point, torch.numel}
)
