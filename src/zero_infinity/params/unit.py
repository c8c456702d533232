"""Units: the parameters of one module, contiguous in one block and fetched together.

One sequential read fetches a layer's weight and bias. Each parameter starts at a multiple of 64 elements, which keeps
vectorised kernels on slices bit-identical to kernels on the whole tensor. This module owns the layout; when bytes are
moved, and by what, is decided elsewhere.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero_infinity._torch import no_torch_function, version_of
from zero_infinity.errors import UsageError
from zero_infinity.params.dtensor import is_distributed, local_of
from zero_infinity.params.unit_state import ParameterState, Pending, UnitState
from zero_infinity.policy.alignment import round_up_elements
from zero_infinity.policy.partition import ONE_RANK, Sharding, ShardLayout, Span
from zero_infinity.policy.unit_sizes import stored_bytes
from zero_infinity.storage.block import Block

# The attribute that holds a parameter's ManagedParameter.
ATTRIBUTE = "_zero_infinity"


class GradientTaker(Protocol):
    """Takes a parameter's gradient once autograd has accumulated it."""

    def __call__(self, parameter: torch.Tensor, /) -> None: ...

    def gradient(self) -> torch.Tensor | None:
        """Return what `.grad` is when autograd's is None."""

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Do what `p.grad = gradient` does."""


class TiledUse(Protocol):
    """How a parameter with tiles is used without being materialized."""

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Run a torch function tile by tile; `NotImplemented` if it needs the whole parameter."""

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Return some of its rows, in separate memory."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class ManagedParameter:
    """One of the user's parameters, and the location of its elements (for a DTensor: its local ones) in its unit.

    A large parameter may have *tiles*: groups of its rows, each in its own unit, that hold its values and are trained
    instead of it. Its own unit then has no block and is materialized from the tiles when the whole is needed.
    (`tiling/tile_plan.py`)
    """

    parameter: nn.Parameter
    name: str
    unit: Unit
    offset: int  # in elements from the start of the unit
    shape: torch.Size
    stride: tuple[int, ...]
    cell: torch.Tensor  # one element: NaN
    offloaded_data: torch.Tensor  # the parameter's data while it is offloaded: the cell, expanded to the true shape
    plain_class: type[nn.Parameter]
    is_distributed: bool = False  # the local part of a DTensor
    state: ParameterState = field(default_factory=ParameterState)
    group: int | None = None  # index of the optimizer's parameter group; None: not trained
    gradient_hook: GradientTaker | None = None
    gradient_hook_handle: RemovableHandle | None = None
    tiles: list[ManagedParameter] = field(default_factory=list)
    tiled_use: TiledUse | None = None
    whole: ManagedParameter | None = None  # the parameter of which this is a tile...
    first_row: int = 0  # ...starting at this row

    @property
    def parts(self) -> list[ManagedParameter]:
        """The parameters that hold its values: its tiles, or itself."""
        return self.tiles or [self]

    @property
    def rows_of_a_tile(self) -> int | None:
        """None if it has no tiles."""
        return self.tiles[0].shape[0] if self.tiles else None

    def rename(self, unit_name: str, name: str) -> None:
        """Set the names once its module has one."""
        self.name = name
        self.unit.rename(unit_name)
        for tile in self.tiles:
            rows = f"[{tile.first_row}:{tile.first_row + tile.shape[0]}]"
            tile.rename(unit_name + rows, name + rows)

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this tile's rows of a tensor with the user's parameter's shape; all rows if this is not a tile."""
        return tensor if self.whole is None else tensor[self.first_row : self.first_row + self.shape[0]]

    def value(self) -> torch.Tensor:
        """Return the current values of the user's parameter."""
        known: ManagedParameter | None = self.parameter.__dict__.get(ATTRIBUTE)
        if known is not None and known.tiled_use is not None:
            return known.tiled_use.rows(self.first_row, self.first_row + self.shape[0])
        return self.rows_of(self.parameter.detach())

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.num_elements

    @property
    def spans(self) -> list[Span]:
        """Each rank's part of it, relative to its first element."""
        common = [span.overlap(self.offset, self.end) for span in self.unit.spans]
        return [Span(span.start - self.offset, span.stop - self.offset) for span in common]

    @property
    def version(self) -> int:
        """A number that changes with each change that autograd must detect, like a plain parameter's `_version`."""
        related = [self, *self.tiles, *([self.whole] if self.whole is not None else [])]
        with no_torch_function():
            return version_of(self.parameter) + sum(one.state.num_changes for one in related)

    def train_in(self, group: int) -> None:
        """The optimizer trains it, and its tiles, in this parameter group."""
        for one in (self, *self.tiles):
            one.group = group

    def use_tiles(self, use: TiledUse) -> None:
        """From now on torch functions use its tiles through `use`."""
        self.tiled_use = use

    def hook_gradient(self, hook: GradientTaker) -> None:
        """From now on `hook` takes its gradients."""
        self.gradient_hook = hook
        self.hook_gradient_last()

    def hook_gradient_last(self) -> None:
        """Register the gradient hook, if any, after all others; also on a frozen parameter, for later."""
        if self.gradient_hook is None:
            return
        with no_torch_function():
            if self.gradient_hook_handle is not None:
                self.gradient_hook_handle.remove()
            trained = self.parameter.requires_grad
            self.parameter.requires_grad_(True)
            self.gradient_hook_handle = self.parameter.register_post_accumulate_grad_hook(self.gradient_hook)
            self.parameter.requires_grad_(trained)

    def gradient(self) -> torch.Tensor | None:
        """Return what `.grad` is when autograd's is None."""
        return self.gradient_hook.gradient() if self.gradient_hook is not None else None

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Do what `p.grad = gradient` does."""
        if self.gradient_hook is not None:
            self.gradient_hook.set_gradient(gradient)
        else:
            with no_torch_function():
                self.parameter.grad = gradient

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of its unit's elements, in its own shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def flattened(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` (of this parameter's shape) flattened in the order of the unit's elements."""
        if tensor.stride() != self.stride:
            tensor = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device).copy_(
                tensor
            )
        return tensor.as_strided((self.num_elements,), (1,))


