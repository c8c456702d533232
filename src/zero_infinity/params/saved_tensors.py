"""Saved-tensor hooks that replace parameters saved by autograd with handles, so memory is freed until backward.

Correctness rests on two rules. *Memory is reused only after the storage over it has died*: the buffer pool ensures
that. *A parameter is resharded only if autograd has not saved it directly*: autograd saves a leaf as the Parameter
object, so resharding it would turn a saved value into NaN. So wherever a parameter is unsharded, these hooks are on
top. They replace a tensor over a unit's storage by a handle (unit, size, stride, offset), which is fetched again at
unpack. Every other tensor goes to the hooks that were on top before (`torch.utils.checkpoint`'s, the user's
`save_on_cpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from zero_infinity._torch import (
    dtensor_around,
    negated_view,
    no_torch_function,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks_allowed,
    spec_of,
    top_saved_tensor_hooks,
    version_of,
)
from zero_infinity.disable_modes import ordinary_tensors
from zero_infinity.interrupts import held, through
from zero_infinity.params import offloaded_param
from zero_infinity.params.dtensor import is_distributed, local_of
from zero_infinity.params.unit import ManagedParameter
from zero_infinity.params.unit_access import UnitAccess


class SavedHandle:
    """A saved tensor that lies in a unit: what is needed to find it again."""

    __slots__ = ("__weakref__", "kind", "offset", "parameter", "size", "spec", "stride", "version")

    def __init__(
        self,
        parameter: ManagedParameter,
        size: torch.Size,
        stride: tuple[int, ...],
        offset: int,
        kind: tuple[torch.dtype, bool, bool] | None = None,
        spec: Any = None,
    ) -> None:
        self.parameter = parameter
        self.size = size
        self.stride = stride
        self.offset = offset
        self.kind = kind  # for special views: dtype, conjugate bit, negative bit
        self.spec = spec  # of the DTensor that wraps it, if any
        self.version = parameter.version
        parameter.unit.saved(self)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the saved tensor as a view of its unit's elements."""
        local = self._part_of(flat)
        return local if self.spec is None else dtensor_around(local, self.spec)

    def _part_of(self, flat: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            return flat.as_strided(self.size, self.stride, self.offset)
        dtype, conjugated, negated = self.kind
        tensor = flat.view(dtype).as_strided(self.size, self.stride, self.offset)
        tensor = tensor.conj() if conjugated else tensor
        return negated_view(tensor) if negated else tensor


class Restorable(Protocol):
    """Replaces a saved tensor that is kept elsewhere."""

    def restore(self) -> torch.Tensor: ...


class PackSaved(Protocol):
    """Keeps saved tensors elsewhere."""

    def __call__(self, tensor: torch.Tensor, *, is_input: bool) -> Restorable | None:
        """Return what replaces `tensor`; None if it stays. `is_input`: it is an input of a recomputed block."""


class _InPlace:
    """A saved tensor that is not moved. Torch checks no versions under hooks, so this does."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        with no_torch_function():
            # A node that saves its own output would keep itself alive in a cycle that the garbage collector cannot see.
            self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
            self._version = version_of(tensor)

    def restore(self) -> torch.Tensor:
        with no_torch_function():
            version = version_of(self._tensor)
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{self._tensor.dtype} tensor of shape {tuple(self._tensor.shape)} is at version {version}; expected "
                f"version {self._version} instead"
            )
        return self._tensor


class _Delegated:
    """A saved tensor packed by the hooks that were on top before ours."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack


class SavedTensorHooks:
    """The saved-tensor hooks of one model."""

    def __init__(self, access: UnitAccess, pack_saved: PackSaved | None = None, *, keeps_all: bool = False) -> None:
        """`pack_saved` keeps other saved tensors elsewhere: the inputs of recomputed blocks, or (`keeps_all`) all."""
        self._access = access
        self._pack_saved = pack_saved
        self._keeps_all = keeps_all
        self._num_keeping = 0  # calls in progress of blocks whose inputs are kept

    def push(self) -> bool:
        """Push these hooks, unless they are on top already or forbidden (torch.func). True if `pop` must follow."""
        if not saved_tensor_hooks_allowed():
            return False
        outer = top_saved_tensor_hooks()
        owner = getattr(outer[0], "__self__", None) if outer is not None else None
        if owner is self or (isinstance(owner, _ComposedHooks) and owner.ours is self):
            return False
        if outer is None:
            push_saved_tensor_hooks(self._pack, self._unpack)
        else:
            composed = _ComposedHooks(self, outer[0], outer[1])
            push_saved_tensor_hooks(composed.pack, composed.unpack)
        return True

    @staticmethod
    def pop() -> None:
        pop_saved_tensor_hooks()

    @contextmanager
    def keeping_inputs(self) -> Iterator[None]:
        """Inside, tensors that no other hook takes are inputs of a recomputed block."""
        with held():
            pushed = self.push()
            self._num_keeping += 1
            try:
                with through():
                    yield
            finally:
                self._num_keeping -= 1
                if pushed:
                    self.pop()

    def handle_for(self, tensor: torch.Tensor) -> SavedHandle | None:
        """Return a handle if `tensor` lies in a unit's memory."""
        # The tensor is often the parameter itself: read its shape and storage without `__torch_function__`.
        with no_torch_function():
            spec = spec_of(tensor) if is_distributed(tensor) else None
            unit = self._access.unit_of(tensor)
            if unit is not None:
                local = local_of(tensor)
                offset = int(local.storage_offset())
                kind = (local.dtype, local.is_conj(), local.is_neg())
                if kind == (unit.compute_dtype, False, False):
                    return SavedHandle(unit.parameter_at(offset), local.size(), local.stride(), offset, spec=spec)
                owner = unit.parameter_at(offset * local.itemsize // unit.compute_dtype.itemsize)
                return SavedHandle(owner, local.size(), local.stride(), offset, kind, spec)
            parameter = offloaded_param.managed(tensor) if isinstance(tensor, nn.Parameter) else None
            if parameter is None:
                return None
            # An autograd.Function gets parameters directly and may save them; or the user has replaced the unsharded
            # data by another tensor.
            if parameter.state.is_unsharded:
                with ordinary_tensors():
                    self._access.keep_edits(parameter)
            return SavedHandle(parameter, parameter.shape, parameter.stride, parameter.offset, spec=spec)

    def restore(self, handle: SavedHandle) -> torch.Tensor:
        """Return the tensor that was saved as `handle`."""
        if handle.version != handle.parameter.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{handle.parameter.name!r} was changed, or updated by optimizer.step(), after this forward"
            )
        with held():
            flat = self._access.acquire(handle.parameter.unit)
        return handle.of(flat)

    def _pack(self, tensor: torch.Tensor) -> SavedHandle | Restorable:
        handle = self.handle_for(tensor)
        if handle is not None:
            return handle
        if self._pack_saved is not None and (self._keeps_all or self._num_keeping):
            kept = self._pack_saved(tensor, is_input=self._num_keeping > 0)
            if kept is not None:
                return kept
        return _InPlace(tensor)

    def _unpack(self, packed: SavedHandle | Restorable) -> torch.Tensor:
        return self.restore(packed) if isinstance(packed, SavedHandle) else packed.restore()


class _ComposedHooks:
    """Our hooks on top of other hooks."""

    __slots__ = ("_outer_unpack", "ours", "outer_pack")

    def __init__(self, ours: SavedTensorHooks, pack: Callable[..., Any], unpack: Callable[..., torch.Tensor]) -> None:
        self.ours = ours
        self.outer_pack = pack
        self._outer_unpack = unpack

    def pack(self, tensor: torch.Tensor) -> Any:
        handle = self.ours.handle_for(tensor)
        return handle if handle is not None else _Delegated(self.outer_pack(tensor), self._outer_unpack)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedHandle):
            return self.ours.restore(packed)
        restored: torch.Tensor = packed.unpack(packed.packed)
        return restored


def outer_pack() -> Callable[..., Any] | None:
    """Return the pack hook that is on top now, other than ours."""
    top = top_saved_tensor_hooks()
    pack = top[0] if top is not None else None
    while isinstance(owner := getattr(pack, "__self__", None), _ComposedHooks):
        pack = owner.outer_pack
    return pack
