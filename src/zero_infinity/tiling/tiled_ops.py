"""Torch functions that use a parameter tile by tile, forward and backward.

`F.linear`, `F.embedding` and `torch.addmm` (used by transformers' `Conv1D`) fetch a tile, use it and release it before
the next. No part of the weight is saved for backward: backward fetches the tiles again in reverse order, because the
last one used is most likely still in memory, and passes on each tile's gradient as soon as it is computed.

Compared with the same functions on the whole weight, tiles are exact up to the order of sums:

- every element of the outputs of linear layers and embeddings, and of the gradients of both weights, is the same sum in
  the same order: bit-identical as long as the matrix kernels compute a part as they compute the whole;
- the input gradient of a linear layer and the output of Conv1D are sums over tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd.function import once_differentiable

from zero_infinity._torch import inside_func_transform, keeps_graph, will_execute_node
from zero_infinity.disable_modes import ordinary_tensors
from zero_infinity.interrupts import held
from zero_infinity.params.saved_tensors import SavedHandle
from zero_infinity.params.unit import ManagedParameter
from zero_infinity.params.unshard import Unsharder
from zero_infinity.tiling.materialize import Materializer
from zero_infinity.tiling.tiled_init import edit_by

Result = TypeVar("Result")


class TileGradientTaker(Protocol):
    """Takes gradients of tiles."""

    def on_tile_gradient(self, tile: ManagedParameter, gradient: torch.Tensor) -> None: ...


class MakeLogits(Protocol):
    """Makes lazy logits in place of a linear layer."""

    def __call__(self, use: TiledWeight, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor: ...


class TiledWeight:
    """One parameter with its tiles, as torch functions use it."""

    def __init__(
        self,
        whole: ManagedParameter,
        unsharder: Unsharder,
        materializer: Materializer,
        trainer: TileGradientTaker | None = None,
        make_logits: MakeLogits | None = None,
    ) -> None:
        self.whole = whole
        self._unsharder = unsharder
        self._access = unsharder.access
        self._materializer = materializer
        self.trainer = trainer  # None before `prepare`
        # Replaces a linear layer whose outputs are logits over a vocabulary: `tiling/lazy_logits.py`.
        self.make_logits = make_logits

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        if inside_func_transform():
            return NotImplemented
        function = _FUNCTIONS.get(func) or edit_by(func)
        return NotImplemented if function is None else function(self, *args, **keywords)

    @property
    def parameter(self) -> nn.Parameter:
        return self.whole.parameter

    @property
    def tiles(self) -> list[ManagedParameter]:
        return self.whole.tiles

    def handles(self) -> list[SavedHandle | None]:
        """Return what autograd holds instead of the tiles' values."""
        return [SavedHandle(tile, tile.shape, tile.stride, 0) for tile in self.tiles]

    def with_tile(
        self, tile: ManagedParameter, work: Callable[[torch.Tensor], Result], handle: SavedHandle | None = None
    ) -> Result:
        """Return `work` of a tile's values: the current ones, or (with a handle) the saved ones, or raise.

        A separate function, so that no local variable refers to the values when the next tile is fetched.
        """
        source = self._access.sources.of(tile.unit)
        with held():
            self._materializer.settle(self.whole.unit)
            if handle is not None:
                value = self._unsharder.hooks.restore(handle)
            else:
                value = tile.of(self._access.acquire(tile.unit))
            source.pin(tile.unit)
        try:
            return work(value)
        finally:
            source.unpin(tile.unit)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Return some of its rows, in separate memory."""
        shape = (last - first, *self.whole.shape[1:])
        copied = torch.empty(shape, dtype=self.whole.unit.compute_dtype, device=self.whole.cell.device)
        with torch.no_grad():
            for tile in self.tiles:
                start, stop = max(first, tile.first_row), min(last, tile.first_row + tile.shape[0])
                if start < stop:
                    rows = slice(start - tile.first_row, stop - tile.first_row)
                    self.with_tile(tile, partial(_copy_rows, copied[start - first : stop - first], rows))
        return copied

    def row(self, number: int) -> torch.Tensor:
        """Return one row as a view: writing to it changes the weight."""
        tile = next(tile for tile in reversed(self.tiles) if tile.first_row <= number)
        with held():
            self._materializer.settle(self.whole.unit)
            row = tile.of(self._access.acquire(tile.unit))[number - tile.first_row]
            self._access.may_change(tile)
        return row

    def is_copying(self) -> bool:
        """True while a state_dict is being made."""
        return self._unsharder.owner.parameter_store.state_dicts.is_open

    def edit(self, work: Callable[[ManagedParameter, torch.Tensor], object]) -> None:
        """Call `work` to change each tile's values, in order."""
        with held(), ordinary_tensors(), torch.no_grad():
            self._materializer.settle(self.whole.unit)
            for tile in self.tiles:
                self._edit_tile(tile, work)
            self.whole.state.replace()

    def _edit_tile(self, tile: ManagedParameter, work: Callable[[ManagedParameter, torch.Tensor], object]) -> None:
        flat = self._access.acquire(tile.unit)
        work(tile, tile.of(flat))
        self._access.store(tile, flat)