@dataclass(eq=False, slots=True)
class Unit:
    """Parameters that are contiguous and fetched together. `block` holds their stored elements in `dtype`."""

    name: str
    dtype: torch.dtype  # as stored
    compute_dtype: torch.dtype  # as seen by the module
    number: int  # the same on every rank
    shards: ShardLayout
    parameters: list[ManagedParameter] = field(default_factory=list)
    state: UnitState = field(default_factory=UnitState)
    # Saved tensors that autograd holds or held. No finalizers: an interrupt could strike inside one.
    handles: list[weakref.ref[object]] = field(default_factory=list)
    forget_handles_at: int = 8

    @property
    def num_elements(self) -> int:
        return self.shards.num_elements

    @property
    def spans(self) -> tuple[Span, ...]:
        """Each rank's shard."""
        return self.shards.spans

    @property
    def stored(self) -> Span:
        """The elements in `block`."""
        return self.shards.stored

    @property
    def owned(self) -> Span:
        """The elements that this rank updates."""
        return self.shards.owned

    @property
    def is_updated_early(self) -> bool:
        """True if an update was submitted before `optimizer.step()`, which has not been called yet."""
        return self.state.pending is Pending.UPDATE

    @property
    def is_stored_in_parts(self) -> bool:
        return self.shards.is_stored_in_parts

    @property
    def is_updated_in_parts(self) -> bool:
        return self.shards.is_updated_in_parts

    @property
    def stored_bytes(self) -> int:
        """Size of its block, even on a rank that stores nothing of it."""
        return stored_bytes(len(self.stored), self.dtype.itemsize)

    def saved(self, handle: object) -> None:
        """Autograd has saved a tensor over it and holds `handle` instead."""
        if len(self.handles) >= self.forget_handles_at and self.is_saved:
            self.forget_handles_at = 2 * len(self.handles) + 8
        self.handles.append(weakref.ref(handle))

    @property
    def is_saved(self) -> bool:
        """True if autograd holds saved tensors over it, or over the parameter of which it is a tile."""
        self.handles = [handle for handle in self.handles if handle() is not None]
        return bool(self.handles) or any(p.whole is not None and p.whole.unit.is_saved for p in self.parameters)

    def parameter_at(self, offset: int) -> ManagedParameter:
        """Return the parameter that contains the element at `offset`."""
        return next(p for p in reversed(self.parameters) if p.offset <= offset)

    def rename(self, name: str) -> None:
        """Set the names once its module has one."""
        self.name = name
        if self.state.block is not None:
            self.state.block.rename(name)

    @property
    def is_stored(self) -> bool:
        """True if it has a block."""
        return self.state.block is not None

    def the_block(self) -> Block:
        if self.state.block is None:
            raise RuntimeError(f"unit {self.name!r} has no block yet")
        return self.state.block


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the stride in which to store `tensor`: its own if it is dense (channels_last is kept), else row-major."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def make_unit(
    name: str,
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
    number: int = 0,
    sharding: Sharding = ONE_RANK,
    owner: int | None = None,
) -> Unit:
    """Return a unit of these parameters, in order; modules see it in `compute_dtype` on `device`.

    `owner`: the rank that updates all of it. None: it is cut as `sharding` says.
    """
    members = list(parameters)
    num_elements = sum(round_up_elements(local_of(parameter).numel()) for _, parameter in members)
    unit = Unit(name, dtype, compute_dtype, number, sharding.layout(num_elements, number, owner))
    offset = 0
    for full_name, parameter in members:
        # One cell per parameter, so that a write to an offloaded parameter that bypasses us is detected. (Holders of
        # packed tensors are bytes, and nobody else has them.)
        placeholder = math.nan if compute_dtype.is_floating_point else 0
        cell = torch.full((), placeholder, dtype=compute_dtype, device=device)
        local = local_of(parameter)
        known: ManagedParameter | None = parameter.__dict__.get(
            ATTRIBUTE
        )  # the stride of an offloaded parameter is not the true one
        if local is not parameter and compute_dtype != local.dtype:
            raise UsageError(
                f"parameter {full_name!r} is a DTensor of {local.dtype} and cannot be computed in {compute_dtype}\n"
                "  fix:   convert the model before parallelize_module, and leave param_dtype and compute_dtype out"
            )
        unit.parameters.append(
            ManagedParameter(
                parameter=parameter,
                name=full_name,
                unit=unit,
                offset=offset,
                shape=local.shape,
                stride=known.stride if known is not None else dense_stride(local.detach()),
                cell=cell,
                offloaded_data=cell.expand(local.shape),
                plain_class=plain_class_of(parameter),
                is_distributed=is_distributed(parameter),
            )
        )
        offset += round_up_elements(local.numel())
    return unit


def plain_class_of(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Return the class it has when it is not offloaded."""
    known: ManagedParameter | None = parameter.__dict__.get(ATTRIBUTE)
    return known.plain_class if known is not None else type(parameter)