class Saved:
    """Handles of tiles in a graph, released after a backward that does not retain the graph."""

    def __init__(self, use: TiledWeight) -> None:
        self._use = use
        self._handles = use.handles()

    def with_tile(self, number: int, work: Callable[[torch.Tensor], Result]) -> Result:
        handle = self._handles[number]
        if handle is None:
            raise RuntimeError("Trying to backward through the graph a second time: its saved values were freed")
        result = self._use.with_tile(self._use.tiles[number], work, handle)
        if not keeps_graph():
            self._handles[number] = None
        return result


class WeightGradient:
    """Destination of a tiled weight's gradient: tile by tile to the update, or whole to `torch.autograd.grad`."""

    def __init__(self, use: TiledWeight, ctx: Any) -> None:
        self._use = use
        self._whole: torch.Tensor | None = None
        self.is_wanted: bool = ctx.needs_input_grad[1]
        self._taker = use.trainer if use.whole.group is not None else None
        if self.is_wanted and self._taker is not None:
            try:
                self.is_wanted = will_execute_node(ctx.next_functions[1][0])
            except RuntimeError:
                self._taker = None  # torch.autograd.grad(..., weight)

    def add(self, tile: ManagedParameter, gradient: torch.Tensor) -> None:
        if self._taker is not None:
            with held():
                self._taker.on_tile_gradient(tile, gradient)
            return
        if self._whole is None:
            self._whole = gradient.new_empty(self._use.whole.shape)
        tile.rows_of(self._whole).copy_(gradient)

    def result(self) -> torch.Tensor | None:
        """Return the gradient for autograd."""
        return None if self._whole is None else self._whole.to(self._use.parameter.dtype)


def columns(tile: ManagedParameter) -> slice:
    """Return the features that correspond to a tile's rows."""
    return slice(tile.first_row, tile.first_row + tile.shape[0])


class TiledLinear(torch.autograd.Function):
    """`F.linear`: the rows of a tile are output features."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None, use: TiledWeight
    ) -> torch.Tensor:
        ctx.use = use
        ctx.save_for_backward(x)
        ctx.saved = Saved(use) if ctx.needs_input_grad[0] else None
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(len(rows), use.whole.shape[0])
        for tile in use.tiles:
            use.with_tile(tile, partial(linear, rows, bias, tile, out[:, columns(tile)]))
        return out.view(*x.shape[:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return (*linear_backward(ctx, ctx.use, ctx.saved, x, gradient), None)


def linear_backward(
    ctx: Any, use: TiledWeight, saved: Saved, x: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input, weight and bias: the first three arguments of a function."""
    rows = x.reshape(-1, x.shape[-1])
    of_out = gradient.reshape(-1, gradient.shape[-1])
    of_weight = WeightGradient(use, ctx)
    of_x: torch.Tensor | None = None
    for number, tile in reversed(list(enumerate(use.tiles))):
        part = of_out[:, columns(tile)]
        if ctx.needs_input_grad[0]:
            of_x = saved.with_tile(number, partial(add_product, of_x, part))
        if of_weight.is_wanted:
            of_weight.add(tile, part.t() @ rows)
    of_bias = of_out.sum(0) if ctx.needs_input_grad[2] else None
    return of_x.view_as(x) if of_x is not None else None, of_weight.result(), of_bias


class TiledConv1D(torch.autograd.Function):
    """`torch.addmm(bias, x, weight)`: the rows of a tile are input features."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor, use: TiledWeight) -> torch.Tensor:
        ctx.use = use
        ctx.save_for_backward(x)
        ctx.saved = Saved(use) if ctx.needs_input_grad[0] else None
        ctx.bias_shape = bias.shape
        first, *others = use.tiles
        out = use.with_tile(first, lambda weight: torch.addmm(bias, x[:, columns(first)], weight.to(x.dtype)))
        for tile in others:
            use.with_tile(tile, partial(add_product, out, x[:, columns(tile)]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        use, saved, (x,) = ctx.use, ctx.saved, ctx.saved_tensors
        of_weight = WeightGradient(use, ctx)
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        for number, tile in reversed(list(enumerate(use.tiles))):
            if of_x is not None:
                of_x[:, columns(tile)] = saved.with_tile(number, lambda w: gradient @ w.to(gradient.dtype).t())
            if of_weight.is_wanted:
                of_weight.add(tile, x[:, columns(tile)].t() @ gradient)
        of_bias = gradient.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[2] else None
        return of_x, of_weight.result(), of_bias, None


class TiledEmbedding(torch.autograd.Function):
    """`F.embedding`: the rows of a tile are words. Fetches all tiles: only a repeating order is prefetched."""

    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, _: torch.Tensor, use: TiledWeight, padding: int, by_frequency: bool
    ) -> torch.Tensor:
        ctx.use, ctx.padding, ctx.by_frequency = use, padding, by_frequency
        ctx.save_for_backward(indices)
        words = indices.reshape(-1)
        num_words, width = use.whole.shape
        if len(words) and not 0 <= int(words.min()) <= int(words.max()) < num_words:
            raise IndexError("index out of range in self")
        out = torch.empty(len(words), width, dtype=use.whole.unit.compute_dtype, device=words.device)
        for tile in use.tiles:
            places, inside = _inside(words, tile)
            out.index_copy_(0, places, use.with_tile(tile, partial(torch.index_select, dim=0, index=inside)))
        return out.view(*indices.shape, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        use, (indices,) = ctx.use, ctx.saved_tensors
        words = indices.reshape(-1)
        of_out = gradient.reshape(len(words), -1)
        of_weight = WeightGradient(use, ctx)
        for tile in reversed(use.tiles if of_weight.is_wanted else []):
            places, inside = _inside(words, tile)
            padding = ctx.padding - tile.first_row if 0 <= ctx.padding - tile.first_row < tile.shape[0] else -1
            of_weight.add(
                tile,
                torch.ops.aten.embedding_dense_backward(
                    of_out.index_select(0, places), inside, tile.shape[0], padding, ctx.by_frequency
                ),
            )
        return None, of_weight.result(), None, None, None


def linear(
    rows: torch.Tensor, bias: torch.Tensor | None, tile: ManagedParameter, out: torch.Tensor, weight: torch.Tensor
) -> None:
    """Return one tile's outputs."""
    transposed = weight.to(rows.dtype).t()
    if bias is None:
        torch.mm(rows, transposed, out=out)
    else:
        torch.addmm(bias[columns(tile)], rows, transposed, out=out)


def add_product(total: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    weight = weight.to(x.dtype)
    return x @ weight if total is None else total.addmm_(x, weight)


def _copy_rows(into: torch.Tensor, rows: slice, values: torch.Tensor) -> None:
    into.copy_(values[rows])


def _inside(words: torch.Tensor, tile: ManagedParameter) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which words are in a tile, and their rows in it."""
    own = columns(tile)
    places = ((words >= own.start) & (words < own.stop)).nonzero().squeeze(1)
    return places, words.index_select(0, places) - tile.first_row


# ---------------------------------------------------------------------- replacements of torch functions


def _linear(use: TiledWeight, input: Any, weight: Any, bias: Any = None) -> Any:
    if weight is not use.parameter or not _is_ordinary(input) or not (bias is None or bias.dim() == 1):
        return NotImplemented
    x, bias, was_cast = _as_autocast(input, bias)
    if not was_cast and x.dtype != use.whole.unit.compute_dtype:
        return NotImplemented  # let torch raise its own error
    with torch.autocast(x.device.type, enabled=False):
        if use.make_logits is not None and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return use.make_logits(use, x, bias)
        return TiledLinear.apply(x, weight, bias, use)  # type: ignore[no-untyped-call]


def _addmm(use: TiledWeight, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if mat2 is not use.parameter or beta != 1 or alpha != 1 or not _is_ordinary(mat1) or mat1.dim() != 2:
        return NotImplemented
    x, bias, was_cast = _as_autocast(mat1, input)
    if not was_cast and x.dtype != use.whole.unit.compute_dtype:
        return NotImplemented
    with torch.autocast(x.device.type, enabled=False):
        return TiledConv1D.apply(x, mat2, bias, use)  # type: ignore[no-untyped-call]


def _embedding(
    use: TiledWeight,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001 - only with max_norm
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if weight is not use.parameter or max_norm is not None or sparse or not _is_ordinary(input):
        return NotImplemented
    padding = -1 if padding_idx is None else padding_idx % use.whole.shape[0]
    return TiledEmbedding.apply(input, weight, use, padding, scale_grad_by_freq)  # type: ignore[no-untyped-call]


def _detach(use: TiledWeight, _: Any) -> Any:
    return use.rows(0, use.whole.shape[0]) if use.is_copying() else NotImplemented


def _getitem(use: TiledWeight, target: Any, index: Any) -> Any:
    """Return a row while the model is built: an embedding sets its padding row to zero."""
    if target is not use.parameter or type(index) is not int or use.trainer is not None or torch.is_grad_enabled():
        return NotImplemented
    num_rows = use.whole.shape[0]
    return use.row(index % num_rows) if -num_rows <= index < num_rows else NotImplemented


def _copy(use: TiledWeight, target: Any, source: Any, non_blocking: bool = False) -> Any:  # noqa: ARG001
    """`load_state_dict`: the old values are not needed."""
    if target is not use.parameter or torch.is_grad_enabled() or not _is_ordinary(source):
        return NotImplemented
    values = source.expand(use.whole.shape)
    use.edit(lambda tile, into: into.copy_(tile.rows_of(values)))
    return target


def _is_ordinary(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and (type(tensor) is torch.Tensor or isinstance(tensor, nn.Parameter))


def _as_autocast(x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    """Return the arguments as autocast would pass them to the operation."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype is torch.float64:
        return x, bias, False
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), bias.to(dtype) if bias is not None else None, True


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    torch.Tensor.detach: _detach,
    torch.Tensor.copy_: _copy,
    torch.Tensor.__getitem__: _getitem,
}
